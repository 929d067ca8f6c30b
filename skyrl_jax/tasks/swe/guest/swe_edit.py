"""The edit tool, run inside the sandbox; with test files it also runs them in the same process.

    edit.py str_replace PATH OLD NEW [TEST ...]    edit.py create PATH TEXT
    edit.py insert PATH LINE TEXT                  edit.py view PATH [FIRST LAST]

The first line of the answer is ``ok`` or says what is wrong. Exit codes: 0 done (and tests pass),
1 tests fail, 2 the edit was refused.
"""

import os

import swe_runner

LIMIT = 1 << 20  # bytes of a file that the tool reads


class RefusedError(Exception):
    """The edit cannot be done; the text says why."""


def _number(text, why):
    """Return a line number; ``int`` alone takes signs, spaces and digits of other scripts."""
    digits = text[1:] if text.startswith("-") else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        raise RefusedError(why)
    return int(text)


def _read(path):
    try:
        if os.path.isdir(path):
            raise RefusedError("not a file: " + path)
        if os.path.getsize(path) > LIMIT:
            raise RefusedError("too large: " + path)
        with open(path, encoding="utf-8", newline="") as handle:
            return handle.read()
    except OSError:
        raise RefusedError("no file: " + path) from None
    except UnicodeDecodeError:
        raise RefusedError("not text: " + path) from None


def _save(path, text):
    try:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as handle:
            handle.write(text)
    except OSError as error:
        raise RefusedError("cannot write " + path + ": " + (error.strerror or "error")) from None


def str_replace(path, old, new):
    """Replace the only occurrence of ``old``."""
    text = _read(path)
    count = text.count(old) if old else 0
    if not old:
        raise RefusedError("old_str is empty")
    if count == 0:
        raise RefusedError("no match: " + old.strip().partition("\n")[0])
    if count > 1:
        raise RefusedError(str(count) + " matches: " + old.strip().partition("\n")[0])
    if old == new:
        raise RefusedError("no change: " + old.strip().partition("\n")[0])
    _save(path, text.replace(old, new))
    return "ok"


def create(path, text):
    """Write a new file."""
    if os.path.exists(path):
        raise RefusedError("exists: " + path)
    _save(path, text)
    return "ok"


def insert(path, line, text):
    """Insert ``text`` after line number ``line`` (0 = at the top)."""
    lines = _read(path).splitlines(keepends=True)
    why = "insert_line must be 0 to " + str(len(lines))
    at = _number(line, why)
    if not 0 <= at <= len(lines):
        raise RefusedError(why)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    lines.insert(at, text if text.endswith("\n") else text + "\n")
    _save(path, "".join(lines))
    return "ok"


def view(path, first="1", last="-1"):
    """Return a folder's names, or numbered lines of a file."""
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
        marked = [name + "/" if os.path.isdir(os.path.join(path, name)) else name for name in names]
        return "\n".join(marked)
    lines = _read(path).splitlines()
    why = "view_range must be two line numbers"
    start, end = max(1, _number(first, why)), _number(last, why)
    end = len(lines) if end < 0 else min(end, len(lines))
    return "\n".join(str(at) + "\t" + lines[at - 1] for at in range(start, end + 1))


_COMMANDS = {"str_replace": (str_replace, 3), "create": (create, 2), "insert": (insert, 3)}


def main(argv):
    """Run one command; return the exit code."""
    try:
        if argv[0] == "view":
            swe_runner._write(1, view(*argv[1:4]) + "\n")
            return 0
        command, count = _COMMANDS[argv[0]]
        swe_runner._write(1, command(*argv[1 : count + 1]) + "\n")
    except RefusedError as refused:
        swe_runner._write(1, str(refused) + "\n")
        return 2
    tests = argv[count + 1 :]
    return swe_runner.run_here(tests) if tests else 0
