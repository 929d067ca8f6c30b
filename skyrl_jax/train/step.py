"""One RL step: collect -> pack -> update -> publish, each timed, the ledger checked."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_jax.actor.collect import Collected, Progress, collect, healthy
from skyrl_jax.actor.foresight import Foresight
from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.batching.advantages import zero_cut
from skyrl_jax.batching.minibatch import Assembled, assemble
from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.protocols import Warming
from skyrl_jax.core.types import Task, Trajectory, TrajectoryGroup
from skyrl_jax.train.curriculum import Curriculum, draw, observe
from skyrl_jax.train.policy import Policy, rows_per_minibatch
from skyrl_jax.train.state import HostState
from skyrl_jax.train.tracing import traced
from skyrl_jax.train.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step leaves: the next host state, its numbers, its episodes."""

    host: HostState
    metrics: dict[str, float]
    trajectories: tuple[Trajectory, ...]


OnProgress = Callable[[Progress], None] | None
Play = Callable[[World, Sequence[Task], int, OnProgress], Awaitable[Collected]]


async def run_step(
    world: World,
    policy: Policy,
    host: HostState,
    on_progress: OnProgress = None,
    *,
    play: Play | None = None,
    profile: Path | None = None,
) -> StepOutcome:
    """Play one batch of episodes under the served version and update the policy.

    The wall time of each part is in the metrics: wait_s (rollouts), pack_s, step_s, publish_s; the
    caller adds checkpoint_s and wall_s. ``play`` collects the groups of given tasks in another way
    than through the world's sandboxes and server. ``profile``: the folder for a trace of the
    learner's part (train/tracing.py).
    """
    config, step = world.config, host.step + 1
    marks = [time.perf_counter()]
    tasks, rollout = world.suite.tasks("train"), config.rollout
    share = (rollout.tasks_per_step, rollout.revisit_fraction)
    again, fresh, curriculum = draw(host.curriculum, len(tasks), *share, config.seed, step)
    chosen = [*again, *fresh]
    drawn = [tasks[at] for at in chosen]
    collected = healthy(await (play or _collect)(world, drawn, step, on_progress))
    # what a group teaches depends on the rewards it trains with
    trained = zero_cut(collected.groups, config.objective.zeroed_reasons)
    curriculum = observe(curriculum, chosen, trained, step)
    marks.append(time.perf_counter())
    batch = assemble(
        collected.groups,
        config.objective,
        row_length=config.learner.row_length,
        micro_rows=config.learner.micro_rows,
        updates=config.learner.updates_per_batch,
        seed=derive_seed(config.seed, "batch", step),
        total_rows=rows_per_minibatch(config),
        routing=rollout.replay_routing,
    )
    ledger = host.ledger.sample(collected.sampled_tokens).train(batch.trained)
    ledger = ledger.drop_all(batch.dropped).drop("abandoned", collected.abandoned_tokens).check()
    marks.append(time.perf_counter())
    with traced(profile):
        learned, _ = await asyncio.gather(
            asyncio.to_thread(policy.update, batch.minibatches),
            look_ahead(world, curriculum, step),
        )
    marks.append(time.perf_counter())
    served = await world.serve(policy.params, step)
    marks.append(time.perf_counter())
    parts = ("wait_s", "pack_s", "step_s", "publish_s")
    seconds = {name: marks[i + 1] - marks[i] for i, name in enumerate(parts)}
    trajectories = tuple(item for group in collected.groups for item in group.trajectories)
    metrics = episode_metrics(trajectories) | batch_metrics(batch, config) | learned
    metrics |= seconds | served
    metrics |= turn_metrics(collected.groups, len(again))
    metrics["tokens_per_s"] = collected.sampled_tokens / max(1e-9, seconds["wait_s"])
    after = replace(
        host,
        step=step,
        version=step,
        ledger=ledger,
        curriculum=curriculum,
        episodes=host.episodes + len(trajectories),
        failed=host.failed + sum(collected.failures.values()),
        mismatch_max=max(host.mismatch_max, metrics.get("mismatch_abs_mean", 0.0)),
        row=metrics,
    )
    return StepOutcome(host=after, metrics=metrics, trajectories=trajectories)


