"""A block of slots: the unit that one device program works on.

A row's bits depend on the number of rows of a program, not on what the others hold; so every
program always runs at the full size of a block, and a lightly loaded engine runs fewer blocks.
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
from skyrl_jax.engine import steps
from skyrl_jax.engine.request import MAX_STOP_IDS, Request, Result

_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The fixed shapes of the device programs (core/config.EngineConfig names them).

    ``block`` slots are decoded by one program; 0 picks 16 where that divides ``slots``.
    """

    slots: int = 64
    max_context: int = 512
    prefill_rows: int = 4
    prefill_chunk: int = 32
    decode_steps: int = 8
    block: int = 0

    def __post_init__(self) -> None:
        """Refuse shapes that the programs cannot have."""
        for name in ("slots", "max_context", "prefill_rows", "prefill_chunk", "decode_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be at least 1")
        if steps.PAGE % self.prefill_chunk:
            raise ConfigError(
                f"engine.prefill_chunk ({self.prefill_chunk}) must divide {steps.PAGE}"
            )
        if not self.block:
            block = self.slots if self.slots % _BLOCK else _BLOCK
            object.__setattr__(self, "block", block)
        if self.slots % self.block:
            raise ConfigError(
                f"engine.slots ({self.slots}) must be a multiple of the block ({self.block})"
            )


class Programs:
    """The jitted device programs of one model and shape; shared by all blocks."""

    def __init__(self, cfg: ModelConfig, shape: EngineShape) -> None:
        self.cfg = cfg
        self.shape = shape
        self.page_counts = _page_counts(shape.max_context)
        self.prefill = jax.jit(
            partial(steps.prefill, cfg), static_argnames="pages", donate_argnums=1
        )
        self.decode = jax.jit(
            partial(steps.decode, cfg), static_argnames=("steps", "pages"), donate_argnums=1
        )
        self.score = jax.jit(steps.score)
        self.serving = jax.jit(partial(steps.serving_params, cfg))

    def cache(self) -> steps.Cache:
        """Return an empty cache of one block."""
        return steps.empty_cache(self.cfg, self.shape.block, self.shape.max_context)

    def warm_up(self, params: Any) -> None:
        """Compile everything, and check that bits do not depend on the page count.

        They should not (engine/steps.py), but a compiler may fuse the programs differently: then
        only the largest one is used, which is slower and right.

        Args:
            params: weights of the served shapes; random ones do.
        """
        serving = self.serving(params)
        seen = [self._probe(serving, pages) for pages in self.page_counts]
        wanted = [np.asarray(leaf).tobytes() for leaf in seen[-1]]
        if any([np.asarray(leaf).tobytes() for leaf in one] != wanted for one in seen):
            self.page_counts = self.page_counts[-1:]

    def pages(self, positions: int) -> int:
        """Return the smallest compiled page count that covers ``positions``."""
        return next(n for n in self.page_counts if n * steps.PAGE >= positions)

    def _probe(self, serving: Any, pages: int) -> list[Any]:
        """Run every program on fixed inputs that fit one page; return what bits are compared."""
        rows, width, slots = self.shape.prefill_rows, self.shape.prefill_chunk, self.shape.block
        draw = np.random.default_rng(0)
        tokens = draw.integers(0, self.cfg.vocab_size, (rows, width)).astype(np.int32)
        where = (np.arange(rows) % slots).astype(np.int32)
        cache, hidden = self.prefill(
            serving, self.cache(), tokens, where, np.zeros((rows,), np.int32), pages=pages
        )
        host = _host_rows(slots, self.shape.decode_steps)
        host["position"][:] = width - 1
        host["budget"][:] = self.shape.max_context - width
        host["seed"][:, 1] = np.arange(slots)
        cache, out = self.decode(
            serving, cache, steps.Rows(**host), steps=self.shape.decode_steps, pages=pages
        )
        scores = self.score(serving, hidden, tokens)
        return [hidden, scores, out.ids, out.logprobs, *(layer[0] for layer in cache.k)]


