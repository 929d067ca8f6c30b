"""Read requests whose bodies repeat each other: only what is new in a message list gets decoded.

    {"model": "m", "messages": [A, B, C, D], "tools": [...]}
    |-- as in an earlier body ---|------ decoded -------|

The bytes are compared with those of earlier bodies (memcmp) up to the end of the last element that
agrees; the elements before it are the objects that were decoded then, so nobody may change them.
Whatever looks unusual is left to ``json.loads``: the result is what it would return.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_SPACE = " \t\n\r"
_HOLE = "\ue000"  # stands for the elements while the rest of the object is decoded
_DECODER = json.JSONDecoder()


class _Unusual(Exception):
    """The body is no object with one plain list under the key; ``json.loads`` shall judge."""


@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    """A body that was read: where its list begins, where each element ends, and the elements."""

    raw: bytes
    start: int
    ends: list[int]
    items: list[Any]

    def shared(self, raw: bytes) -> int:
        """Return how many of the elements another body begins with."""
        view = memoryview(self.raw)
        low, high = 0, len(self.ends)
        trial = high  # mostly all of them
        while low < high:
            if raw.startswith(view[: self.ends[trial - 1]]):
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
        self._known: list[_Body] = []  # the latest last

    def read(self, raw: bytes) -> Any:
        """Return ``json.loads(raw)``; elements of the list may be those of an earlier call.

        Raises:
            ValueError: it is no JSON (UnicodeDecodeError: no text).
            RecursionError: it is nested too deep.
        """
        shares = [(body.shared(raw), number) for number, body in enumerate(self._known)]
        shared, number = max(shares, default=(0, -1))
        known = self._known[number] if shared else None
        try:
            value, made = self._first(raw) if known is None else self._next(raw, known, shared)
        except (_Unusual, ValueError):
            return json.loads(raw)
        if known is not None and shared == len(known.items):
            self._known.remove(known)  # this one goes on from it
        self._known = [*self._known, made][-self._keep :]
        return value

    def _first(self, raw: bytes) -> tuple[Any, _Body]:
        """Find the list among the keys of the object."""
        text = raw.decode()
        at = _expect(text, 0, "{") + 1
        while True:
            name, at = _DECODER.raw_decode(text, _skip(text, at))
            at = _expect(text, at, ":") + 1
            if name == self._key:
                break
            _, at = _DECODER.raw_decode(text, _skip(text, at))
            at = _expect(text, at, ",") + 1
        start = _expect(text, at, "[") + 1
        head = text[:start]
        return self._rest(head, text[start:], _Body(raw, len(head.encode()), [], []))

    def _next(self, raw: bytes, known: _Body, shared: int) -> tuple[Any, _Body]:
        """Go on behind the last element that agrees."""
        head, tail = raw[: known.start].decode(), raw[known.ends[shared - 1] :].decode()
        made = _Body(raw, known.start, known.ends[:shared], known.items[:shared])
        return self._rest(head, tail, made)

    def _rest(self, head: str, tail: str, body: _Body) -> tuple[Any, _Body]:
        """Decode the elements in ``tail``, then the object without its list."""
        items, ends, close = _elements(tail, first=not body.items)
        byte, last = (body.ends[-1] if body.ends else body.start), 0
        for end in ends:
            byte += len(tail[last:end].encode())
            last = end
            body.ends.append(byte)
        body.items.extend(items)
        value = json.loads(f'{head}"{_HOLE}"{tail[close:]}')
        if value.get(self._key) != [_HOLE]:  # the key comes twice
            raise _Unusual
        value[self._key] = list(body.items)
        return value, body


def _elements(text: str, *, first: bool) -> tuple[list[Any], list[int], int]:
    """Return what is left of a list: its elements, where each ends, and where the list closes."""
    items, ends, at = [], [], _skip(text, 0)
    expected = first and text[at : at + 1] != "]"
    while expected or text[at : at + 1] == ",":
        item, end = _DECODER.raw_decode(text, at if expected else _skip(text, at + 1))
        items.append(item)
        ends.append(end)
        expected, at = False, _skip(text, end)
    return items, ends, _expect(text, at, "]")


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _SPACE:
        at += 1
    return at


def _expect(text: str, at: int, character: str) -> int:
    """Return where the next character that is no space stands; it must be this one."""
    at = _skip(text, at)
    if text[at : at + 1] != character:
        raise _Unusual
    return at
