"""Group-relative advantages over rollouts (never over rows).

    grpo   A_i = r_i - mean(r)            optionally / (std(r) + 1e-6)
    rloo   A_i = r_i - mean(r_j, j != i) = n / (n - 1) * (r_i - mean(r))

The statistics are over the rollouts of a task that have a score and at least one sampled token of
the agent's own: FAILED rollouts and empty responses neither get an advantage nor move the others'
mean.
Sources: DeepSeekMath (arXiv:2402.03300) eq. 3; RLOO (arXiv:2402.14740) eq. 7. std is the sample
standard deviation (n - 1), as in the common trainers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from skyrl_jax.batching.sequences import AGENT, rollout_id
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Episode, Status, Trajectory, TrajectoryGroup

EPSILON = 1e-6
KINDS = ("grpo", "rloo")


def counts(trajectory: Trajectory) -> bool:
    """Return whether a trajectory is in its group's statistics."""
    turns = trajectory.episode.turns
    sampled = any(turn.completion.token_ids for turn in turns if turn.kind == AGENT)
    failed = trajectory.episode.status is Status.FAILED
    return trajectory.score is not None and sampled and not failed


def was_cut(episode: Episode, reasons: Seq[str]) -> bool:
    """Return whether an episode was truncated for one of ``reasons``.

    ``reasons`` holds truncation reasons ("turns") or their first part ("agent" for any
    "agent:<cause>").
    """
    if episode.status is not Status.TRUNCATED:
        return False
    return episode.reason in reasons or episode.reason.split(":")[0] in reasons


def group_advantages(
    group: TrajectoryGroup, kind: str, *, normalize_std: bool = False
) -> dict[str, float]:
    """Return {rollout id: advantage} of the members that count.

    Example: grpo without std on rewards (1, 0, 0, 1) gives (0.5, -0.5, -0.5, 0.5).

    Raises:
        ConfigError: ``kind`` is none of KINDS.
    """
    if kind not in KINDS:
        raise ConfigError(f"objective.advantage is {kind!r}; group statistics: {', '.join(KINDS)}")
    members = [member for member in group.trajectories if counts(member)]
    rewards = np.asarray([m.score.value for m in members if m.score is not None], np.float64)
    if not members:
        return {}
    if rewards.min() == rewards.max():  # exactly zero, whatever the rounding of the mean
        values = np.zeros_like(rewards)
    else:
        size = len(rewards)
        values = rewards - rewards.mean()
        if kind == "rloo":
            values = values * size / (size - 1)
        if normalize_std:
            values = values / (rewards.std(ddof=1) + EPSILON)
    return {
        rollout_id(member.episode): float(value)
        for member, value in zip(members, values, strict=True)
    }


def zero_cut(groups: Seq[TrajectoryGroup], reasons: Seq[str]) -> tuple[TrajectoryGroup, ...]:
    """Give episodes that were truncated for one of ``reasons`` the training reward 0.

    A repair that was never submitted is graded like any other (verdicts stay, and with them the
    resolved rates). But if it earned the same reward, whatever the agent did after it would be
    reinforced as much as the repair itself.
    """

    def reward(member: Trajectory) -> Trajectory:
        if member.score is None or not was_cut(member.episode, reasons):
            return member
        return replace(member, score=replace(member.score, value=min(0.0, member.score.value)))

    return _each_member(groups, reward)


def permute_rewards(groups: Seq[TrajectoryGroup], seed: int) -> tuple[TrajectoryGroup, ...]:
    """Shuffle the reward values over the whole batch (the control run: nothing can be learnt).

    Only members that count take part; verdicts stay, so that resolved rates stay true.
    """
    scored = [
        member.score.value
        for group in groups
        for member in group.trajectories
        if counts(member) and member.score is not None
    ]
    random.Random(seed).shuffle(scored)
    values = iter(scored)

    def reward(member: Trajectory) -> Trajectory:
        if not counts(member) or member.score is None:
            return member
        return replace(member, score=replace(member.score, value=next(values)))

    return _each_member(groups, reward)


def _each_member(
    groups: Seq[TrajectoryGroup], change: Callable[[Trajectory], Trajectory]
) -> tuple[TrajectoryGroup, ...]:
    return tuple(
        replace(group, trajectories=tuple(change(member) for member in group.trajectories))
        for group in groups
    )