async def look_ahead(world: World, curriculum: Curriculum, step: int) -> None:
    """Let a warm pool make the next step's sandboxes while this one's update is computed."""
    config = world.config
    rollout, every = config.rollout, config.eval.every
    other_first = step >= config.train.steps or (every and step % every == 0)
    if other_first or not isinstance(world.provider, Warming):
        return
    tasks = world.suite.tasks("train")
    share = (rollout.tasks_per_step, rollout.revisit_fraction)
    again, fresh, _ = draw(curriculum, len(tasks), *share, config.seed, step + 1)
    ahead = Foresight(world.suite, world.provider, rollout.samples_per_task)
    await ahead.announce([tasks[at] for at in (*again, *fresh)])


async def _collect(
    world: World, tasks: Sequence[Task], step: int, on_progress: OnProgress
) -> Collected:
    rollout = world.config.rollout
    return await collect(
        tasks,
        rollout.samples_per_task,
        suite=world.suite,
        provider=world.provider,
        generator=world.generator,
        agent=world.agent(f"train/{step}"),
        rollout=rollout,
        on_progress=on_progress,
        run=world.run,
    )


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the numbers of a step's episodes; failed ones enter their own count only."""
    scored = [(item.episode, item.score) for item in trajectories if item.score is not None]
    count = max(1, len(scored))
    turns = [len(episode.turns) for episode, _ in scored]
    lengths = [sum(len(t.completion.token_ids) for t in e.turns) for e, _ in scored]
    metrics: dict[str, float] = {
        "reward_mean": sum(score.value for _, score in scored) / count,
        "resolved_rate": sum(score.verdict == "resolved" for _, score in scored) / count,
        "episodes": float(len(trajectories)),
        "failed_episodes": float(len(trajectories) - len(scored)),
        "turns_mean": sum(turns) / count,
        "sampled_tokens_mean": sum(lengths) / count,
    }
    for name, value in _shares([f"status/{e.status}_{e.reason}" for e, _ in scored]).items():
        metrics[name] = value
    happened: Counter[str] = Counter()
    for episode, _ in scored:
        happened.update(episode.counts)
    metrics |= {f"gateway/{name}": value / count for name, value in sorted(happened.items())}
    for name, value in _shares([f"verdict/{score.verdict}" for _, score in scored]).items():
        metrics[name] = value
    return metrics


def turn_metrics(groups: Sequence[TrajectoryGroup], revisited: int) -> dict[str, float]:
    """Return how many tasks were played again, and the resolved rate of the fresh ones.

    Tasks are played again since they are neither hopeless nor easy, so only the fresh ones, whose
    turn it was, tell how the policy does on the training tasks. Without any there is no figure.
    """
    scores = [t.score for group in groups[revisited:] for t in group.trajectories if t.score]
    metrics = {"revisited_tasks": float(revisited)}
    if scores:
        resolved = sum(score.verdict == "resolved" for score in scores)
        metrics["resolved_rate_fresh"] = resolved / len(scores)
    return metrics


def batch_metrics(batch: Assembled, config: RunConfig) -> dict[str, float]:
    """Return how full the packed rows are and what the filters left out."""
    rows = rows_per_minibatch(config) * max(1, len(batch.minibatches))
    used = sum(int((b.segment_ids != 0).sum()) for b in batch.minibatches)
    metrics: dict[str, Any] = dict(batch.stats)
    metrics["trained_tokens"] = float(batch.trained)
    metrics["row_fill"] = used / (rows * config.learner.row_length)
    return metrics


def _shares(names: Sequence[str]) -> dict[str, float]:
    return {name: names.count(name) / len(names) for name in sorted(set(names))}
