"""Measure the policy: a fixed set of episodes on held-out tasks, the same before and after.

The phase (part of every sampling seed) names the evaluation, not the time, so the episodes before
and after training differ by the policy alone and their difference is paired.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_jax.actor.collect import Progress, collect, healthy
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import Task, TrajectoryGroup
from skyrl_jax.train.rollouts import write_rollouts
from skyrl_jax.train.workdir import read_json, write_json
from skyrl_jax.train.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of one evaluation.

    ``scores``: {task id: score of each of its episodes}; FAILED episodes are in ``failed`` only.
    """

    name: str
    scores: Mapping[str, Sequence[float]]
    failed: int

    @property
    def episodes(self) -> int:
        """Return how many episodes have a score."""
        return sum(len(values) for values in self.scores.values())

    @property
    def rate(self) -> float:
        """Return the mean score over all episodes."""
        return sum(sum(values) for values in self.scores.values()) / max(1, self.episodes)

    def only(self, keep: Callable[[str], bool]) -> Evaluation:
        """Return the part whose task ids ``keep`` accepts."""
        scores = {task: values for task, values in self.scores.items() if keep(task)}
        return Evaluation(name=self.name, scores=scores, failed=self.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """One evaluation: which split, how many samples of each task, at which temperature."""

    name: str
    split: str
    samples: int
    temperature: float


def plans(world: World) -> tuple[EvalPlan, ...]:
    """Return the evaluations of a run: sampled and greedy on held-out tasks, unseen functions."""
    cfg = world.config.eval
    heldout, unseen = len(world.suite.tasks("heldout")), len(world.suite.tasks("unseen"))
    chosen: list[EvalPlan] = []
    if heldout and cfg.episodes:
        samples = -(-cfg.episodes // heldout)
        chosen.append(
            EvalPlan(name="sampled", split="heldout", samples=samples, temperature=cfg.temperature)
        )
    if heldout and cfg.greedy:
        chosen.append(EvalPlan(name="greedy", split="heldout", samples=1, temperature=0.0))
    if unseen and cfg.unseen_episodes:
        samples = -(-cfg.unseen_episodes // unseen)
        chosen.append(
            EvalPlan(name="unseen", split="unseen", samples=samples, temperature=cfg.temperature)
        )
    return tuple(chosen)


def stored(workdir: Path, step: int, plan: EvalPlan) -> Evaluation | None:
    """Return the evaluation of the policy after ``step`` that this run has made, if it has."""
    found = _read(_path(workdir, step, plan))
    return None if found is None or found[1] != asdict(plan) else found[0]


async def evaluate(
    world: World,
    step: int,
    plan: EvalPlan,
    on_progress: Callable[[Progress], None] | None = None,
) -> Evaluation:
    """Run one evaluation of the served policy, or read it back when it was made already.

    Args:
        world: the run's parts; the generator serves the weights to measure.
        step: steps that the served policy has behind it.
        plan: what to run.
        on_progress: called after every episode.
    """
    found = stored(world.workdir, step, plan)
    if found is not None:
        return found
    path = _path(world.workdir, step, plan)
    tasks = world.suite.tasks(plan.split)
    collected = await collect(
        tasks,
        plan.samples,
        suite=world.suite,
        provider=world.provider,
        generator=world.generator,
        agent=world.agent(f"eval/{plan.name}", temperature=plan.temperature),
        rollout=world.config.rollout,
        on_progress=on_progress,
        run=world.run,
    )
    healthy(collected)
    trajectories = [item for group in collected.groups for item in group.trajectories]
    write_rollouts(path.with_suffix(".jsonl"), trajectories)
    found = score_groups(plan.name, collected.groups)
    write_json(path, asdict(found) | {"plan": asdict(plan)})
    return found


def score_groups(name: str, groups: Sequence[TrajectoryGroup]) -> Evaluation:
    """Collect the scores of groups; infrastructure failures are counted, never scored."""
    scores: dict[str, list[float]] = {}
    failed = 0
    for group in groups:
        values = [t.score.value for t in group.trajectories if t.score is not None]
        failed += len(group.trajectories) - len(values)
        if values:
            scores[group.task_id] = values
    return Evaluation(name=name, scores=scores, failed=failed)


def stored_sampled(workdir: Path) -> dict[int, Evaluation]:
    """Return every stored evaluation on sampled held-out episodes by the steps it had behind it."""
    found: dict[int, Evaluation] = {}
    for path in sorted((workdir / "eval").glob("step_*-sampled.json")):
        made, step = _read(path), _step(path)
        if made is not None and step is not None:
            found[step] = made[0]
    return found


def drop(workdir: Path, *, after: int = -1) -> None:
    """Forget the stored evaluations of policies past a step: these will be made again."""
    for path in (workdir / "eval").glob("step_*"):
        step = _step(path)
        if step is not None and step > after:
            path.unlink()


def _path(workdir: Path, step: int, plan: EvalPlan) -> Path:
    return workdir / "eval" / f"step_{step:06d}-{plan.name}.json"


def _step(path: Path) -> int | None:
    """Return the step of an evaluation's file; ``None`` for a file that is none of ours."""
    named = re.match(r"step_(\d{6,})-", path.name)
    return int(named[1]) if named else None


def _read(path: Path) -> tuple[Evaluation, Any] | None:
    """Return a stored evaluation and its plan; a damaged one was not made."""
    try:
        values = read_json(path)
        found, plan = Evaluation(**{k: v for k, v in values.items() if k != "plan"}), values["plan"]
        sound = isinstance(found.failed, int) and found.failed >= 0 and found.scores
        rates = [math.fsum(map(float, values)) / len(values) for values in found.scores.values()]
        return (found, plan) if sound and all(0 <= rate <= 1 for rate in rates) else None
    except (DataError, ArithmeticError, TypeError, ValueError, KeyError, AttributeError):
        return None


def as_scores(found: Evaluation, tasks: Sequence[Task], sft: bool) -> Evaluation:
    """Return the part of an evaluation whose mutation kinds the warm start saw (or did not)."""
    kind: dict[str, Any] = {task.task_id: bool(task.payload["sft"]) for task in tasks}
    return found.only(lambda task_id: kind.get(task_id) is sft)
