"""Grade equal submissions once: samples of a group often make the very same diff.

The verdict on a synthetic row follows from (row, diff) alone: its tests are deterministic and each
grading has a fresh sandbox. So equal ones share a grading that is under way, and later ones get
its score. Faults and time-outs, which the host may have caused, are never kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from skyrl_jax.core.types import Score

KEPT_VERDICTS = ("resolved", "unresolved", "no_apply")
CLOSE_TIMEOUT_S = 10.0  # for the sandbox of a grading that nobody waits for any more


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[Score]
    waiting: int = 0


class Once:
    """Scores by key; ``size`` of them are kept, the longest unused goes first."""

    def __init__(self, size: int = 20_000) -> None:
        """Start with nothing kept."""
        self._size = size
        self._kept: OrderedDict[str, Score] = OrderedDict()
        self._running: dict[str, _Running] = {}

    async def get(self, key: str, grade: Callable[[], Awaitable[Score]]) -> Score:
        """Return the score of ``key``: kept, shared with who waits already, or from ``grade()``.

        A caller that is cancelled leaves the others waiting; the last one ends the grading and
        sees its sandbox closed. What ``grade`` raises reaches every caller and is not kept.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        entry = self._running.get(key)
        if entry is None:
            entry = _Running(asyncio.ensure_future(self._run(key, grade)))
            self._running[key] = entry
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.task.done():
                self._running.pop(key, None)  # a newcomer starts its own
                entry.task.cancel()
                await asyncio.wait({entry.task}, timeout=CLOSE_TIMEOUT_S)

    async def _run(self, key: str, grade: Callable[[], Awaitable[Score]]) -> Score:
        mine = asyncio.current_task()
        try:
            score = await grade()
        finally:
            entry = self._running.get(key)
            if entry is not None and entry.task is mine:
                del self._running[key]
        if score.verdict in KEPT_VERDICTS:
            self._kept[key] = score
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return score
