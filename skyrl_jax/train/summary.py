"""The numbers of a finished run: rates before and after with 95 % intervals, and its counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.types import Task
from skyrl_jax.tasks.swe.shape import body_shape
from skyrl_jax.tasks.swe.suite import SweSuite
from skyrl_jax.train.evaluate import Evaluation, as_scores
from skyrl_jax.train.state import HostState
from skyrl_jax.train.stats import bootstrap_gain, bootstrap_rate

# Name of an evaluation -> prefix of its keys in the summary.
_PREFIX = {"sampled": "resolved", "greedy": "greedy", "unseen": "resolved_unseen"}


def summarize(
    config: RunConfig,
    host: HostState,
    suite: SweSuite,
    before: Mapping[str, Evaluation],
    after: Mapping[str, Evaluation],
    *,
    wall_s: float,
    sampled: Mapping[int, Evaluation],
    opening_shapes: Iterable[str] = (),
) -> dict[str, Any]:
    """Return ``summary.json``: fractions, intervals by bootstrap over tasks, counts, seconds.

    Args:
        config: of the run.
        host: where it ended.
        suite: its tasks.
        before: evaluations of the first policy by name.
        after: the same of the last policy.
        wall_s: time of the run.
        sampled: evaluations on sampled held-out episodes by the steps they had behind them.
        opening_shapes: shapes of functions that the warm start only read.
    """
    heldout = suite.tasks("heldout")
    summary: dict[str, Any] = {
        "seed": config.seed,
        "steps": host.step,
        "rl_episodes": host.episodes,
        "infra_failures": host.failed + _failed(before, after, sampled),
        "mismatch_abs_mean_max": host.mismatch_max,
        "resolved_curve": [[step, found.rate] for step, found in sampled.items()],
        "wall_s": wall_s,
        "ledger": host.ledger.to_json(),
        "sft_steps": host.sft.get("sft_steps", 0.0),
        "sft_success": host.sft.get("sft_success", 0.0),
        "permuted_rewards": config.objective.permute_rewards,
    }
    for name in before:  # "after" may hold more: an evaluation that was added on resume
        summary |= _pair(_PREFIX[name], before[name], after[name])
    if "sampled" in before:
        summary["episodes"] = before["sampled"].episodes
        summary["tasks"] = len(before["sampled"].scores)
        summary |= _kinds(before["sampled"], after["sampled"], heldout)
        shapes = set(opening_shapes) | {shape_of(task) for task in suite.tasks("train")}
        new = {task.task_id for task in heldout if shape_of(task) not in shapes}
        old, now = (found["sampled"].only(new.__contains__) for found in (before, after))
        summary |= _pair("resolved_new_bodies", old, now)
        summary["tasks_new_bodies"] = len(new)
    return summary


def _kinds(before: Evaluation, after: Evaluation, tasks: Sequence[Task]) -> dict[str, Any]:
    """Report apart the mutation kinds that the warm start saw and those it never did."""
    found: dict[str, Any] = {}
    for label, sft in (("resolved_sft_kinds", True), ("resolved_new_kinds", False)):
        old, new = as_scores(before, tasks, sft), as_scores(after, tasks, sft)
        found |= _pair(label, old, new)
    return found


def shape_of(task: Task) -> str:
    """Return the shape of a task's broken function (its code up to chosen names)."""
    return body_shape(str(task.payload["function"]))


def _pair(prefix: str, before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Return rates, their intervals and the paired gain; tasks measured once only are left out."""
    both = set(before.scores) & set(after.scores)
    if not both:
        return {}
    old, new = before.only(both.__contains__), after.only(both.__contains__)
    gain = bootstrap_gain(old.scores, new.scores)
    label = "gain" if prefix == "resolved" else f"{prefix}_gain"
    values: dict[str, Any] = {
        label: gain.mean,
        f"{label}_low": gain.low,
        f"{label}_high": gain.high,
    }
    for when, found in (("before", old), ("after", new)):
        rate = bootstrap_rate(found.scores)
        values |= {
            f"{prefix}_{when}": rate.mean,
            f"{prefix}_{when}_low": rate.low,
            f"{prefix}_{when}_high": rate.high,
        }
    return values


def _failed(
    before: Mapping[str, Evaluation],
    after: Mapping[str, Evaluation],
    sampled: Mapping[int, Evaluation],
) -> int:
    """Count what the host side broke; sampled evaluations are in ``sampled`` once each."""
    others = [made for found in (before, after) for n, made in found.items() if n != "sampled"]
    return sum(made.failed for made in [*others, *sampled.values()])
