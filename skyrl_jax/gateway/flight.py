"""One generation that any number of equal requests wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from skyrl_jax.gateway.calls import Answer


@dataclass(slots=True, kw_only=True)
class Mark:
    """What a call is: of the work, or beside it, until the agent asks for its answer as well.

    ``number`` is its place in the conversation, once it is recorded.
    """

    kind: str
    number: int | None = None


class Flight:
    """A call under way, and its answer afterwards.

    The first request starts it; equal requests join it. A request whose client disconnects is
    cancelled and leaves; when the last one leaves, the generation is cancelled too, which aborts it
    at the server. An answer that is there stays for replays.
    """

    def __init__(self, work: Coroutine[Any, Any, Answer], mark: Mark) -> None:
        """Start ``work``, which has a deadline of its own and records itself as ``mark`` says."""
        self.mark = mark
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(_looked_at)
        self._waiting = 0
        self._given_up = False
        self.replays = 0

    @property
    def task(self) -> asyncio.Task[Answer]:
        """The work itself."""
        return self._task

    @property
    def running(self) -> bool:
        """Whether the answer is still to come."""
        return not self._task.done()

    @property
    def usable(self) -> bool:
        """Whether an equal request can have this flight's answer."""
        if self._given_up:
            return False
        return self.running or not (self._task.cancelled() or self._task.exception())

    async def join(self) -> Answer | None:
        """Wait for the answer (no longer than the work's deadline); ``None``: it was cancelled.

        Raises:
            Refused: what the work raised.
        """
        self._waiting += 1
        try:
            await asyncio.wait({self._task})
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.give_up()
        return None if self._task.cancelled() else self._task.result()

    def give_up(self) -> None:
        """Cancel the work if it still runs: nobody wants its answer any more."""
        if self.running:
            self._given_up = True
            self._task.cancel()


def _looked_at(task: asyncio.Task[Answer]) -> None:
    """Read the outcome: the requests that would have read it may all be gone."""
    if not task.cancelled():
        task.exception()
