"""A light test runner: the parent stays clean, one forked child imports the code and runs tests.

The child prints ``PASSED id`` / ``FAILED id - message`` lines (the log) and sends the same facts
over a pipe. The parent alone prints the summary and sets the exit code.
"""

import _signal
import os
import sys

CUT = 48  # characters of one shown value
CPU_S = 0.3  # of all tests of a run together; past it the rest counts as not passed
_EVENTS = {"P": "PASSED", "F": "FAILED", "E": "ERROR"}


class OutOfTimeError(BaseException):
    """The child's CPU allowance is used up."""


def short(value):
    """Return a cut repr without addresses."""
    try:
        text = repr(value)
    except Exception as error:
        text = "<repr raised " + type(error).__name__ + ">"
    return cut(text)


def cut(text):
    """Return a repr without addresses, cut."""
    head, mark, tail = text.partition(" at 0x")
    if mark:
        text = head + tail[tail.find(">") :]
    return text if len(text) <= CUT else text[: CUT - 3] + "..."


def split_assert(line):
    """Return (left, right) of ``assert left == right``, or ``None``."""
    line = line.strip()
    if not line.startswith("assert "):
        return None
    body = line[7:]
    at = body.find(" == ")
    while at >= 0:
        left, right = body[:at], body[at + 4 :]
        try:
            compile(left, "left", "eval")
            compile(right, "right", "eval")
            return left, right
        except SyntaxError:
            at = body.find(" == ", at + 1)
    return None


def mismatch(call, got, want):
    """Return the line of a failed comparison."""
    return call + " = " + short(got) + ", want " + want


def raised(call, error, want):
    """Return the line of a call that raised."""
    return call + " raised " + type(error).__name__ + ", want " + want


def _explain(error, path, lines):
    """Return one line that says why a test failed."""
    trace, line, frame = error.__traceback__, 0, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line, frame = trace.tb_lineno, trace.tb_frame
        trace = trace.tb_next
    sides = split_assert(lines[line - 1]) if 0 < line <= len(lines) else None
    if sides is None or frame is None:
        text = str(error).partition("\n")[0][:CUT]
        return type(error).__name__ + (": " + text if text else "")
    if not isinstance(error, AssertionError):
        return raised(sides[0], error, sides[1])
    try:
        got = eval(sides[0], frame.f_globals, frame.f_locals)
    except BaseException as again:
        return raised(sides[0], again, sides[1])
    return mismatch(sides[0], got, sides[1])


def _write(fd, text):
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(fd, data) :]


def _emit(sink, event, name, message=""):
    flat = message.replace("\n", " ").replace("\t", " ")
    _write(1, _EVENTS[event] + " " + name + (" - " + flat if flat else "") + "\n")
    sink(event, name)


def _out_of_time(*_):
    raise OutOfTimeError


def _run_module(path, sink):
    with open(path, encoding="utf-8") as handle:
        text = handle.read()
    space = {"__name__": path[:-3].replace("/", "."), "__file__": path}
    try:
        exec(compile(text, path, "exec"), space)
    except OutOfTimeError:
        _emit(sink, "E", path, "timeout")
        return False
    except BaseException as error:
        _emit(sink, "E", path, _import_message(error))
        return True
    lines = text.splitlines()
    for name in [key for key in space if key.startswith("test_") and callable(space[key])]:
        full = path + "::" + name
        try:
            space[name]()
        except OutOfTimeError:
            _emit(sink, "F", full, "timeout")
            return False
        except BaseException as error:
            _emit(sink, "F", full, _explain(error, path, lines))
        else:
            _emit(sink, "P", full)
    return True


def _import_message(error):
    text = str(error.msg if isinstance(error, SyntaxError) else error).partition("\n")[0]
    return type(error).__name__ + (": " + text[:CUT] if text else "")


def _confine(cpu_s):
    """Give this process its CPU allowance, no input, and the tree on its path."""
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(1, 2)
    try:
        import resource

        limit = int(cpu_s) + 1  # for code that swallows the timer's exception
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass
    sys.dont_write_bytecode = True
    sys.path = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    sys.path.append(os.getcwd())
    _signal.signal(_signal.SIGPROF, _out_of_time)
    _signal.setitimer(_signal.ITIMER_PROF, cpu_s)


def _flush():
    """End the CPU allowance and flush; return True when it could be done."""
    _signal.setitimer(_signal.ITIMER_PROF, 0)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            return False
    return True


def _run_all(paths, sink, cpu_s):
    """Run test files in this process under a CPU allowance; return True when all has ended."""
    _confine(cpu_s)
    for path in paths:
        if not _run_module(path, sink):
            break
    return _flush()


def _child(work, pipe):
    os.setsid()
    if not work(lambda event, text: _write(pipe, event + "\t" + text + "\n")):
        os._exit(1)
    _write(pipe, "END\n")
    os._exit(0)


def run_here(paths, cpu_s=CPU_S):
    """Run test files without a fork (cheaper, and no witness); return the exit code."""
    results = {}
    ended = _run_all(paths, lambda event, name: results.update({name: event}), cpu_s)
    text, code = summary(results, "end" if ended else "exit")
    _write(1, text + "\n")
    return code


def _collect(pid, pipe, wall_s):
    """Return (the child's facts, "end" | "exit" | "signal" | "timeout")."""
    state = ["exit"]

    def expired(*_):
        state[0] = "timeout"
        try:
            os.killpg(pid, _signal.SIGKILL)
        except OSError:
            os.kill(pid, _signal.SIGKILL)

    _signal.signal(_signal.SIGALRM, expired)
    _signal.setitimer(_signal.ITIMER_REAL, wall_s, 1.0)
    data = b""
    while not data.endswith(b"END\n"):
        chunk = os.read(pipe, 65536)
        if not chunk:
            break
        data += chunk
    _, status = os.waitpid(pid, 0)
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    try:
        os.killpg(pid, _signal.SIGKILL)  # whatever the tests left behind
    except OSError:
        pass
    if state[0] != "timeout":
        ended = data.endswith(b"END\n") and status == 0
        state[0] = "end" if ended else "signal" if os.WIFSIGNALED(status) else "exit"
    return data.decode("utf-8", "replace").split("\n"), state[0]


def in_child(work, wall_s=30.0):
    """Call ``work(sink)`` in a forked child; return (the child's facts, how it ended)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            _child(work, write)
        finally:
            os._exit(1)
    os.close(write)
    facts, state = _collect(pid, read, wall_s)
    os.close(read)
    return [fact.split("\t", 1) for fact in facts if "\t" in fact], state


def run(paths, cpu_s=CPU_S, wall_s=30.0):
    """Run test files in a forked child; return ({id: event}, how the child ended)."""
    facts, state = in_child(lambda sink: _run_all(paths, sink, cpu_s), wall_s)
    return {name: event for event, name in facts if event in _EVENTS}, state


def summary(results, state):
    """Return (text, exit code) of a run."""
    passed = sum(event == "P" for event in results.values())
    failed = len(results) - passed
    text = str(passed) + " passed, " + str(failed) + " failed"
    if state != "end":
        text += " (" + state + ")"
    return text, 0 if passed and not failed and state == "end" else 1


def main(argv):
    """Run the test files named on the command line."""
    text, code = summary(*run(argv))
    _write(1, text + "\n")
    return code
