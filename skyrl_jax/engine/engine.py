"""The decode engine: requests in, results out, over blocks of slots (engine/block.py).

One thread owns an Engine. ``step()`` runs one round (prefill what waits, then one decode dispatch
for every block that has work) and returns the requests that ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.engine.block import Block, EngineShape, Programs
from skyrl_jax.engine.request import MAX_STOP_IDS, Request, Result

__all__ = ["MAX_STOP_IDS", "Engine", "EngineShape", "Request", "Result"]


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
        self._params: Any = None
        self._programs = Programs(cfg, shape)
        self._blocks = [Block(self._programs) for _ in range(shape.slots // shape.block)]
        if params is not None:
            self.load(params, version)

    @property
    def loaded(self) -> bool:
        """Whether there are weights."""
        return self._params is not None

    @property
    def active(self) -> int:
        """Requests that hold a slot."""
        return sum(block.active for block in self._blocks)

    @property
    def free_slots(self) -> int:
        """Slots without a request."""
        return self.shape.slots - self.active

    @property
    def counters(self) -> dict[str, int]:
        """Tokens prefilled (whole chunks), sampled, and row-steps that decode computed."""
        names = ("prefill_tokens", "decode_tokens", "decode_rows")
        return {name: sum(getattr(block, name) for block in self._blocks) for name in names}

    @property
    def page_counts(self) -> list[int]:
        """Cache pages that programs read: several when bits agree over them (Programs.warm_up)."""
        return self._programs.page_counts

    def load(self, params: Any, version: str) -> None:
        """Replace the weights. The cache is emptied: no request may be running."""
        self.flush()
        self._params = jax.block_until_ready(self._programs.serving(params))
        self.version = version

    def flush(self) -> None:
        """Empty the cache (stale values are masked, but a NaN would survive a mask)."""
        if self.active:
            raise RuntimeError(f"{self.active} requests are running; abort them first")
        for block in self._blocks:
            block.flush()

    def warm_up(self, params: Any) -> None:
        """Compile every program before the first request; ``params`` only lend their shapes."""
        self._programs.warm_up(params)

    def admit(self, request: Request) -> None:
        """Give a request a slot. The caller checks ``free_slots`` and the context length.

        The first block with room takes it: few full blocks cost less than many sparse ones.
        """
        next(block for block in self._blocks if block.free).admit(request)

    def abort(self, match: Callable[[str], bool]) -> list[Result]:
        """End the running requests whose rid matches; they keep what they sampled."""
        return [result for block in self._blocks for result in block.abort(match, self.version)]

    def step(self) -> list[Result]:
        """Prefill every waiting chunk, then sample up to ``decode_steps`` tokens a slot."""
        ended: list[Result] = []
        for block in self._blocks:
            ended += block.prefill(self._params, self.version)
        # start all blocks before waiting for one
        started = [(block, block.start_decode(self._params)) for block in self._blocks]
        for block, out in started:
            if out is not None:
                ended += block.finish_decode(out, self.version)
        return ended
