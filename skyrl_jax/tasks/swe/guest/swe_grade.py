"""Grading, run inside a fresh sandbox: one request on stdin, one log with reports on stdout.

The request is a list of operations, each two length-framed byte strings (name and argument, value):

    apply            the submission; refused -> ``NO_APPLY``, nothing else happens
    apply_tests      the trusted test patch
    restore PATH     the file as committed (or gone when it was not)
    wipe PATH        remove a file or folder
    write PATH       write a file
    run              light runner on NUL-separated test files
    exec             a NUL-separated command line

After each run the parent prints ``REPORT <nonce> <state> <exit code> <facts>``; the nonce follows
the operations on stdin and is read only after the tests have ended, so code under test (whose
standard input is closed) does not have it.
"""

import os

import swe_runner

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


def _run(value):
    results, state = swe_runner.run(value.decode().split("\0"))
    text, code = swe_runner.summary(results, state)
    swe_runner._write(1, text + "\n")
    _report(state, code, [event + " " + name for name, event in results.items()])
    return code


def _exec(value):
    """Run a foreign test program; it may send facts through a pipe (see swe_pytest.py)."""
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
    lines = [" ".join(fact).replace("\t", " ") for fact in facts]
    _report("end" if code >= 0 else "signal", code, lines)
    return code if code >= 0 else 1


def _restore(path):
    _wipe(path)
    _spawn((*GIT, "checkout", "-q", "HEAD", "--", path), quiet=True)


def _apply(value, refused):
    if _spawn((*GIT, "apply", "--whitespace=nowarn", "-"), value) == 0:
        return True
    swe_runner._write(1, refused + "\n")
    return False


def perform(operations):
    """Carry out the operations in order; return the exit code."""
    code = 0
    for name, value in operations:
        verb, _, argument = name.partition(" ")
        if verb == "apply" and not _apply(value, "NO_APPLY"):
            return 3
        if verb == "apply_tests" and not _apply(value, "NO_TESTS"):
            return 4
        if verb == "restore":
            _restore(argument)
        elif verb == "wipe":
            _wipe(argument)
        elif verb == "write":
            _put(argument, value)
        elif verb in ("run", "exec"):
            code = _run(value) if verb == "run" else _exec(value)
    return code


def main():
    """Read the request, do it, return the exit code."""
    return perform(read_request())
