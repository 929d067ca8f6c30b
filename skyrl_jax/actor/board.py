"""How many may be where (Gates), and who is where now (Board)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from skyrl_jax.core.config import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Concurrency of the stages.

    ``live`` counts sandboxes: an episode holds one place from its start to the end of its grading
    and has at most one sandbox at a time, so nobody waits for a second place while holding one.
    """

    live: asyncio.Semaphore
    init: asyncio.Semaphore
    grade: asyncio.Semaphore


def make_gates(rollout: RolloutConfig) -> Gates:
    """Return the gates of a collection."""
    return Gates(
        live=asyncio.Semaphore(rollout.live_sandboxes),
        init=asyncio.Semaphore(rollout.init_concurrency),
        grade=asyncio.Semaphore(rollout.grade_concurrency),
    )


@dataclass(slots=True, kw_only=True)
class Board:
    """Where each running episode is, for the progress display and the watchdog."""

    stages: dict[str, tuple[str, float]] = field(default_factory=dict)

    def enter(self, rollout_id: str, stage: str) -> None:
        """Note that an episode entered a stage now."""
        self.stages[rollout_id] = (stage, time.monotonic())

    def leave(self, rollout_id: str) -> None:
        """Note that an episode is over."""
        self.stages.pop(rollout_id, None)

    @property
    def live(self) -> int:
        """Return how many episodes hold a sandbox place."""
        return len(self.stages)

    def counts(self) -> dict[str, int]:
        """Return how many episodes are in each stage."""
        return dict(Counter(stage for stage, _ in self.stages.values()))

    def report(self, limit: int = 8) -> str:
        """Name the episodes that have been longest in their stage."""
        now = time.monotonic()
        oldest = sorted(self.stages.items(), key=lambda item: item[1][1])[:limit]
        parts = [f"{name} in {stage} for {now - since:.0f} s" for name, (stage, since) in oldest]
        more = len(self.stages) - len(parts)
        return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
