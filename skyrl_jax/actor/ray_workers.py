"""Rollout workers placed by Ray: episodes are played in other processes, on other nodes.

The driver keeps the order, the groups and the one semaphore of live sandboxes; a worker plays one
episode from init to score as ``run_episode`` does, with its own client of the generation server
and of the same sandbox hosts. Suite and agent travel once per worker. A worker that dies is
replaced, and its episodes are played again from the start by another one: same seeds, and what the
dead one had sampled was never returned to anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self

from skyrl_jax.actor.blame import Fault
from skyrl_jax.actor.board import Board, Gates, make_gates
from skyrl_jax.actor.episodes import (
    GRACE_S,
    ActorContext,
    Outcome,
    failed_outcome,
    run_episode,
)
from skyrl_jax.core.config import RolloutConfig
from skyrl_jax.core.errors import InfraError
from skyrl_jax.core.protocols import Generator
from skyrl_jax.core.types import Task
from skyrl_jax.sandbox.fleet import FleetProvider

ATTEMPTS = 3  # workers that may die under one episode
_START_TIMEOUT_S = 120.0
_REST_S = 10.0  # after a worker could not be started
_KEPT = 4  # suites and agents that a worker keeps
OpenGenerator = Callable[[], AbstractAsyncContextManager[Generator]]


class Hosts(Protocol):
    """What knows the sandbox hosts (sandbox/ray_hosts.py)."""

    @property
    def hosts(self) -> Mapping[str, str]:
        """Every host's URL and why it is left out ("" = it is used)."""
        ...

    @property
    def token(self) -> str:
        """The hosts' token."""
        ...


class RolloutWorker:
    """What runs in a Ray actor: plays episodes, as many at once as it is asked for."""

    def __init__(self, open_generator: OpenGenerator, token: str) -> None:
        """Keep the settings; ``start`` does the work."""
        self._open_generator = open_generator
        self._fleet = FleetProvider([], token=token, token_name="the run's own token")
        self._stack = AsyncExitStack()
        self._parts: OrderedDict[str, Any] = OrderedDict()
        self._gates: dict[RolloutConfig, Gates] = {}
        self._hosts = asyncio.Lock()

    async def start(self) -> bool:
        """Open the clients."""
        self._generator = await self._stack.enter_async_context(self._open_generator())
        await self._stack.enter_async_context(self._fleet)
        return True

    async def play(
        self,
        suite: tuple[str, list[Any]],
        agent: tuple[str, list[Any]],
        rollout: RolloutConfig,
        hosts: tuple[str, ...],
        task: Task,
        sample_index: int,
    ) -> Outcome:
        """Play an episode and grade it.

        Args:
            suite: its key and the reference to it in a list (so that Ray leaves it unresolved).
            agent: the same.
            rollout: limits of this worker.
            hosts: URLs of the sandbox hosts in use now.
            task: what to play.
            sample_index: which sample of it.
        """
        await self._follow(hosts)
        gates = self._gates.setdefault(rollout, make_gates(rollout))
        context = ActorContext(
            suite=await self._part(*suite),
            provider=self._fleet,
            generator=self._generator,
            agent=await self._part(*agent),
            rollout=rollout,
            gates=gates,
            board=Board(),
        )
        return await run_episode(context, task, sample_index)

    async def _part(self, key: str, reference: list[Any]) -> Any:
        if key not in self._parts:
            self._parts[key] = await reference[0]
        self._parts.move_to_end(key)
        while len(self._parts) > _KEPT:
            self._parts.popitem(last=False)
        return self._parts[key]

    async def _follow(self, hosts: tuple[str, ...]) -> None:
        """Use the hosts that the driver uses; one that does not answer yet is asked next time."""
        async with self._hosts:
            for url in self._fleet.hosts:
                if url not in hosts:
                    self._fleet.remove(url, "the driver has given this sandbox host up")
            for url in hosts:
                with contextlib.suppress(InfraError):
                    await self._fleet.add(url)

    async def stop(self) -> None:
        """Close the clients; every sandbox of this worker ends."""
        await self._stack.aclose()


