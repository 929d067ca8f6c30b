"""Unified diffs: writing them for known files, and reading which files one touches."""

from __future__ import annotations

import difflib
import itertools
import re

_HEADER = re.compile(r"^diff --git (?:\"?a/)(.*?)\"? \"?b/(.*?)\"?$", re.MULTILINE)


def change_diff(path: str, before: str, after: str) -> str:
    """Return a diff of one text file that ``git apply`` takes."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{path}",
        f"b/{path}",
    )
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


def new_file_diff(path: str, text: str) -> str:
    """Return a diff that adds a file (``text`` ends with a newline)."""
    lines = text.splitlines()
    body = "".join(f"+{line}\n" for line in lines)
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n{body}"
    )


def touched_paths(diff: str) -> tuple[str, ...]:
    """Return every path that a git diff names, old and new."""
    names: dict[str, None] = {}
    for old, new in _HEADER.findall(diff):
        names[old] = None
        names[new] = None
    return tuple(names)


def added_files(diff: str) -> dict[str, str] | None:
    """Return {path: text} when a diff only adds whole text files, else ``None``."""
    files: dict[str, str] = {}
    starts = [match.start() for match in _HEADER.finditer(diff)] + [len(diff)]
    for start, end in itertools.pairwise(starts):
        part = diff[start:end]
        path = _HEADER.match(part)
        head, mark, body = part.partition("\n@@ ")
        lines = body.split("\n")[1:]
        plain = mark and "\nnew file mode 100644" in head and "\n--- /dev/null\n" in head + "\n"
        if path is None or not plain or lines.pop() != "":
            return None
        if not all(line.startswith("+") for line in lines):
            return None
        files[path.group(2)] = "".join(line[1:] + "\n" for line in lines)
    return files
