"""Says which sandboxes are coming, so that a warm pool makes them while the policy generates.

Nothing happens unless the provider can make sandboxes in advance (``core.protocols.Warming``) and
the suite knows what its tasks will ask for (``core.protocols.Foreseeing``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from skyrl_jax.core.errors import SkyrlError
from skyrl_jax.core.protocols import Foreseeing, SandboxProvider, SandboxSpec, TaskSuite, Warming
from skyrl_jax.core.types import Task


class Foresight:
    """Announces the sandboxes of episodes to come, and calls off those that will not be needed.

    Args:
        suite: knows the sandboxes of a task.
        provider: is told.
        samples: episodes of each task.
    """

    def __init__(self, suite: TaskSuite, provider: SandboxProvider, samples: int) -> None:
        """Keep the parts; nobody is told yet."""
        able = isinstance(suite, Foreseeing) and isinstance(provider, Warming)
        self._suite = suite if able else None
        self._provider = provider if able else None
        self._samples = samples
        self._ended: Counter[str] = Counter()
        self._told: dict[str, tuple[SandboxSpec, ...]] = {}

    async def announce(self, tasks: Sequence[Task]) -> None:
        """Tell the provider what each task will ask for, in order; a task that is over is left out.

        A suite may have to make a task's tree first: that is done in a thread, task by task.
        """
        if not isinstance(self._suite, Foreseeing):
            return
        for task in tasks:
            if self._over(task):
                continue
            try:
                specs = tuple(await asyncio.to_thread(self._suite.upcoming, task))
            except SkyrlError:  # the episode will meet it, and it is said there
                continue
            if not self._over(task):
                self._told[task.task_id] = specs
                self._tell(specs, self._samples)

    def end_episode(self, task: Task) -> None:
        """Take notice of an episode's end; after a task's last one nothing more is expected."""
        self._ended[task.task_id] += 1
        if self._over(task):
            self._tell(self._told.pop(task.task_id, ()), 0)

    def end(self) -> None:
        """Call off whatever is still announced."""
        for specs in self._told.values():
            self._tell(specs, 0)
        self._told.clear()

    def _over(self, task: Task) -> bool:
        return self._ended[task.task_id] >= self._samples

    def _tell(self, specs: Sequence[SandboxSpec], times: int) -> None:
        if not isinstance(self._provider, Warming):
            return
        told: list[SandboxSpec] = []
        for spec in specs:
            if spec not in told:  # frozen values: compared, since their mappings have no hash
                told.append(spec)
                self._provider.prepare(spec, times * specs.count(spec))