class RayWorkers:
    """Plays episodes on workers over a Ray cluster; ``run`` is an ``EpisodeRunner``.

    Args:
        count: of workers; Ray spreads them over the nodes.
        hosts: knows the sandbox hosts and their token.
        open_generator: makes a worker's client of the generation server; it is pickled.
    """

    def __init__(self, count: int, hosts: Hosts, open_generator: OpenGenerator) -> None:
        """Keep the settings; nothing is started."""
        self._count = count
        self._hosts = hosts
        self._open_generator = open_generator
        self._workers: dict[Any, int] = {}  # actor -> episodes it plays now
        self._keys = itertools.count()
        self._sent: OrderedDict[int, tuple[Any, tuple[str, list[Any]]]] = OrderedDict()
        self._filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the workers; Ray must have been joined (sandbox/ray_hosts.py does).

        Raises:
            InfraError: none could be started.
        """
        import ray

        self._ray = ray
        reasons = await self._fill()
        if not self._workers:
            raise InfraError(f"no rollout worker could be started: {reasons[0]}", cause="worker")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers and their sandboxes."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait({self._filling})
        await asyncio.gather(*(self._end(worker) for worker in list(self._workers)))
        self._workers.clear()

    async def run(self, context: ActorContext, task: Task, sample_index: int) -> Outcome:
        """Play an episode on the worker that plays fewest; see ``run_episode``."""
        rollout_id = f"{task.task_id}/{sample_index}"
        async with context.gates.live:
            context.board.enter(rollout_id, "away")
            try:
                return await self._play(context, task, sample_index)
            finally:
                context.board.leave(rollout_id)

    async def _play(self, context: ActorContext, task: Task, sample_index: int) -> Outcome:
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                worker = await self._take()
            except TimeoutError:
                reason = "no rollout worker is left, and none could be started"
                break
            try:
                return await self._ask(worker, context, task, sample_index)
            except (self._ray.exceptions.RayActorError, TimeoutError) as error:
                reason = f"{ATTEMPTS} rollout workers were lost, the last: {type(error).__name__}"
                self._drop(worker)
            except self._ray.exceptions.RayError as error:  # our bug, or a part cannot travel
                reason = f"a rollout worker failed: {error}"
                break
            finally:
                if worker in self._workers:
                    self._workers[worker] -= 1
        fault = Fault(host=True, cause="worker", detail=reason)
        return failed_outcome(task, sample_index, fault)

    async def _ask(
        self, worker: Any, context: ActorContext, task: Task, sample_index: int
    ) -> Outcome:
        rollout = context.rollout
        stages = rollout.init_timeout_s + rollout.run_timeout_s + rollout.grade_timeout_s
        reference = worker.play.remote(
            self._part(context.suite),
            self._part(context.agent),
            self._share(rollout),
            tuple(url for url, down in self._hosts.hosts.items() if not down),
            task,
            sample_index,
        )
        future = asyncio.wrap_future(reference.future())
        try:
            async with asyncio.timeout(4 * (stages + 3 * GRACE_S)):  # twice, with a second chance
                outcome: Outcome = await asyncio.shield(future)
                return outcome
        except asyncio.CancelledError:
            self._ray.cancel(reference)  # the worker closes the episode's sandbox
            await asyncio.wait({future}, timeout=GRACE_S)
            raise
        finally:
            future.add_done_callback(_look)

    def _share(self, rollout: RolloutConfig) -> RolloutConfig:
        """Return a worker's part of the limits; how many live, the driver alone decides."""
        return replace(
            rollout,
            init_concurrency=-(-rollout.init_concurrency // self._count),
            grade_concurrency=-(-rollout.grade_concurrency // self._count),
        )

    def _part(self, part: Any) -> tuple[str, list[Any]]:
        """Return a suite or agent as a worker takes it; each goes to the object store once."""
        if id(part) not in self._sent:
            made = (f"part {next(self._keys)}", [self._ray.put(part)])
            self._sent[id(part)] = (part, made)  # held, so that no other gets its id
            while len(self._sent) > _KEPT:
                self._sent.popitem(last=False)
        return self._sent[id(part)][1]

    # -- workers ---------------------------------------------------------------------------------

    async def _take(self) -> Any:
        """Return the worker that plays fewest; while there is none, wait for one.

        Raises:
            TimeoutError: none came.
        """
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not self._workers:
                await asyncio.sleep(0.1)
        worker = min(self._workers, key=lambda found: self._workers[found])
        self._workers[worker] += 1
        return worker

    async def _fill(self) -> list[str]:
        """Start the workers that are missing; return what went wrong."""
        missing = self._count - len(self._workers)
        made = await asyncio.gather(*(self._start() for _ in range(missing)))
        return [reason for reason in made if reason]

    async def _refill(self) -> None:
        while len(self._workers) < self._count:
            if await self._fill():
                await asyncio.sleep(_REST_S)

    async def _start(self) -> str:
        kind = self._ray.remote(RolloutWorker).options(
            num_cpus=1, scheduling_strategy="SPREAD", max_restarts=0, max_concurrency=1000
        )
        worker = kind.remote(self._open_generator, self._hosts.token)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.wrap_future(worker.start.remote().future())
        except (TimeoutError, self._ray.exceptions.RayError) as error:
            self._kill(worker)
            return str(error) or "no node has a CPU free for it"
        self._workers[worker] = 0
        return ""

    def _drop(self, worker: Any) -> None:
        if self._workers.pop(worker, None) is None:
            return  # another of its episodes was first
        self._kill(worker)
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._refill())

    def _kill(self, worker: Any) -> None:
        with contextlib.suppress(Exception):  # it is dead already, or its node is
            self._ray.kill(worker)

    async def _end(self, worker: Any) -> None:
        with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
            async with asyncio.timeout(GRACE_S):
                await asyncio.wrap_future(worker.stop.remote().future())
        self._kill(worker)


def _look(future: asyncio.Future[Any]) -> None:
    """Take an error that nobody waits for any more."""
    if not future.cancelled():
        future.exception()
