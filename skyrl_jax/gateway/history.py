"""A client sends its whole history with every call; only what is new in it gets parsed.

The raw messages are compared with those of earlier calls: by address where gateway/bodies.py read
them, by value elsewhere. What is equal is the message that was parsed before: the same object, so
that whoever compares messages next compares addresses too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_jax.core.types import Message

# One raw message, its place in the list, and the ids of all calls before it (it adds its own).
Parse = Callable[[Any, int, set[str]], Sequence[Message]]


@dataclass(frozen=True, slots=True, eq=False)
class _Parsed:
    """A history as it was sent, its messages, and how many of them stand before each raw one."""

    raw: list[Any]
    messages: tuple[Message, ...]
    before: list[int]


class History:
    """Parses message lists of one session.

    Args:
        parse: turns one raw message into messages (some dialects put several into one). It must
            depend on its three arguments alone.
        keep: how many histories are remembered (sub-agents take turns in one session).

    Example: ``History(read_message).messages(body["messages"])``.
    """

    def __init__(self, parse: Parse, keep: int = 4) -> None:
        self._parse = parse
        self._keep = keep
        self._known: list[_Parsed] = []  # the latest last

    def messages(self, raw: Sequence[Any]) -> tuple[Message, ...]:
        """Return the messages of a history.

        Whatever ``parse`` raises passes through; nothing of that history is remembered then.
        """
        raw = list(raw)
        known, shared = self._nearest(raw)
        start = known.before[shared]
        messages = list(known.messages[:start])
        before = known.before[:shared]
        seen = {call.id for message in messages for call in message.tool_calls}
        for index, item in enumerate(raw[shared:], shared):
            before.append(len(messages))
            messages += self._parse(item, index, seen)
        before.append(len(messages))
        # the old equals are kept, not the new ones: one copy of the text is enough
        made = _Parsed([*known.raw[:shared], *raw[shared:]], tuple(messages), before)
        if shared == len(known.raw) and known in self._known:
            self._known.remove(known)  # this one goes on from it
        self._known = [*self._known, made][-self._keep :]
        return made.messages

    def _nearest(self, raw: list[Any]) -> tuple[_Parsed, int]:
        """Return the remembered history that agrees longest, and how far."""
        best, shared = _Parsed([], (), [0]), 0
        for known in reversed(self._known):
            count = _agreeing(known.raw, raw)
            if count > shared:
                best, shared = known, count
            if shared == len(raw):
                break
        return best, shared


def _agreeing(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one is not other and not _alike(one, other):
            break
        count += 1
    return count


def _alike(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same. Python's 1 == True == 1.0 is not."""
    try:
        return _same(one, other)
    except RecursionError:  # it will be parsed again, and refused where that is what it needs
        return False


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
