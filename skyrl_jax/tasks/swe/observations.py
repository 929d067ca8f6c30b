"""What the agent reads of commands and tests: what varies between runs replaced by constants."""

from __future__ import annotations

import re

# Only what differs from run to run, in the form that programs print it: text of the repository
# (times, numbers, escapes in a source file) must come through unharmed.
_COUNTS = "passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?|tests ran|tests?"
_RULES = (
    (re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b"), "at 0x0"),
    (re.compile(rf"\b({_COUNTS}) in \d+\.\d+s(?: \(\d+:\d\d:\d\d\))?"), r"\1 in 0s"),
    (re.compile(r"/tmp/(?:tmp[a-z0-9_]{8}|pytest-of-\w+/pytest-\d+)\b"), "/tmp/TMP"),
)


def normalise(text: str) -> str:
    """Replace object addresses, durations of test programs and temporary paths by constants."""
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
