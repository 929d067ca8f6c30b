"""What the agent reads: normalised so that the same commands give the same bytes, and cut."""

from __future__ import annotations

import re

_RULES = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"), "0x0"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"), "TIME"),
    (re.compile(r"\b([A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d(:\d\d)?( \d{4})?\b"), "TIME"),
    (re.compile(r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b"), "TIME"),
    (re.compile(r"\b(in|took) \d+(?:\.\d+)? ?(?:ms|s|sec|seconds)\b"), r"\1 0s"),
    (re.compile(r"\b(real|user|sys)(\s+)\d+m\d+[.,]\d+s"), r"\1\g<2>0s"),
    (re.compile(r"/tmp/(?:tmp|pytest-of-)[\w./-]*"), "/tmp/TMP"),
    (re.compile(r"\b(pid|PID)([ =:]+)\d+"), r"\1\g<2>0"),
    (re.compile(r"\r\n?"), "\n"),
)  # fmt: skip


def normalise(text: str) -> str:
    """Replace times, addresses, temporary paths and process ids by constants."""
    for pattern, constant in _RULES:
        text = pattern.sub(constant, text)
    return text


def failure_messages(log: str) -> list[str]:
    """Return what went wrong in a run of the light runner, one line each, without test names."""
    found = []
    for line in log.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("FAILED", "ERROR") and rest:
            name, dash, message = rest.partition(" - ")
            found.append(message if dash else name)
    return found


def test_log(output: str) -> str:
    """Return the part of the edit tool's output that the test run printed."""
    return output.partition("\n")[2]
