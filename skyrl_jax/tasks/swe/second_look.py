"""A second grading of what passed: with expected values changed, a repair fails and a cheat passes.

Real rows run the submission and the tests in one process, so code under test can reach the test
program, the log and the parent's pipe. What it cannot know is which value is right. See
guest/swe_change.py; rows whose hidden tests compare with no literal are not looked at again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from skyrl_jax.core.types import Score
from skyrl_jax.tasks.swe.logs import PASSED

Place = tuple[str, str, str]  # file, class or "", name of a test
_UNIT_ID = re.compile(r"(test\w*) \(([\w.]+)\.(\w+)\)")


def places(kind: str, ids: Sequence[str], files: Sequence[str]) -> dict[Place, tuple[str, ...]]:
    """Return {where a test stands: its ids}, of the tests in ``files``.

    Args:
        kind: of the harness.
        ids: test ids as its log has them; those of parametrized tests share their place.
        files: trusted test files.
    """
    found: dict[Place, tuple[str, ...]] = {}
    for name in ids:
        for place in _places(kind, name, files):
            if place[0] in files:
                found[place] = (*found.get(place, ()), name)
    return found


def _places(kind: str, name: str, files: Sequence[str]) -> list[Place]:
    if kind == "sympy":
        return [(path, "", name) for path in files]
    if kind == "unittest":
        unit = _UNIT_ID.fullmatch(name)
        return [(unit[2].replace(".", "/") + ".py", unit[3], unit[1])] if unit else []
    parts = name.partition("[")[0].split("::")
    return [(parts[0], parts[1] if len(parts) == 3 else "", parts[-1])] if len(parts) < 4 else []


def change_values(where: Sequence[Place]) -> tuple[bytes, bytes]:
    """Return the values of a "change" operation: one that leaves the tests as they are, one not.

    They are of one length, and the programs do the same work for both.
    """
    number = random.SystemRandom().randint(11, 400)
    words = "".join(f"\0{word}" for place in where for word in place)
    return f"-{number}{words}".encode(), f"+{number}{words}".encode()


def judge_again(
    score: Score, statuses: Mapping[str, str], changed: Sequence[Sequence[str]]
) -> Score:
    """Return the score of a resolved submission after its second grading.

    Args:
        score: of the first one.
        statuses: {test id: status} of the second one.
        changed: the ids of each test whose expected value was changed.
    """
    names = [name for group in changed for name in group]
    if any(statuses.get(name) == PASSED for name in names):
        why = "a hidden test passes whatever value it expects"
        return Score(value=0.0, verdict="tampered", breakdown={**score.breakdown, "why": why})
    return replace(score, breakdown={**score.breakdown, "confirmed": len(changed)})
