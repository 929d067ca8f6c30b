"""One step around the learner: which tasks are played, and what is remembered of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

from configs.swe import get_config
from skyrl_jax.actor.collect import Collected
from skyrl_jax.batching.minibatch import sampled_tokens
from skyrl_jax.core.config import parse_config
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.core.types import Status, Task, TrajectoryGroup
from skyrl_jax.train.curriculum import Curriculum, Seen, draw
from skyrl_jax.train.state import HostState
from skyrl_jax.train.step import run_step
from tests.batching.make import group, trajectory, turn

TOTAL = 40
TASKS = [Task(task_id=f"t{at}", prompt="") for at in range(TOTAL)]
# Tasks 0 to 19 were played long ago and are worth playing again.
BEFORE = Curriculum(
    total=TOTAL,
    epoch=1,
    queue=tuple(range(20, TOTAL)),
    seen={at: Seen(rate=0.5, step=1) for at in range(20)},
)


class Learner:
    """Counts updates; its params are its count."""

    params = 0

    def update(self, batches):
        self.params += len(batches)
        return {}


def played(members_of, every=2, provider=None):
    """Return (host after, metrics, tasks) of step 30; ``members_of(at)``: a task's trajectories.

    ``every``: config.eval.every.
    """
    config = parse_config(get_config("quickstart").to_dict())
    config = replace(config, rollout=replace(config.rollout, tasks_per_step=4, samples_per_task=2))
    config = replace(config, eval=replace(config.eval, every=every))
    drawn: list[str] = []

    async def play(world, tasks, step, on_progress):
        drawn.extend(task.task_id for task in tasks)
        groups = tuple(
            TrajectoryGroup(task_id=task.task_id, trajectories=members_of(int(task.task_id[1:])))
            for task in tasks
        )
        tokens = sum(sampled_tokens(t) for g in groups for t in g.trajectories)
        return Collected(groups=groups, sampled_tokens=tokens, abandoned_tokens=0)

    async def serve(params, number):
        return {"publish_gb_per_s": 0.5}

    suite = SimpleNamespace(
        tasks=lambda split: TASKS,
        upcoming=lambda task: (SandboxSpec(image=task.task_id),) * 2,
    )
    world = SimpleNamespace(config=config, suite=suite, provider=provider, serve=serve)
    host = HostState(step=29, curriculum=BEFORE)
    outcome = asyncio.run(run_step(world, Learner(), host, play=play))
    return outcome.host, outcome.metrics, drawn


def test_the_drawn_tasks_are_played_and_remembered():
    again, fresh, _ = draw(BEFORE, TOTAL, 4, 0.75, 0, 30)
    assert (len(again), len(fresh)) == (3, 1)

    def members(at):
        return group([1, 1] if at in again else [1, 0], task=f"t{at}").trajectories

    host, metrics, drawn = played(members)
    assert drawn == [f"t{at}" for at in [*again, *fresh]]
    assert metrics["revisited_tasks"] == 3.0
    assert {"wait_s", "pack_s", "step_s", "publish_s"} <= set(metrics)  # where the time goes
    assert metrics["resolved_rate_fresh"] == 0.5
    assert metrics["publish_gb_per_s"] == 0.5
    seen = host.curriculum.seen
    assert seen is not None
    for at in again:
        assert seen[at] == Seen(rate=0.75, step=30)
    assert seen[fresh[0]] == Seen(rate=0.5, step=30)
    assert fresh[0] not in host.curriculum.queue
    assert HostState.from_json(host.to_json()).curriculum == host.curriculum


def test_a_task_is_remembered_by_the_rewards_it_trains_with():
    """All repair it and half submit: the group is mixed, so the task is worth playing again."""

    def members(at):
        cut = {"status": Status.TRUNCATED, "reason": "turns"}
        done = trajectory(1, turn([1, 2], [3]), task=f"t{at}", index=0)
        return (done, trajectory(1, turn([1, 2], [3]), task=f"t{at}", index=1, **cut))

    host, metrics, drawn = played(members)
    assert metrics["resolved_rate"] == 1.0, "what is reported stays the graded result"
    assert host.curriculum.seen is not None
    assert {host.curriculum.seen[int(name[1:])].rate for name in drawn} == {0.5}


class Told:
    """A provider with a warm pool: writes down what it is told."""

    def __init__(self):
        self.calls = []

    def prepare(self, spec, count):
        self.calls.append((spec.image, count))


def test_the_next_steps_sandboxes_are_announced_while_the_learner_works():
    def members(at):
        return group([1, 0], task=f"t{at}").trajectories

    told = Told()
    host, _, _ = played(members, every=7, provider=told)
    share = (4, parse_config(get_config("quickstart").to_dict()).rollout.revisit_fraction)
    again, fresh, _ = draw(host.curriculum, TOTAL, *share, 0, 31)
    assert told.calls == [(f"t{at}", 2 * 2) for at in (*again, *fresh)]  # samples x sandboxes
    told = Told()
    played(members, every=30, provider=told)  # an evaluation comes first: other tasks
    assert told.calls == []