def _page_counts(max_context: int) -> list[int]:
    """Page counts that programs are compiled for: 2, 4, 8, ... and all.

    Not 1: XLA's CPU compiler computes the softmax of a single page by other means.
    """
    whole = -(-max_context // steps.PAGE)
    counts = [min(2, whole)]
    while counts[-1] < whole:
        counts.append(min(2 * counts[-1], whole))
    return counts


@dataclass(slots=True, eq=False)
class _Live:
    """A request in a slot; ``chunks`` of its prompt still wait for prefill."""

    request: Request
    slot: int
    chunks: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: dict[int, np.ndarray] = field(default_factory=dict)


class Block:
    """The slots of one block: their cache on device, their requests on the host."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._shape = programs.shape
        self._live: dict[int, _Live] = {}
        self._free = list(range(self._shape.block))[::-1]
        self._chunks: deque[tuple[_Live, int]] = deque()
        self._host = _host_rows(self._shape.block, self._shape.decode_steps)
        self._cache = programs.cache()
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.decode_rows = 0

    @property
    def active(self) -> int:
        """Requests that hold a slot."""
        return len(self._live)

    @property
    def free(self) -> int:
        """Slots without a request."""
        return len(self._free)

    def flush(self) -> None:
        """Empty the cache."""
        self._cache = self._programs.cache()

    def admit(self, request: Request) -> None:
        """Give a request a slot."""
        slot = self._free[-1]  # taken last: a request whose numbers do not fit takes none
        # the last prompt token is fed by decode, whose first sample follows it
        last = len(request.prompt) - 1
        ahead = last if request.score_from < 0 else last + 1
        chunk = self._shape.prefill_chunk
        live = _Live(request, slot, -(-ahead // chunk))
        host = self._host
        host["token"][slot] = request.prompt[last]
        host["position"][slot] = last
        host["temperature"][slot] = request.temperature
        host["seed"][slot] = (request.seed >> 32, request.seed & 0xFFFFFFFF)
        host["stops"][slot] = -1
        host["stops"][slot, : len(request.stop_ids)] = request.stop_ids
        self._free.pop()
        self._live[slot] = live
        self._chunks.extend((live, number * chunk) for number in range(live.chunks))

    def abort(self, match: Callable[[str], bool], version: str) -> list[Result]:
        """End the requests whose rid matches."""
        hit = [live for live in self._live.values() if match(live.request.rid)]
        return [self._end(live, "abort", version) for live in hit]

    def prefill(self, params: Any, version: str) -> list[Result]:
        """Run every waiting chunk; return the requests that wanted no token."""
        while self._chunks:
            self._prefill_some(params)
        done = [live for live in self._live.values() if live.request.max_new_tokens == 0]
        return [self._end(live, "length", version) for live in done]

    def start_decode(self, params: Any) -> steps.Sampled | None:
        """Start one decode dispatch, if any slot has a request."""
        if not self._live:
            return None
        host = self._host
        for slot, live in self._live.items():
            host["budget"][slot] = live.request.max_new_tokens - len(live.ids)
            if live.request.forced:
                following = live.request.forced[len(live.ids) :][: self._shape.decode_steps]
                host["forced"][:, slot] = -1
                host["forced"][: len(following), slot] = following
        ahead = np.minimum(host["budget"], self._shape.decode_steps)
        pages = self._programs.pages(int((host["position"] + ahead)[ahead > 0].max()))
        self._cache, out = self._programs.decode(
            params,
            self._cache,
            # copies: the device may still read them when the next round writes
            steps.Rows(**{name: value.copy() for name, value in host.items()}),
            steps=self._shape.decode_steps,
            pages=pages,
        )
        return out

    def finish_decode(self, out: steps.Sampled, version: str) -> list[Result]:
        """Wait for a dispatch and hand its tokens out; return the requests that ended."""
        ids, logprobs, count, stopped = (np.asarray(x) for x in out)
        self.decode_tokens += int(count.sum())
        self.decode_rows += int(count.max()) * len(count)
        ended = []
        for slot, live in list(self._live.items()):
            n = int(count[slot])
            live.ids += ids[:n, slot].tolist()
            live.logprobs += logprobs[:n, slot].tolist()
            self._host["token"][slot] = live.ids[-1]
            self._host["position"][slot] += n
            if stopped[slot]:
                ended.append(self._end(live, "stop", version, matched=live.ids[-1]))
            elif len(live.ids) >= live.request.max_new_tokens:
                ended.append(self._end(live, "length", version))
        return ended

    def _prefill_some(self, params: Any) -> None:
        rows, width = self._shape.prefill_rows, self._shape.prefill_chunk
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
        pages = self._programs.pages(int(starts.max()) + width)
        self._cache, hidden = self._programs.prefill(
            params, self._cache, tokens, slots, starts, pages=pages
        )
        self.prefill_tokens += len(work) * width
        if any(live.request.score_from >= 0 for live, _ in work):
            scores = np.asarray(self._programs.score(params, hidden, targets))
            for row, (live, start) in enumerate(work):
                live.scores[start] = scores[row]
        for live, _ in work:
            live.chunks -= 1

    def _end(self, live: _Live, finish: str, version: str, matched: int | None = None) -> Result:
        del self._live[live.slot]
        self._free.append(live.slot)
        self._host["budget"][live.slot] = 0
        self._host["position"][live.slot] = 0
        self._host["forced"][:, live.slot] = -1
        if live.chunks:
            self._chunks = deque(item for item in self._chunks if item[0] is not live)
        return Result(
            request=live.request,
            token_ids=tuple(live.ids),
            logprobs=tuple(live.logprobs),
            finish=finish,
            matched=matched,
            version=version,
            prompt_logprobs=_prompt_logprobs(live),
        )


def _prompt_logprobs(live: _Live) -> tuple[float | None, ...] | None:
    start = live.request.score_from
    if start < 0 or live.chunks:
        return None
    flat = np.concatenate([live.scores[at] for at in sorted(live.scores)])
    return (None, *flat[start : len(live.request.prompt) - 1].tolist())


def _host_rows(slots: int, decode_steps: int) -> dict[str, np.ndarray]:
    return {
        "token": np.zeros((slots,), np.int32),
        "position": np.zeros((slots,), np.int32),
        "budget": np.zeros((slots,), np.int32),
        "temperature": np.ones((slots,), np.float32),
        "seed": np.zeros((slots, 2), np.uint32),
        "stops": np.full((slots, MAX_STOP_IDS), -1, np.int32),
        "forced": np.full((decode_steps, slots), -1, np.int32),
    }
