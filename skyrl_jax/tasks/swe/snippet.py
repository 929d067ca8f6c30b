"""The shortest edit of a line: the changed words and as little after them as makes them unique.

It begins at the bug itself: a small causal policy can point at a word that looks wrong to it, but
the words before that one were read before anything looked wrong.
"""

from __future__ import annotations

import re

# A word: a name, a number, a quoted text, an operator of two characters, or any other character.
_WORD = re.compile(r"[A-Za-z_]\w*|\d+|'[^']*'|\"[^\"]*\"|[<>=!]=|[-+*/]=|//|\S")


def edit_snippet(buggy: str, fixed: str, text: str) -> tuple[str, str]:
    """Return (old, new) for a str_replace edit that turns ``buggy`` into ``fixed``.

    ``old`` is the changed words and one word after them, and more where it would occur more than
    once in ``text`` otherwise (to the right first); the whole line at most.

    Example: ``edit_snippet("return i - 1", "return i + 1", ...)`` is ``("- 1", "+ 1")``.

    Args:
        buggy: the wrong line, which occurs once in ``text``.
        fixed: the right line.
        text: the file.
    """
    before, after = list(_WORD.finditer(buggy)), list(_WORD.finditer(fixed))
    shorter = min(len(before), len(after))
    left = 0
    while left < shorter and before[left].group() == after[left].group():
        left += 1
    right = 0
    while right < shorter - left and before[-1 - right].group() == after[-1 - right].group():
        right += 1
    right = max(0, right - 1)
    while True:
        old, new = _cut(buggy, before, left, right), _cut(fixed, after, left, right)
        if _once(text, old) or (left, right) == (0, 0):
            return old, new
        if right:
            right -= 1
        else:
            left -= 1


def _once(text: str, part: str) -> bool:
    """Return whether ``part`` is at one place; places may overlap ("a a" is twice in "a a a")."""
    first = text.find(part)
    return bool(part) and first >= 0 and text.find(part, first + 1) < 0


def _cut(line: str, words: list[re.Match[str]], left: int, right: int) -> str:
    """Return the line without its first ``left`` and last ``right`` words."""
    kept = words[left : len(words) - right]
    return line[kept[0].start() : kept[-1].end()] if kept else ""
