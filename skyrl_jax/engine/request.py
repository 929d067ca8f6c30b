"""What goes into the engine and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_jax.core.types import IntArray

MAX_STOP_IDS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One generation request. ``score_from`` >= 0 asks for prompt log-probs from that position.

    ``seed`` is an unsigned 64-bit number. ``forced`` are the first ids of the completion, fed and
    scored like drawn ones: for replays and tests; what follows them is drawn.
    """

    rid: str
    prompt: IntArray
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...] = ()
    score_from: int = -1
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """How a request ended.

    ``finish`` is "stop" (``matched`` names the id), "length" or "abort". ``prompt_logprobs`` begin
    at ``score_from`` with ``None``, as SGLang's do. ``queued``: it never had a slot.
    """

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    version: str
    matched: int | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    cached_tokens: int = 0
    queued: bool = False
