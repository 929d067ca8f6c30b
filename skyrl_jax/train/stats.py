"""Intervals for resolved rates: a bootstrap over tasks, since samples of one task are not free.

Rate of a set of tasks:  r = sum_t x_t / sum_t n_t   (x_t: score of the n_t episodes of task t).
The tasks are drawn with replacement; the same draw serves before and after, so a gain is paired.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3 (percentile).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with the ends of its confidence interval, all fractions.

    Example: ``Interval(mean=0.31, low=0.27, high=0.35)``.
    """

    mean: float
    low: float
    high: float


def bootstrap_rate(
    scores: Scores, *, seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> Interval:
    """Return the rate over all episodes and its interval over tasks.

    Args:
        scores: {task id: score of each of its episodes}.
        seed: of the draw; equal seeds give equal intervals.
        resamples: bootstrap draws.
        level: share of draws inside the interval.

    Raises:
        ValueError: no task, or a task without an episode.
    """
    tasks = sorted(scores)
    sums, counts = _totals(scores, tasks)
    draws = _draws(len(tasks), seed, resamples)
    return _interval(sums.sum() / counts.sum(), (draws @ sums) / (draws @ counts), level)


def bootstrap_gain(
    before: Scores, after: Scores, *, seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> Interval:
    """Return the rate after minus the rate before on the same tasks, paired by task.

    Args:
        before: {task id: scores}; ``after`` must hold the same tasks.
        after: as ``before``.
        seed: of the draw.
        resamples: bootstrap draws.
        level: share of draws inside the interval.

    Raises:
        ValueError: the task sets differ, or one is empty.
    """
    if set(before) != set(after):
        odd = sorted(set(before) ^ set(after))
        raise ValueError(f"{len(odd)} tasks were measured only once, e.g. {odd[0]!r}")
    tasks = sorted(before)
    old_sums, old_counts = _totals(before, tasks)
    new_sums, new_counts = _totals(after, tasks)
    draws = _draws(len(tasks), seed, resamples)
    samples = (draws @ new_sums) / (draws @ new_counts) - (draws @ old_sums) / (draws @ old_counts)
    mean = new_sums.sum() / new_counts.sum() - old_sums.sum() / old_counts.sum()
    return _interval(mean, samples, level)


def _totals(
    scores: Scores, tasks: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if not tasks:
        raise ValueError("a rate needs at least one task")
    empty = [task for task in tasks if len(scores[task]) == 0]
    if empty:
        raise ValueError(f"task {empty[0]!r} has no episode; leave it out of both measurements")
    sums = np.array([np.sum(scores[task]) for task in tasks], np.float64)
    counts = np.array([len(scores[task]) for task in tasks], np.float64)
    return sums, counts


def _draws(num_tasks: int, seed: int, resamples: int) -> NDArray[np.float64]:
    """Return how often each task is in each draw, [resamples, tasks]."""
    rng = np.random.default_rng(seed)
    shares = np.full(num_tasks, 1.0 / num_tasks)
    return rng.multinomial(num_tasks, shares, size=resamples).astype(np.float64)


def _interval(mean: float, samples: NDArray[np.float64], level: float) -> Interval:
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return Interval(mean=float(mean), low=float(low), high=float(high))
