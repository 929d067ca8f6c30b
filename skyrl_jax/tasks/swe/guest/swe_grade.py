"""Grading, run inside a fresh sandbox: one request on stdin, one log with reports on stdout.

The request is a list of operations, each two length-framed byte strings (name and argument, value):

    apply            the submission; refused -> ``NO_APPLY``, nothing else happens
    apply_tests      the trusted test patch
    restore PATH     the file as committed (or gone when it was not)
    wipe PATH        remove a file or folder
    write PATH       write a file
    change           expected values of trusted tests are changed (see swe_change.py)
    restore_config   what the submission did to files that steer a test program or lie among the
                     tests, but for the NUL-separated paths given, is undone
    run              light runner on NUL-separated test files
    check            sealed tests: path, imports and calls, NUL-separated (see swe_check.py)
    exec             a NUL-separated command line

After each run the parent prints ``REPORT <nonce> <state> <exit code> <facts>``; the nonce follows
the operations on stdin and is read only after the tests have ended, so code under test (whose
standard input is closed) does not have it; this process's memory and descriptors are closed to it.
What sealed tests expect comes the same way, before it.
"""

import os

import swe_check
import swe_runner

# They steer pytest or Python itself; no repair needs them to be graded.
STEERING = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
)
# SWE-bench's own split: what has such a word in its path belongs to the test patch, so no repair
# needs it, and hidden tests import helpers from there.
TESTS = ("test", "tests", "testing", "e2e")
GIT = (
    "git",
    "-c",
    "safe.directory=*",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
)


def _read_exact(count):
    data = b""
    while len(data) < count:
        chunk = os.read(0, min(1 << 20, count - len(data)))
        if not chunk:
            raise EOFError("request ended early")
        data += chunk
    return data


def _read_number():
    digits = b""
    while True:
        byte = os.read(0, 1)
        if byte in (b"\n", b""):
            return int(digits)
        digits += byte


def _read_answers():
    return _read_exact(_read_number()).decode()


def read_request():
    """Return the operations [(name, value bytes)]."""
    return [
        (_read_exact(_read_number()).decode(), _read_exact(_read_number()))
        for _ in range(_read_number())
    ]


def _spawn(argv, data=b"", quiet=False):
    """Run a program with ``data`` as its input; return its exit code (negative: signal)."""
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, read, 0), (os.POSIX_SPAWN_CLOSE, write)]
    if quiet:
        actions.append((os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0))
    pid = os.posix_spawnp(argv[0], list(argv), os.environ, file_actions=actions)
    os.close(read)
    try:
        while data:
            data = data[os.write(write, data) :]
    except BrokenPipeError:
        pass
    os.close(write)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wipe(path):
    if os.path.isdir(path) and not os.path.islink(path):
        for name in os.listdir(path):
            _wipe(path + "/" + name)
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _put(path, data):
    folder = os.path.dirname(path)
    parts = folder.split("/") if folder else []
    for count in range(1, len(parts) + 1):  # a link or file in the way is the patch's doing
        place = "/".join(parts[:count])
        if os.path.islink(place) or (os.path.exists(place) and not os.path.isdir(place)):
            os.unlink(place)
    if folder:
        os.makedirs(folder, exist_ok=True)
    if os.path.lexists(path):
        _wipe(path)
    with open(path, "wb") as handle:
        handle.write(data)


def _report(state, code, facts):
    """Print the parent's own line; the rest of stdin is the nonce."""
    nonce = b""
    while len(nonce) < 16:
        chunk = os.read(0, 16 - len(nonce))
        if not chunk:
            break
        nonce += chunk
    line = "REPORT " + nonce.decode() + " " + state + " " + str(code)
    swe_runner._write(1, "\n" + line + "".join("\t" + fact for fact in facts) + "\n")


def _run(results, state):
    text, code = swe_runner.summary(results, state)
    swe_runner._write(1, text + "\n")
    _report(state, code, [event + " " + name for name, event in results.items()])
    return code


