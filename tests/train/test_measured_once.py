"""Evaluation belongs to steps of the run: once each, however many updates and micro-batches."""

from __future__ import annotations

import asyncio
import io
import time
from dataclasses import replace
from types import SimpleNamespace

from rich.console import Console

from configs.swe import get_config
from skyrl_jax.actor.episodes import run_episode
from skyrl_jax.agents.scripted import SUBMIT
from skyrl_jax.core.config import parse_config
from skyrl_jax.train.loop import Run, measure, train
from skyrl_jax.train.progress import Progress
from skyrl_jax.train.state import HostState
from tests.actor.fakes import (
    RENDERER,
    RIGHT,
    WRONG,
    FakeSuite,
    TextGenerator,
    make_agent,
    make_task,
)

KEYS = {
    "train.steps": 5,
    "train.time_limit_s": 0.0,
    "train.checkpoint_every": 2,
    "eval.every": 2,
    "eval.episodes": 2,
    "eval.unseen_episodes": 0,
    "eval.greedy": False,
    "rollout.tasks_per_step": 2,
    "rollout.samples_per_task": 2,
    "learner.updates_per_batch": 2,
    "learner.epochs_per_batch": 2,
    "learner.micro_rows": 1,
    "learner.row_length": 2048,
}


class Suite(FakeSuite):
    """Four training tasks and one that is held out."""

    def tasks(self, split):
        return {"train": [make_task(at) for at in range(4)], "heldout": [make_task(9)]}.get(
            split, []
        )


class Learner:
    """Counts the rows of a micro-batch that it was given."""

    params = None
    micro_batches = 0
    saved = ()

    def update(self, minibatches):
        self.micro_batches += sum(len(batch.tokens) for batch in minibatches)
        return {}

    def save(self, step, host):
        self.saved = (*self.saved, step)


def test_a_step_is_measured_once_and_only_where_it_is_due(tmp_path):
    values = get_config("quickstart")
    values.update_from_flattened_dict(KEYS)
    config = parse_config(values.to_dict())
    begun = []  # what collected episodes, and after how many steps

    def agent(phase, temperature=None):
        begun.append((phase, live.host.step))
        return make_agent(RENDERER)

    async def serve(params, number):
        return {}

    def answer(session, turn):  # the first sample of a task is right: all groups are mixed
        first = RIGHT if session.endswith("/0") else WRONG
        return (first, SUBMIT)[turn % 2]

    log = SimpleNamespace(log=lambda step, metrics: None)
    world = SimpleNamespace(
        config=config,
        workdir=tmp_path,
        provider=None,
        suite=Suite(),
        generator=TextGenerator(RENDERER, answer),
        agent=agent,
        serve=serve,
        run=run_episode,
    )
    policy = Learner()
    live = Run(
        config=config,
        workdir=tmp_path,
        world=world,
        policy=policy,
        progress=Progress(5, console=Console(file=io.StringIO())),
        tracker=log,
        board=log,
        host=HostState(),
        began=time.monotonic(),
        seconds={},
        profile=frozenset(),
    )
    asyncio.run(train(live))
    assert live.host.step == 5 and policy.saved == (2, 4, 5)
    assert policy.micro_batches > 5 * 2, "every step had several micro-batches"
    due = [item for item in begun if item[0].startswith("eval/")]
    assert due == [("eval/sampled", 2), ("eval/sampled", 4)]
    assert [item for item in begun if item not in due] == [
        (f"train/{step + 1}", step) for step in range(5)
    ]
    made = sorted(path.name for path in (tmp_path / "eval").glob("*.json"))
    assert made == ["step_000002-sampled.json", "step_000004-sampled.json"]

    # a start that comes back to such a step reads it, and another one is measured
    live.host = replace(live.host, step=4)
    asyncio.run(measure(live, only="sampled"))
    assert len(begun) == 7
    live.host = replace(live.host, step=5)
    asyncio.run(measure(live, only="sampled"))
    assert begun[7:] == [("eval/sampled", 5)]
