"""The decode engine: slots, chunks and weights on the host side of engine/steps.py.

One thread owns an Engine. ``step()`` runs one round (prefill what waits, then one decode dispatch)
and returns the requests that ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import IntArray
from skyrl_jax.engine import steps

MAX_STOP_IDS = 8
_SMALLEST_WINDOW = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The fixed shapes of the device programs (core/config.EngineConfig names them)."""

    slots: int = 64
    max_context: int = 512
    prefill_rows: int = 4
    prefill_chunk: int = 32
    decode_steps: int = 8

    def __post_init__(self) -> None:
        """Refuse shapes that the programs cannot have."""
        for name in ("slots", "max_context", "prefill_rows", "prefill_chunk", "decode_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be at least 1")
        if self.max_context % self.prefill_chunk:
            raise ConfigError(
                f"engine.max_context ({self.max_context}) must be a multiple of "
                f"engine.prefill_chunk ({self.prefill_chunk})"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One generation request. ``score_from`` >= 0 asks for prompt log-probs from that position."""

    rid: str
    prompt: IntArray
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...] = ()
    score_from: int = -1


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


@dataclass(slots=True, eq=False)
class _Live:
    """A request in a slot; ``chunks`` of its prompt still wait for prefill."""

    request: Request
    slot: int
    chunks: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: dict[int, np.ndarray] = field(default_factory=dict)


class Engine:
    """Continuous batching over a fixed number of slots.

    Args:
        cfg: the model's shape.
        shape: the programs' shapes.
        params: the params pytree (stacked layers), or ``None`` to wait for ``load``.
        version: the weight version's name, echoed with every result.
    """

    def __init__(
        self, cfg: ModelConfig, shape: EngineShape, params: Any = None, version: str = "default"
    ) -> None:
        self.cfg = cfg
        self.shape = shape
        self.version = version
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self._params = None
        self._live: dict[int, _Live] = {}
        self._free = list(range(shape.slots))[::-1]
        self._chunks: deque[tuple[_Live, int]] = deque()
        self._host = _host_rows(shape.slots)
        self._jit()
        self.flush()
        if params is not None:
            self.load(params, version)

    def _jit(self) -> None:
        cfg = self.cfg
        self._prefill = jax.jit(
            partial(steps.prefill, cfg), static_argnames="window", donate_argnums=1
        )
        self._decode = jax.jit(
            partial(steps.decode, cfg), static_argnames=("steps", "window"), donate_argnums=1
        )
        self._score = jax.jit(steps.score)
        self._serving = jax.jit(partial(steps.serving_params, cfg))

    @property
    def loaded(self) -> bool:
        """Whether there are weights."""
        return self._params is not None

    @property
    def active(self) -> int:
        """Requests that hold a slot."""
        return len(self._live)

    @property
    def free_slots(self) -> int:
        """Slots without a request."""
        return len(self._free)

    def load(self, params: Any, version: str) -> None:
        """Replace the weights. The cache is emptied: no request may be running."""
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are running; abort them before load")
        self._params = jax.block_until_ready(self._serving(params))
        self.version = version
        self.flush()

    def flush(self) -> None:
        """Empty the cache (stale values are masked, but a NaN would survive a mask)."""
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are running; abort them before flush")
        self._cache = steps.empty_cache(self.cfg, self.shape.slots, self.shape.max_context)

    def warm_up(self) -> None:
        """Compile every program before the first request."""
        tokens = np.zeros((self.shape.prefill_rows, self.shape.prefill_chunk), np.int32)
        rows = np.zeros((self.shape.prefill_rows,), np.int32)
        for window in self._windows():
            self._cache, hidden = self._prefill(
                self._params, self._cache, tokens, rows, rows, window=window
            )
            self._cache, _ = self._decode(
                self._params,
                self._cache,
                steps.Rows(**self._host),
                steps=self.shape.decode_steps,
                window=window,
            )
        jax.block_until_ready(self._score(self._params, hidden, tokens))

    def admit(self, request: Request) -> None:
        """Give a request a slot. The caller checks ``free_slots`` and the context length."""
        slot = self._free.pop()
        # the last prompt token is fed by decode, whose first sample follows it
        ahead = len(request.prompt) - (request.score_from < 0)
        live = _Live(request, slot, -(-ahead // self.shape.prefill_chunk))
        self._live[slot] = live
        chunk = self.shape.prefill_chunk
        self._chunks.extend((live, number * chunk) for number in range(live.chunks))
        host, last = self._host, len(request.prompt) - 1
        host["token"][slot] = request.prompt[last]
        host["position"][slot] = last
        host["budget"][slot] = 0
        host["temperature"][slot] = request.temperature
        host["seed"][slot] = (request.seed >> 32, request.seed & 0xFFFFFFFF)
        host["stops"][slot] = -1
        host["stops"][slot, : len(request.stop_ids)] = request.stop_ids

    def abort(self, match: Callable[[str], bool]) -> list[Result]:
        """End the running requests whose rid matches; they keep what they sampled."""
        hit = [live for live in self._live.values() if match(live.request.rid)]
        return [self._end(live, "abort") for live in hit]

    def step(self) -> list[Result]:
        """Prefill every waiting chunk, then sample up to ``decode_steps`` tokens a slot."""
        while self._chunks:
            self._prefill_some()
        ended = [
            self._end(live, "length")
            for live in list(self._live.values())
            if live.request.max_new_tokens == 0
        ]
        return ended + self._decode_some() if self._live else ended

    def _prefill_some(self) -> None:
        rows, width = self.shape.prefill_rows, self.shape.prefill_chunk
        work = [self._chunks.popleft() for _ in range(min(rows, len(self._chunks)))]
        tokens = np.zeros((rows, width), np.int32)
        targets = np.zeros((rows, width), np.int32)
        slots = np.zeros((rows,), np.int32)
        starts = np.zeros((rows,), np.int32)
        for row in range(rows):
            live, start = work[min(row, len(work) - 1)]  # padding repeats the last chunk
            piece = live.request.prompt[start : start + width]
            follow = live.request.prompt[start + 1 : start + 1 + width]
            tokens[row, : len(piece)] = piece
            targets[row, : len(follow)] = follow
            slots[row], starts[row] = live.slot, start
        window = self._window(int(starts.max()) + width)
        self._cache, hidden = self._prefill(
            self._params, self._cache, tokens, slots, starts, window=window
        )
        self.prefill_tokens += len(work) * width
        if any(live.request.score_from >= 0 for live, _ in work):
            scores = np.asarray(self._score(self._params, hidden, targets))
            for row, (live, start) in enumerate(work):
                live.scores[start] = scores[row]
        for live, _ in work:
            live.chunks -= 1

    def _decode_some(self) -> list[Result]:
        host = self._host
        for slot, live in self._live.items():
            host["budget"][slot] = live.request.max_new_tokens - len(live.ids)
        budget = np.minimum(host["budget"], self.shape.decode_steps)
        window = self._window(int((host["position"] + budget)[budget > 0].max()))
        self._cache, out = self._decode(
            self._params,
            self._cache,
            steps.Rows(**{name: value.copy() for name, value in host.items()}),
            steps=self.shape.decode_steps,
            window=window,
        )
        ids, logprobs, count, stopped = (np.asarray(x) for x in out)
        self.decode_tokens += int(count.sum())
        ended = []
        for slot, live in list(self._live.items()):
            n = int(count[slot])
            live.ids += ids[:n, slot].tolist()
            live.logprobs += logprobs[:n, slot].tolist()
            host["token"][slot] = live.ids[-1]
            host["position"][slot] += n
            if stopped[slot]:
                ended.append(self._end(live, "stop", matched=live.ids[-1]))
            elif len(live.ids) >= live.request.max_new_tokens:
                ended.append(self._end(live, "length"))
        return ended

    def _end(self, live: _Live, finish: str, matched: int | None = None) -> Result:
        del self._live[live.slot]
        self._free.append(live.slot)
        self._host["budget"][live.slot] = 0
        self._host["position"][live.slot] = 0
        if live.chunks:
            self._chunks = deque(item for item in self._chunks if item[0] is not live)
        return Result(
            request=live.request,
            token_ids=tuple(live.ids),
            logprobs=tuple(live.logprobs),
            finish=finish,
            matched=matched,
            version=self.version,
            prompt_logprobs=self._prompt_logprobs(live),
        )

    def _prompt_logprobs(self, live: _Live) -> tuple[float | None, ...] | None:
        start = live.request.score_from
        if start < 0 or live.chunks:
            return None
        flat = np.concatenate([live.scores[at] for at in sorted(live.scores)])
        return (None, *flat[start : len(live.request.prompt) - 1].tolist())

    def _windows(self) -> list[int]:
        sizes, size = [], _SMALLEST_WINDOW
        while size < self.shape.max_context:
            sizes.append(size)
            size *= 2
        return [*sizes, self.shape.max_context]

    def _window(self, needed: int) -> int:
        return next(size for size in self._windows() if size >= needed)


def _host_rows(slots: int) -> dict[str, np.ndarray]:
    return {
        "token": np.zeros((slots,), np.int32),
        "position": np.zeros((slots,), np.int32),
        "budget": np.zeros((slots,), np.int32),
        "temperature": np.ones((slots,), np.float32),
        "seed": np.zeros((slots, 2), np.uint32),
        "stops": np.full((slots, MAX_STOP_IDS), -1, np.int32),
    }
