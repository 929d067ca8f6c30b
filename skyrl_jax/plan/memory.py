"""What the compiler says when a program does not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
# Two wordings. "the total memory required for HLO temporaries (20.19G) exceeds available HBM
# (15.75G)": the figure is the total, arguments included. "Used 20.19G of 15.75G hbm".
_FORMS = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A refusal: bytes of one device, and the sentence itself."""

    total: int
    available: int
    words: str


def read_oom(text: str) -> OutOfMemory | None:
    """Return what a compiler's error says of HBM; ``None`` where it is about something else."""
    for form in _FORMS:
        found = form.search(text)
        if found:
            total, available = _bytes(*found.group(1, 2)), _bytes(*found.group(3, 4))
            words = " ".join(_sentence(text, found.start(), found.end()).split())
            return OutOfMemory(total=total, available=available, words=words)
    return None


def _sentence(text: str, start: int, end: int) -> str:
    """Return the line that holds a match, up to the match's end."""
    return text[text.rfind("\n", 0, start) + 1 : end]


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
