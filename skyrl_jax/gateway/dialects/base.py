"""What a dialect is: one client's way to ask, to be answered, and to be refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from skyrl_jax.gateway.calls import Answer, ChatRequest
from skyrl_jax.gateway.dialects.fields import read_json
from skyrl_jax.gateway.memory import Memory, Past
from skyrl_jax.gateway.refusals import Refused

# Token id -> its bytes.
TokenBytes = Callable[[int], bytes]

_PIECE = 4096  # characters: some clients read events line by line and limit a line to 64 KB


class Dialect(Protocol):
    """Body -> ChatRequest, Answer -> body or events. Stateless."""

    keep_alive: bytes  # what a stream sends while there is nothing to say

    def memory(self, past: Past) -> Memory:
        """Return an empty memory for a session."""
        ...

    def parse(self, body: Mapping[str, Any], memory: Memory) -> ChatRequest:
        """Read a body.

        Raises:
            Refused: a field is wrong, or asks for what there is not.
        """
        ...

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """Write an answer."""
        ...

    def events(self, request: ChatRequest, answer: Answer) -> Iterator[bytes]:
        """Write an answer as server-sent events."""
        ...

    def error(self, refused: Refused, request_id: str) -> dict[str, Any]:
        """Write a refusal."""
        ...

    def late_error(self, refused: Refused, request_id: str) -> bytes:
        """Write a refusal into a stream that has begun."""
        ...


def read_request(dialect: Dialect, raw: bytes, memory: Memory) -> ChatRequest:
    """Read a request as it arrived.

    Raises:
        Refused: it is no JSON object, or none that the dialect can serve.
    """
    return dialect.parse(read_json(raw, memory.bodies), memory)


def dumps(value: Any) -> bytes:
    """Write JSON: ASCII, so that no character of it can end a line of an event stream."""
    return json.dumps(value, separators=(",", ":")).encode()


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Write one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(data) + b"\n\n"


def pieces(text: str) -> Iterator[str]:
    """Cut a text into the deltas of a stream; an empty text has none."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]
