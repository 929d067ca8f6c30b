"""Reading test logs: {test id: status}, per test program. They never raise, whatever the text.

A test that is reported with two different statuses gets CONFLICT: code under test shares the log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

PASSED, FAILED, ERROR, SKIPPED, CONFLICT = "PASSED", "FAILED", "ERROR", "SKIPPED", "CONFLICT"

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_UNITTEST = re.compile(
    r"^(test\w*) \(([\w.]+)\)(?:.*?) \.\.\. (ok|FAIL|ERROR|skipped|expected failure)"
)
_SYMPY = re.compile(r"^(test_\w+) +(ok|F|E|f|X|s|Slow|K)\b")
_SYMPY_WORDS = {"ok": PASSED, "F": FAILED, "E": ERROR}
_UNITTEST_WORDS = {"ok": PASSED, "FAIL": FAILED, "ERROR": ERROR}


def parse_light_log(log: str) -> dict[str, str]:
    """Read the light runner: ``PASSED id``, ``FAILED id - message``."""
    return _status_first(log, (PASSED, FAILED, ERROR))


def parse_pytest_log(log: str) -> dict[str, str]:
    """Read pytest's ``-rA`` summary; ids with spaces are also filed under their first word."""
    return with_first_words(_status_first(log, (PASSED, FAILED, ERROR, SKIPPED)))


def with_first_words(statuses: Mapping[str, str]) -> dict[str, str]:
    """Add ids cut at their first space, as SWE-bench's parser and so its rows name them.

    Where several tests share the cut id, it has passed only if all of them have.
    """
    found = dict(statuses)
    for name, status in statuses.items():
        short, space, _ = name.partition(" ")
        if space and short not in statuses:
            found[short] = status if found.get(short, status) == status else FAILED
    return found


def parse_sympy_log(log: str) -> dict[str, str]:
    """Read sympy.test(verbose=True): ``test_name ok``, ``F`` or ``E``; other letters are skips."""
    statuses: dict[str, str] = {}
    for line in log.splitlines():
        found = _SYMPY.match(line.strip())
        if found:
            _note(statuses, found.group(1), _SYMPY_WORDS.get(found.group(2), SKIPPED))
    return statuses


def parse_unittest_log(log: str) -> dict[str, str]:
    """Read ``unittest -v`` (and Django): ``test_name (path.Class) ... ok``."""
    statuses: dict[str, str] = {}
    for line in log.splitlines():
        found = _UNITTEST.match(line.strip())
        if found:
            status = _UNITTEST_WORDS.get(found.group(3), SKIPPED)
            place = found.group(2).removesuffix(f".{found.group(1)}")  # Python 3.11 adds the method
            _note(statuses, f"{found.group(1)} ({place})", status)
    return statuses


PARSERS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "light": parse_light_log,
    "pytest": parse_pytest_log,
    "sympy": parse_sympy_log,
    "unittest": parse_unittest_log,
}


def _status_first(log: str, words: tuple[str, ...]) -> dict[str, str]:
    statuses: dict[str, str] = {}
    for line in log.splitlines():
        word, _, rest = _ESCAPES.sub("", line).partition(" ")
        name = rest.partition(" - ")[0].strip()
        if word in words and name:
            _note(statuses, name, word)
    return statuses


def _note(statuses: dict[str, str], name: str, status: str) -> None:
    statuses[name] = status if statuses.get(name, status) == status else CONFLICT