def _exec(value, changed):
    """Run a foreign test program; it may send facts through a pipe (see swe_pytest.py).

    ``changed``: numbers of the tests that were changed, for the report.
    """
    read, write = os.pipe()
    os.set_inheritable(write, True)
    os.environ["SWE_FACTS_FD"] = str(write)
    null = os.open("/dev/null", os.O_RDONLY)
    argv = value.decode().split("\0")
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, 1, 2)]
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions)
    os.close(write)
    data = b""
    while True:
        chunk = os.read(read, 65536)
        if not chunk:
            break
        data += chunk
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    facts = [fact.split("\t", 1) for fact in data.decode("utf-8", "replace").split("\n") if fact]
    lines = ["C " + str(at) for at in changed]
    lines += [" ".join(fact).replace("\t", " ") for fact in facts if fact[0] != "C"]
    _report("end" if code >= 0 else "signal", code, lines)
    return code if code >= 0 else 1


def _restore(path):
    _wipe(path)
    _spawn((*GIT, "checkout", "-q", "HEAD", "--", path), quiet=True)


def _capture(argv, data=b""):
    """Return what a program prints that reads all its input first."""
    read, write = os.pipe()
    source, sink = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, write, 1)]
    actions.append((os.POSIX_SPAWN_CLOSE, sink))
    pid = os.posix_spawnp(argv[0], list(argv), os.environ, file_actions=actions)
    os.close(write)
    os.close(source)
    with open(sink, "wb") as handle:
        try:
            handle.write(data)
            handle.flush()
        except BrokenPipeError:
            pass
    with open(read, "rb") as handle:
        found = handle.read()
    os.waitpid(pid, 0)
    return found


def steers(path):
    """Say whether a file can steer a test program, or lies among the tests."""
    parts = path.lower().split("/")
    name = parts[-1]
    return (
        name in STEERING
        or name.endswith((".pth", ".pyc", "_test.py"))
        or name.startswith("test_")
        or any(part in TESTS for part in parts)
        # an installed package's record: its entry points are loaded as plugins
        or any(part.endswith((".dist-info", ".egg-info")) for part in parts)
    )


def _through_link(path):
    parts = path.split("/")
    return any(os.path.islink("/".join(parts[:count])) for count in range(1, len(parts)))


def _restore_config(diff, kept):
    """Undo what a diff, as git itself reads it, did to the files that steer a test program."""
    counted = _capture((*GIT, "apply", "--numstat", "-z", "-"), diff).split(b"\0")
    gone = (*GIT, "diff", "--name-only", "-z", "--no-renames", "--diff-filter=DT", "HEAD")
    names = [line.split(b"\t", 2)[-1] for line in counted] + _capture(gone).split(b"\0")
    paths = {os.fsdecode(name) for name in names} - set(kept)
    steering = sorted(path for path in paths if steers(path))
    for path in steering:  # a link in place of a folder comes before what lay in the folder
        if not _through_link(path):
            _wipe(path)
    listed = b"".join(os.fsencode(path) + b"\0" for path in steering)
    _spawn((*GIT, "checkout-index", "-f", "-q", "-z", "--stdin"), listed, quiet=True)


def _apply(value, refused):
    if _spawn((*GIT, "apply", "--whitespace=nowarn", "-"), value) == 0:
        return True
    swe_runner._write(1, refused + "\n")
    return False


def _change(value):
    import swe_change  # ast costs milliseconds, which synthetic rows do not pay

    return swe_change.change(value.decode())


def perform(operations):
    """Carry out the operations in order; return the exit code."""
    code, diff, changed = 0, b"", ()
    for name, value in operations:
        verb, _, argument = name.partition(" ")
        diff = value if verb == "apply" else diff
        if verb in _REFUSED and not _apply(value, _REFUSED[verb][0]):
            return _REFUSED[verb][1]
        if verb == "restore_config":
            _restore_config(diff, value.decode().split("\0"))
        elif verb in _FILES:
            _FILES[verb](argument, value)
        elif verb == "change":
            changed = _change(value)
        elif verb == "exec":
            code = _exec(value, changed)
        elif verb in _RUNS:
            code = _RUNS[verb](value)
    return code


_REFUSED = {"apply": ("NO_APPLY", 3), "apply_tests": ("NO_TESTS", 4)}
_FILES = {
    "restore": lambda path, value: _restore(path),
    "wipe": lambda path, value: _wipe(path),
    "write": _put,
}
_RUNS = {
    "run": lambda value: _run(*swe_runner.run(value.decode().split("\0"))),
    "check": lambda value: _run(*swe_check.check(value.decode(), _read_answers)),
}


def main():
    """Read the request, do it, return the exit code."""
    swe_check.close_memory()
    return perform(read_request())
