"""What a session is made of, and what a request says of itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from skyrl_jax.core.protocols import Generator
from skyrl_jax.core.types import SamplingParams
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.gateway.calls import RendererFor
from skyrl_jax.gateway.conversation import Conversation

if TYPE_CHECKING:
    from skyrl_jax.gateway.session import Session


class Listener(Protocol):
    """A socket of a session."""

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        ...


Listen = Callable[["Session", Path, int, bool], Awaitable[Listener]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What a session is made of.

    Args:
        generator: tokens in, tokens out. ``renderer_for``: the renderer of a set of tools.
        conversation: an empty record.
        sampling: of every call; ``seed`` is the base of the seeds of the calls.
        budget: see Budget.
        training: refuse answers that could not be trained on.
        call_timeout_s: deadline of one generation call.
        max_replays: how often one call's recorded answer is given again. An agent that keeps
            asking the same then gets a new sample: it would never hear anything else, and nothing
            but its clock would end it.
        listen: opens a socket. ``forget``: takes the session out of the gateway.
    """

    generator: Generator
    renderer_for: RendererFor
    conversation: Conversation
    sampling: SamplingParams
    budget: Budget
    training: bool
    call_timeout_s: float
    max_replays: int
    listen: Listen
    forget: Callable[[Session], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A request's own word on which request it is: an Idempotency-Key and its body's digest."""

    key: str = ""
    digest: bytes = b""


NOT_NAMED = Repeat()
