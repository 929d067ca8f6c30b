"""Groups -> the mini-batches of one step, with every sampled token accounted for.

    groups -> advantages -> rows -> filters -> split -> weights per mini-batch -> packed Batches

The split comes before the weights, so each mini-batch is a whole reduction of its own; all rows of
a rollout stay together, and all rollouts of a task where there are enough tasks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from skyrl_jax.batching.advantages import (
    group_advantages,
    permute_rewards,
    was_cut,
    zero_cut,
)
from skyrl_jax.batching.packing import Segment, fits, pack, trained_tokens
from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.batching.weights import loss_weights, sft_weights
from skyrl_jax.core.config import ObjectiveConfig
from skyrl_jax.core.types import Batch, Episode, Sequence, Status, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """The mini-batches of one step.

    ``trained`` counts from the batches, ``dropped`` from the filters: with the generator's own
    count of sampled tokens they must balance (batching/ledger.py). ``stats`` are plain numbers for
    the metrics. No mini-batch at all is possible: nothing to learn in this step.
    """

    minibatches: tuple[Batch, ...]
    trained: int
    dropped: Mapping[str, int]
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A row with what decides its place: its task and its rollout's advantage."""

    task_id: str
    advantage: float
    sequence: Sequence


def assemble(
    groups: Seq[TrajectoryGroup],
    objective: ObjectiveConfig,
    *,
    row_length: int,
    micro_rows: int,
    updates: int,
    seed: int,
    total_rows: int | None = None,
    skip_zero: bool | None = None,
    routing: bool = False,
) -> Assembled:
    """Turn collected groups into packed mini-batches.

    Args:
        groups: in a fixed order.
        objective: advantage, reduction, masked and zeroed reasons, the permuted control.
        row_length: tokens per packed row.
        micro_rows: rows per micro-batch.
        updates: mini-batches wanted (fewer when there are fewer rollouts).
        seed: of the split and of the permuted control; derive it from the run's seed and the step.
        total_rows: fixed number of rows per mini-batch.
        skip_zero: leave rows of advantage 0 out of the batch after their weights are made: the
            gradient is the same, the compute less. Default: where no KL, entropy or balance, which
            act on such rows too, is in the loss.
        routing: refuse samples that do not tell their experts (rollout.replay_routing).

    Raises:
        DataError: an episode lacks what the objective needs (batching/sequences.py).
    """
    groups = zero_cut(groups, objective.zeroed_reasons)
    if objective.permute_rewards:
        groups = permute_rewards(groups, seed)
    dropped: Counter[str] = Counter()
    units, stats = _units(groups, objective, row_length, routing, dropped)
    if skip_zero is None:
        skip_zero = not (objective.kl_coef or objective.entropy_coef or objective.balance_coef)
    batches: list[Batch] = []
    for part in split([(u.task_id, u.sequence.rollout_id) for u in units], updates, seed):
        segments = _segments([units[i] for i in part], objective, dropped, skip_zero)
        if segments:
            batches.append(
                pack(segments, row_length=row_length, micro_rows=micro_rows, total_rows=total_rows)
            )
    return Assembled(
        minibatches=tuple(batches),
        trained=sum(trained_tokens(batch) for batch in batches),
        dropped=dict(dropped),
        stats=stats,
    )


def split(keys: Seq[tuple[str, str]], parts: int, seed: int) -> list[list[int]]:
    """Deal rows into at most ``parts`` non-empty parts of nearly equal numbers of units.

    ``keys`` are the (task id, rollout id) of each row. What stays together is the task where there
    are at least ``parts`` tasks, else the rollout. Returns the row numbers of each part, rising.
    """
    tasks = list(dict.fromkeys(task for task, _ in keys))
    by_task = len(tasks) >= parts
    units = tasks if by_task else list(dict.fromkeys(rollout for _, rollout in keys))
    random.Random(seed).shuffle(units)
    part_of = {unit: number % parts for number, unit in enumerate(units)}
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for row, (task, rollout) in enumerate(keys):
        dealt[part_of[task if by_task else rollout]].append(row)
    return [part for part in dealt if part]


def assemble_sft(
    episodes: Seq[Episode],
    *,
    row_length: int,
    micro_rows: int,
    prompt_loss_weight: float,
    last_actions: int = 0,
    total_rows: int | None = None,
) -> Batch:
    """Pack demonstrations into one SFT batch (advantage 1 on actions, weights sum to 1).

    Demonstrations longer than a row are left out; SFT tokens are not in the ledger.
    """
    sequences = [
        row for episode in episodes for row in make_rows(episode).sequences if fits(row, row_length)
    ]
    weights = sft_weights(
        sequences, prompt_loss_weight=prompt_loss_weight, last_actions=last_actions
    )
    segments = [
        Segment(sequence=sequence, weights=weight, advantage=1.0)
        for sequence, weight in zip(sequences, weights, strict=True)
    ]
    return pack(segments, row_length=row_length, micro_rows=micro_rows, total_rows=total_rows)


def sampled_tokens(trajectory: Trajectory) -> int:
    """Count the tokens that were sampled in an episode."""
    return sum(len(turn.completion.token_ids) for turn in trajectory.episode.turns)


def _units(
    groups: Seq[TrajectoryGroup],
    objective: ObjectiveConfig,
    row_length: int,
    routing: bool,
    dropped: Counter[str],
) -> tuple[list[_Unit], dict[str, float]]:
    """Make the rows that may be trained; count what is dropped on the way."""
    units: list[_Unit] = []
    mixed = members = 0
    forks: Counter[str] = Counter()
    for group in groups:
        advantages = group_advantages(
            group, objective.advantage, normalize_std=objective.normalize_std
        )
        mixed += any(advantages.values())
        members += len(advantages)
        for trajectory in group.trajectories:
            episode = trajectory.episode
            if episode.status is Status.FAILED or trajectory.score is None:
                dropped["failed"] += sampled_tokens(trajectory)
            elif was_cut(episode, objective.masked_reasons):
                dropped["filtered"] += sampled_tokens(trajectory)
            else:
                rows = make_rows(episode, abandoned=objective.abandoned, routing=routing)
                dropped.update(rows.dropped)
                forks.update(rows.forks_by_cause)
                for sequence in rows.sequences:
                    if fits(sequence, row_length):
                        advantage = advantages[sequence.rollout_id]
                        units.append(
                            _Unit(task_id=group.task_id, advantage=advantage, sequence=sequence)
                        )
                    else:
                        dropped["overlong"] += int(sequence.mask.sum())
    stats = {
        "groups": float(len(groups)),
        "mixed_groups": float(mixed),
        "mixed_group_fraction": mixed / max(1, len(groups)),
        "rollouts": float(members),
        "rows": float(len(units)),
        "forks": float(forks.total()),
    }
    stats |= {f"forks/{cause}": float(count) for cause, count in sorted(forks.items())}
    return units, stats


def _segments(
    units: Seq[_Unit], objective: ObjectiveConfig, dropped: Counter[str], skip_zero: bool
) -> list[Segment]:
    """Bake the weights of one mini-batch over all its rows, then leave out those that are idle."""
    weights = loss_weights(
        [unit.sequence for unit in units], objective.reduction, norm=objective.reduction_norm
    )
    segments: list[Segment] = []
    for unit, weight in zip(units, weights, strict=True):
        if skip_zero and unit.advantage == 0:
            dropped["filtered"] += int(unit.sequence.mask.sum())
        else:
            segments.append(
                Segment(sequence=unit.sequence, weights=weight, advantage=unit.advantage)
            )
    return segments
