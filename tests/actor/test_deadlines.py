"""Collection: deadlines, breaker, cancel at each stage: nothing hangs and nothing stays open."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from skyrl_jax.actor import collect as collect_module
from skyrl_jax.actor import episodes
from skyrl_jax.actor.budgets import BudgetedProvider
from skyrl_jax.actor.collect import collect
from skyrl_jax.core.errors import (
    BreakerOpen,
    CapacityError,
    HostError,
    InfraError,
)
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.core.types import Status
from tests.actor.fakes import (
    FIXED,
    RENDERER,
    RIGHT,
    FakeSuite,
    TextGenerator,
    make_agent,
    make_rollout,
    make_task,
    one,
    raising,
    repairs,
    run,
)


def test_no_room_waits_within_the_init_deadline() -> None:
    suite = FakeSuite(hooks={"init": raising(CapacityError("full"), times=1)})
    assert one(run(suite)[0]).score.value == 1.0
    full = FakeSuite(hooks={"init": raising(CapacityError("full"))})
    assert one(run(full, init_timeout_s=0.3)[0]).episode.reason == "infra:init_deadline"


def test_every_stage_has_its_own_deadline(monkeypatch) -> None:
    monkeypatch.setattr(episodes, "GRACE_S", 0.5)

    def hang(stage):
        return FakeSuite(hooks={stage: lambda _: asyncio.sleep(9)})

    started = time.monotonic()
    assert one(run(hang("init"), init_timeout_s=0.05)[0]).episode.reason == "infra:init_deadline"
    graded, suite = run(hang("grade"), grade_timeout_s=0.05)
    assert one(graded).score.verdict == "timeout" and suite.grades == 2
    agent = make_agent(RENDERER, time_limit_s=0.05)
    assert one(run(hang("run"), agent=agent)[0]).episode.reason == "time"
    assert time.monotonic() - started < 5


def test_a_sandbox_has_a_budget_of_its_own_for_being_made() -> None:
    class Slow:
        async def create(self, spec):
            await asyncio.sleep(spec.lifetime_s)
            return "box"

    async def made(takes, budget):
        return await BudgetedProvider(Slow(), budget).create(
            SandboxSpec(image="", lifetime_s=takes)
        )

    assert asyncio.run(made(0.0, 5.0)) == "box"
    with pytest.raises(InfraError, match="create_timeout_s = 0.05 s") as caught:
        asyncio.run(made(9.0, 0.05))
    assert caught.value.cause == "create"


def test_an_agent_that_ignores_the_clock_is_stopped_and_its_work_counts(monkeypatch) -> None:
    monkeypatch.setattr(episodes, "GRACE_S", 0.5)

    def answer(session, turn):
        return RIGHT

    def hook(_):
        return asyncio.sleep(9) if hooked.append(1) or len(hooked) > 1 else None

    hooked: list[int] = []
    collected, _ = run(FakeSuite(hooks={"run": hook}), answer=answer, run_timeout_s=0.5)
    trajectory = one(collected)
    assert (trajectory.episode.status, trajectory.episode.reason) == (Status.TRUNCATED, "time")
    assert trajectory.episode.submission == FIXED and trajectory.score.value == 1.0
    assert len(trajectory.episode.turns) == 2


def test_the_breaker_opens_with_the_first_cause_and_leaves_nothing_open() -> None:
    """Faults C33."""
    calls = Counter()

    def broken(task_id):
        calls[task_id] += 1
        raise InfraError(f"disk of {task_id} is gone")

    suite = FakeSuite(hooks={"init": broken})
    with pytest.raises(BreakerOpen, match="3 host failures in a row") as caught:
        run(suite, tasks=50, breaker=3, live_sandboxes=1)
    assert "disk of task-0 is gone" in str(caught.value)
    assert len(calls) <= 4  # the next one may have started


def test_the_breaker_counts_only_failures_in_a_row() -> None:
    def every_third_works(task_id):
        if int(task_id.split("-")[1]) % 3:
            raise InfraError("flaky")

    suite = FakeSuite(hooks={"init": every_third_works})
    collected, _ = run(suite, tasks=12, breaker=3, live_sandboxes=1, init_concurrency=1)
    assert collected.failures == {"infra:sandbox": 8}


@pytest.mark.parametrize("stage", ["init", "run", "submission", "grade"])
def test_cancel_at_each_stage_leaves_no_environment_open(stage: str) -> None:
    """Faults C30."""
    reached = asyncio.Event()

    async def wait():
        reached.set()
        await asyncio.sleep(30)

    suite = FakeSuite(hooks={stage: lambda _: wait()})

    async def main():
        made = collect(
            [make_task(i) for i in range(6)], 2, suite=suite, provider=None,
            generator=TextGenerator(RENDERER, repairs), agent=make_agent(RENDERER),
            rollout=make_rollout(),
        )  # fmt: skip
        task = asyncio.create_task(made)
        await asyncio.wait_for(reached.wait(), 5)
        if stage != "grade":
            assert suite.open > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert suite.open == 0 and suite.opened > 0
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"

    asyncio.run(main())


def test_a_second_cancel_while_closing_still_closes() -> None:
    closing = asyncio.Event()

    class Slow(FakeSuite):
        def environment(self, task, provider):
            world = super().environment(task, provider)
            close = world.close

            async def slow_close():
                closing.set()
                await asyncio.sleep(0.05)
                await close()

            world.close = slow_close
            return world

    suite = Slow()

    async def main():
        world = suite.environment(make_task(), None)
        await world.reset()
        task = asyncio.create_task(episodes.close_environment(world, 60.0))
        await closing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert suite.open == 0

    asyncio.run(main())


def test_a_close_that_fails_or_hangs_is_told_and_does_not_spoil_the_score() -> None:
    class BadClose(FakeSuite):
        hang = False

        def environment(self, task, provider):
            world = super().environment(task, provider)

            async def bad():
                self.open = 0
                if self.hang:
                    await asyncio.sleep(9)
                raise InfraError("umount: busy")

            world.close = bad
            return world

    collected, _ = run(BadClose())
    assert one(collected).score.value == 1.0 and "umount: busy" in collected.details[0]
    hanging = BadClose()
    hanging.hang = True
    collected, _ = run(hanging, destroy_timeout_s=0.5)
    assert one(collected).score.value == 1.0 and "took longer" in collected.details[0]


def test_the_watchdog_says_who_is_where(monkeypatch) -> None:
    monkeypatch.setattr(collect_module, "_longest", lambda rollout, total: 0.1)
    suite = FakeSuite(hooks={"grade": lambda _: asyncio.sleep(9)})
    with pytest.raises(HostError, match="task-0/0 in grade for 0 s") as caught:
        run(suite)
    assert caught.value.cause == "watchdog"
