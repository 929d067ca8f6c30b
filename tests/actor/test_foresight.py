"""A collection tells a warm pool what is coming, takes it back, and is never hurt by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from skyrl_jax.actor.collect import collect
from skyrl_jax.actor.foresight import Foresight
from skyrl_jax.core.errors import BreakerOpen, ImageError, InfraError
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.core.types import Task
from tests.actor.fakes import (
    RENDERER,
    FakeSuite,
    TextGenerator,
    make_agent,
    make_rollout,
    make_task,
    raising,
    repairs,
)


class KnowingSuite(FakeSuite):
    """A suite that foresees two equal sandboxes of each task: one to work in, one to grade in."""

    def upcoming(self, task: Task) -> Sequence[SandboxSpec]:
        if task.task_id == "t-lost":
            raise ImageError("no tree")
        spec = SandboxSpec(image=task.task_id, env={"A": "1"})
        return (spec, spec)


class Told:
    """A provider that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def prepare(self, spec: SandboxSpec, count: int) -> None:
        self.calls.append((spec.image, count))

    async def create(self, spec: SandboxSpec) -> None:
        raise AssertionError("the fake world needs no sandbox")


def play(suite, told, tasks, samples=2, **options):
    made = collect(
        tasks,
        samples,
        suite=suite,
        provider=told,
        generator=TextGenerator(RENDERER, repairs),
        agent=make_agent(RENDERER),
        rollout=make_rollout(**options),
    )
    return asyncio.run(asyncio.wait_for(made, 20))


def test_each_task_is_announced_in_order_and_called_off_when_it_is_over() -> None:
    told, tasks = Told(), [make_task(i) for i in range(3)]
    play(KnowingSuite(), told, tasks, live_sandboxes=1)
    names = [task.task_id for task in tasks]
    announced = [name for name, count in told.calls if count]
    assert announced and announced == [name for name in names if name in announced]
    assert {count for _, count in told.calls} == {4, 0}  # 2 samples, 2 sandboxes each
    for name in announced:
        counts = [count for told_name, count in told.calls if told_name == name]
        assert counts[0] == 4 and counts[-1] == 0


def test_whatever_ends_a_collection_calls_the_rest_off() -> None:
    told, tasks = Told(), [make_task(i) for i in range(6)]
    suite = KnowingSuite()
    suite_hook = raising(InfraError("down"))

    async def hook(stage: str, task_id: str) -> None:
        await asyncio.sleep(0.05)  # the announcements are faster
        suite_hook(task_id)

    suite.hook = hook
    with pytest.raises(BreakerOpen):
        play(suite, told, tasks, breaker=2)
    standing = dict(told.calls)  # the last word on each
    assert len(standing) == 6 and set(standing.values()) == {0}


def test_a_task_without_a_tree_is_the_episodes_own_news() -> None:
    lost = Task(task_id="t-lost", prompt="p", payload={})
    told = Told()
    foresight = Foresight(KnowingSuite(), told, 1)
    asyncio.run(foresight.announce([lost, make_task(1)]))
    assert [name for name, _ in told.calls] == [make_task(1).task_id]


def test_who_cannot_is_not_asked() -> None:
    told = Told()
    asyncio.run(Foresight(FakeSuite(), told, 1).announce([make_task(0)]))
    asyncio.run(Foresight(KnowingSuite(), object(), 1).announce([make_task(0)]))
    assert told.calls == []
    foresight = Foresight(KnowingSuite(), told, 1)
    foresight.end_episode(make_task(0))
    asyncio.run(foresight.announce([make_task(0)]))  # it is over already
    assert told.calls == []
