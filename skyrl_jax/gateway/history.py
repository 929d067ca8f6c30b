"""A client sends its whole history with every call; only what is new in it gets parsed.

The raw messages (fresh objects each time, made of the request's JSON) are compared with those of
earlier calls by ``==``, which runs at the speed of memcmp, and what is equal is the message that
was parsed before: the same object, so that whoever compares messages next compares addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_jax.core.types import Message

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Parsed:
    """A history as it was sent, its messages, and how many of them stand before each raw one."""

    raw: list[Raw]
    messages: tuple[Message, ...]
    before: list[int]


class History:
    """Parses message lists of one session.

    Args:
        parse: turns one raw message into messages (some dialects put several into one). It must
            depend on that raw message alone.
        keep: how many histories are remembered (sub-agents take turns in one session).

    Example: ``History(parse_chat).messages(body["messages"])``.
    """

    def __init__(self, parse: Callable[[Raw], Sequence[Message]], keep: int = 8) -> None:
        self._parse = parse
        self._keep = keep
        self._known: list[_Parsed] = []  # the latest last

    def messages(self, raw: Sequence[Raw]) -> tuple[Message, ...]:
        """Return the messages of a history; whatever ``parse`` raises passes through."""
        raw = list(raw)
        known, shared = self._nearest(raw)
        start = known.before[shared]
        messages = list(known.messages[:start])
        before = known.before[:shared]
        for item in raw[shared:]:
            before.append(len(messages))
            messages += self._parse(item)
        before.append(len(messages))
        # the old equals are kept, not the new ones: one copy of the text is enough
        made = _Parsed([*known.raw[:shared], *raw[shared:]], tuple(messages), before)
        if shared == len(known.raw) and known in self._known:
            self._known.remove(known)  # this one goes on from it
        self._known = [*self._known, made][-self._keep :]
        return made.messages

    def _nearest(self, raw: list[Raw]) -> tuple[_Parsed, int]:
        """Return the remembered history that agrees longest, and how far."""
        best, shared = _Parsed([], (), [0]), 0
        for known in reversed(self._known):
            size = len(known.raw)
            if size <= len(raw) and raw[:size] == known.raw:
                count = size
            else:
                count = _agreeing(known.raw, raw)
            if count > shared:
                best, shared = known, count
            if shared == len(raw):
                break
        return best, shared


def _agreeing(ours: Sequence[Raw], theirs: Sequence[Raw]) -> int:
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count
