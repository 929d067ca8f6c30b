"""Hidden tests without what they expect: calls for the child, answers for its parent."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass
from typing import Any

from skyrl_jax.tasks.swe.guest.swe_runner import split_assert


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A test file in two parts. ``calls``: the value of a "check" operation; see swe_check.py."""

    calls: str
    answers: str


def seal(path: str, text: str) -> Sealed | None:
    """Split a test file, or return ``None`` when it is more than imports and plain asserts."""
    head, *tests = text.rstrip("\n").split("\n\n\ndef ")
    if not all(line.startswith(("from ", "import ", "\n")) for line in head.splitlines(True)):
        return None
    calls, answers, names = [path, head], [], []
    for test in tests:
        name, mark, body = test.partition("():\n")
        pairs = [literal_assert(line) for line in body.split("\n") if line.startswith("    ")]
        whole = len(pairs) == body.count("\n") + 1
        if not (mark and whole and name.startswith("test_") and name.isidentifier()):
            return None
        names.append(name)
        answers.append(name)
        for pair in pairs:
            if pair is None:
                return None
            calls.append(pair[0])
            answers.append("=" + pair[1])
    if not tests or len(set(names)) != len(names) or "\0" in text:
        return None
    return Sealed(calls="\0".join(calls), answers="\n".join(answers))


def literal_assert(line: str) -> tuple[str, str] | None:
    """Return (left, right) of ``assert left == literal``, or ``None``."""
    sides = split_assert(line)
    if sides is None:
        return None
    try:
        (node,) = ast.parse(line.strip()).body
        ast.literal_eval(sides[1])
    except (SyntaxError, ValueError, TypeError):
        return None
    if not isinstance(node, ast.Assert) or node.msg is not None:
        return None
    if not isinstance(node.test, ast.Compare) or len(node.test.ops) != 1:
        return None
    return sides


def nearby(value: Any, rng: random.Random) -> Any:
    """Return another value of the type and size of a literal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1))
    if isinstance(value, float):
        return value + 1.0 if value + 1.0 != value else -value
    if isinstance(value, str):
        at = rng.randrange(len(value)) if value else 0
        return value[:at] + (value[at : at + 1] or "a") + value[at:]
    if isinstance(value, list | tuple) and value:
        at = rng.randrange(len(value))
        return type(value)((*value[:at], nearby(value[at], rng), *value[at + 1 :]))
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {**value, key: nearby(value[key], rng)}
    return {list: [0], tuple: (0,), dict: {0: 0}}.get(type(value), 0)
