"""Read requests whose bodies repeat each other: only what is new in a message list gets decoded.

    {"model": "m", "messages": [A, B, C, D], "tools": [...]}
                                |- known -|- decoded ------|

The bytes of the list are compared with those of earlier lists (memcmp) up to the end of the last
element that agrees; the elements before it are the objects that were decoded then, so nobody may
change them. Whatever looks unusual is left to ``strict.decode``: the result, and the error, is what
that would give.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from skyrl_jax.gateway.strict import DECODER, check_text, decode

_SPACE = re.compile(r"[ \t\n\r]+")
_NEW = 10_000  # elements of a list that are decoded one by one: more of them take the C loop
_MOST = 8 << 20  # bytes of all bodies that a session remembers (the latest stays in any case)


class _Unusual(Exception):
    """The body is no object with one plain list under the key; ``strict.decode`` shall judge."""


@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    """A body that was read.

    Args:
        raw: its bytes.
        start: where its list begins, behind the bracket.
        ends: where each element ends, from there on.
        items: the elements.
    """

    raw: bytes
    start: int
    ends: list[int]
    items: list[Any]

    def shared(self, raw: bytes, start: int) -> int:
        """Return how many of the elements another body's list begins with."""
        view = memoryview(self.raw)[self.start :]
        low, high = 0, len(self.ends)
        trial = high  # mostly all of them
        while low < high:
            if raw.startswith(view[: self.ends[trial - 1]], start):
                low = trial
            else:
                high = trial - 1
            trial = (low + high + 1) // 2
        return low


class Bodies:
    """Reads the request bodies of one session.

    Args:
        key: of the list that grows: "messages", or "input".
        keep: how many bodies are remembered (sub-agents take turns).
    """

    def __init__(self, key: str = "messages", keep: int = 4) -> None:
        self._key = key
        self._keep = keep
        # stands for the elements while the rest of the object is decoded; no client can write it
        self._hole = secrets.token_hex(16)
        self._known: list[_Body] = []  # the latest last

    def read(self, raw: bytes) -> Any:
        """Return ``strict.decode(raw)``; elements of the list may be those of an earlier call.

        Raises:
            ValueError: see there.
            RecursionError: it is nested too deep.
        """
        try:
            start = self._start(raw)
            shares = [(body.shared(raw, start), number) for number, body in enumerate(self._known)]
            shared, number = max(shares, default=(0, -1))
            known = self._known[number] if shared else _Body(raw, start, [], [])
            value, made = self._rest(raw, start, known, shared)
        except (_Unusual, ValueError, RecursionError):
            return decode(raw)
        if shared and shared == len(known.items):
            self._known.remove(known)  # this one goes on from it
        self._known = [*self._known, made][-self._keep :]
        while len(self._known) > 1 and sum(len(body.raw) for body in self._known) > _MOST:
            del self._known[0]
        return value

    def _start(self, raw: bytes) -> int:
        """Return where the list begins."""
        for body in reversed(self._known):
            if raw.startswith(memoryview(body.raw)[: body.start]):
                return body.start
        text = raw.decode("utf-8")
        at = _expect(text, 0, "{") + 1
        while True:
            name, at = DECODER.raw_decode(text, _skip(text, at))
            at = _expect(text, at, ":") + 1
            if name == self._key:
                break
            _, at = DECODER.raw_decode(text, _skip(text, at))
            at = _expect(text, at, ",") + 1
        return len(text[: _expect(text, at, "[") + 1].encode())

    def _rest(self, raw: bytes, start: int, known: _Body, shared: int) -> tuple[Any, _Body]:
        """Decode the elements behind those that are shared, then the object without its list."""
        items, ends = known.items[:shared], known.ends[:shared]
        byte, last = (ends[-1] if ends else 0), 0
        head = raw[:start].decode("utf-8")
        tail = raw[start + byte :].decode("utf-8")
        new, places, close = _elements(tail, first=not shared)
        for place in places:
            byte += len(tail[last:place].encode())
            last = place
            ends.append(byte)
        rest = f'{head}"{self._hole}"{tail[close:]}'
        value = DECODER.decode(rest)
        if value.get(self._key) != [self._hole]:  # the key comes twice
            raise _Unusual
        check_text(head, value)
        check_text(tail, [value, new])
        items += new
        value[self._key] = list(items)
        return value, _Body(raw, start, ends, items)


def _elements(text: str, *, first: bool) -> tuple[list[Any], list[int], int]:
    """Return what is left of a list: its elements, where each ends, and where the list closes."""
    items, ends, at = [], [], _skip(text, 0)
    expected = first and text[at : at + 1] != "]"
    while expected or text[at : at + 1] == ",":
        item, end = DECODER.raw_decode(text, at if expected else _skip(text, at + 1))
        items.append(item)
        ends.append(end)
        if len(items) > _NEW:
            raise _Unusual
        expected, at = False, _skip(text, end)
    return items, ends, _expect(text, at, "]")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _expect(text: str, at: int, character: str) -> int:
    """Return where the next character that is no space stands; it must be this one."""
    at = _skip(text, at)
    if text[at : at + 1] != character:
        raise _Unusual
    return at
