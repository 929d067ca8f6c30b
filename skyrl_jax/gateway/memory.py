"""What a session remembers of one dialect's requests, so that a turn costs what it adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from skyrl_jax.core.types import Message
from skyrl_jax.gateway.bodies import Bodies
from skyrl_jax.gateway.history import History

# Named answer -> the history that a request can continue by naming it; None where not kept.
Past = Callable[[str], tuple[Message, ...] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A session's own; a dialect makes it (``dialect.memory(past)``) and keeps nothing itself.

    Args:
        bodies: the latest bodies. ``history``: their messages. ``past``: see Past.
    """

    bodies: Bodies
    history: History
    past: Past
