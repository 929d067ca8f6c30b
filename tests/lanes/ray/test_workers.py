"""Episodes played by workers over a Ray cluster, in sandboxes on hosts that Ray placed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_jax.actor.collect import Collected, collect
from skyrl_jax.actor.ray_workers import RayWorkers
from skyrl_jax.core.protocols import StepResult
from skyrl_jax.core.types import Episode, Message, Score, Status, Task
from tests.actor.fakes import make_rollout
from tests.lanes.ray.conftest import provider
from tests.sandbox.test_contract import nap, sleepers
from tests.sandbox.test_remote import spec_of, until


class BoxSuite:
    """A world is one sandbox; the grade looks for the worker that wrote the submission."""

    def __init__(self, layer: Path) -> None:
        self.spec = spec_of(layer)

    def environment(self, task: Task, provider: Any) -> Any:
        return BoxWorld(self.spec, provider)

    async def reward(self, task: Task, submission: str, provider: Any) -> Score:
        box = await provider.create(self.spec)
        try:
            done = await box.exec("cat a.txt")
        finally:
            await box.destroy()
        good = done.output == "one\n"
        return Score(value=float(good), verdict="resolved", breakdown={"said": submission})


class BoxWorld:
    def __init__(self, spec: Any, provider: Any) -> None:
        self.spec, self.provider, self.box = spec, provider, None

    async def reset(self) -> tuple[Message, ...]:
        self.box = await self.provider.create(self.spec)
        return ()

    async def step(self, tool_calls: Any) -> Any:
        await self.box.exec(tool_calls[0])
        return StepResult(messages=())

    async def submission(self) -> str:
        return f"{os.getpid()} {(await self.box.exec('echo ok')).output.strip()}"

    async def close(self) -> None:
        if self.box is not None:
            await self.box.destroy()


class NapAgent:
    """Sleeps in the sandbox, says through the generator that it has, and submits."""

    def __init__(self, command: str) -> None:
        self.command = command

    async def run(self, task: Task, environment: Any, generator: Any, *, sample_index: int) -> Any:
        await environment.step([self.command])
        return Episode(
            task_id=task.task_id,
            sample_index=sample_index,
            messages=(),
            turns=(),
            status=Status.FINISHED,
            reason="submit",
            submission=await environment.submission(),
            temperature=1.0,
        )


@contextlib.asynccontextmanager
async def no_generator() -> AsyncIterator[None]:
    yield None


ROLLOUT = make_rollout(
    live_sandboxes=8, init_concurrency=8, grade_concurrency=8,
    init_timeout_s=60.0, run_timeout_s=120.0, grade_timeout_s=60.0,
)  # fmt: skip


def play(fleet: Any, workers: RayWorkers, layer: Path, command: str, tasks: int) -> Any:
    return collect(
        [Task(task_id=f"t{number}", prompt="go") for number in range(tasks)],
        2,
        suite=BoxSuite(layer),
        provider=fleet,
        generator=None,
        agent=NapAgent(command),
        rollout=ROLLOUT,
        run=workers.run,
    )


def players(collected: Collected) -> Counter[int]:
    found = [item for group in collected.groups for item in group.trajectories]
    assert all(item.score is not None and item.score.value == 1.0 for item in found), (
        collected.details
    )
    return Counter(int(item.score.breakdown["said"].split()[0]) for item in found)


def test_episodes_are_played_by_all_workers(cluster: Any, layer: Path) -> None:
    async def run() -> None:
        async with provider() as fleet, RayWorkers(2, fleet, no_generator) as workers:
            collected = await play(fleet, workers, layer, "sleep 0.2", 8)
            counts = players(collected)
            assert len(counts) == 2 and os.getpid() not in counts and sum(counts.values()) == 16
            assert [group.task_id for group in collected.groups] == [f"t{n}" for n in range(8)]
            again = await play(fleet, workers, layer, "true", 2)  # the same workers, another agent
            assert set(players(again)) <= set(counts)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in counts))

    asyncio.run(run())


def test_a_dead_workers_episodes_are_played_again(cluster: Any, layer: Path) -> None:
    async def run() -> None:
        async with provider() as fleet, RayWorkers(2, fleet, no_generator) as workers:
            first = players(await play(fleet, workers, layer, "true", 2))
            (victim, _), *_ = first.most_common()
            going = asyncio.ensure_future(play(fleet, workers, layer, f"{nap(3)}; true", 4))
            await until(lambda: len(sleepers(nap(3))) >= 8)
            os.kill(victim, signal.SIGKILL)
            counts = players(await asyncio.wait_for(going, 120))
            assert sum(counts.values()) == 8 and victim not in counts
            await until(lambda: len(workers._workers) == 2, 60)

    asyncio.run(run())


def test_cancelling_ends_the_episodes_elsewhere(cluster: Any, layer: Path) -> None:
    async def run() -> None:
        async with provider() as fleet, RayWorkers(1, fleet, no_generator) as workers:
            going = asyncio.ensure_future(play(fleet, workers, layer, nap(98795), 2))
            await until(lambda: len(sleepers(nap(98795))) >= 2)
            began = time.monotonic()
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
            assert sleepers(nap(98795)) == [] and time.monotonic() - began < 20

    asyncio.run(run())
