"""Running small functions on many inputs while making tasks, safe from endless loops."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from skyrl_jax.tasks.swe.guest import swe_runner
from skyrl_jax.tasks.swe.templates import Function

STEPS = 400  # executed lines after which a call counts as endless
DRAWS = 36
_MAY_NOT_END = ("while", ".append(", ".extend(", ".insert(", "+=")


class _Endless(BaseException):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a function: its text, the right value's text, and the broken version's line.

    ``failure`` is what the runner prints for the broken version; ``""`` when it is right there too.
    """

    call: str
    want: str
    failure: str
    raised: str = ""


def load_function(source: str, name: str) -> Callable[..., Any]:
    """Execute a function's source (our own templates only) and return it."""
    space: dict[str, Any] = {}
    exec(compile(source, "template", "exec"), space)
    found: Callable[..., Any] = space[name]
    return found


def compare(function: Function, broken: str | None, rng: random.Random) -> list[Case]:
    """Call the right and the broken version on drawn inputs; one Case per different input.

    Args:
        function: the right function.
        broken: source of the broken version; ``None`` compares the function with itself.
        rng: draws the inputs.
    """
    right = load_function(function.source, function.name)
    wrong = load_function(broken, function.name) if broken else None
    # a `for` ends unless its body makes what it runs over longer (a wrong name can do that)
    guard = any(word in function.source for word in _MAY_NOT_END)
    cases: dict[str, Case] = {}
    for _ in range(DRAWS):
        values = function.draw(rng)
        text = ", ".join(map(repr, values))
        call = f"{function.name}({text})"
        if call in cases:
            continue
        want, error = _call(right, text, guard)
        if error is not None:
            continue
        failure, raised = _failure(wrong, call, text, want, guard)
        cases[call] = Case(call=call, want=repr(want), failure=failure, raised=raised)
    return list(cases.values())


def _failure(
    wrong: Callable[..., Any] | None, call: str, text: str, want: Any, guard: bool
) -> tuple[str, str]:
    if wrong is None:
        return "", ""
    got, error = _call(wrong, text, guard)
    if isinstance(error, _Endless):
        return "timeout", "timeout"
    if error is not None:
        return swe_runner.raised(call, error, repr(want)), type(error).__name__
    if got == want:
        return "", ""
    return swe_runner.mismatch(call, got, repr(want)), ""


def _call(function: Callable[..., Any], text: str, guard: bool) -> tuple[Any, BaseException | None]:
    arguments = eval(f"({text},)")  # fresh values: a function may change its arguments
    if not guard:
        try:
            return function(*arguments), None
        except Exception as error:
            return None, error
    left = STEPS

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Endless
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(*arguments), None
    except (Exception, _Endless) as error:
        return None, error
    finally:
        sys.settrace(before)
