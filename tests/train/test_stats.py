"""Bootstrap over tasks: numbers by hand, the paired draw, and its refusals."""

import numpy as np
import pytest

from skyrl_jax.train.stats import bootstrap_gain, bootstrap_rate


def test_mean_is_over_episodes_and_interval_is_over_tasks():
    # 3 of 4 episodes: the mean of task means would be 2/3.
    interval = bootstrap_rate({"a": [1, 1], "b": [1], "c": [0]}, seed=1)
    assert interval.mean == 0.75
    assert interval.low <= interval.mean <= interval.high


def test_two_tasks_by_hand():
    # Draws of two from {0, 1}: rate 0, 1/2, 1 with probability 1/4, 1/2, 1/4. At level 0.4 the ends
    # are the 30 % and 70 % quantiles, both 1/2; at 0.6 the 20 % and 80 % quantiles: 0 and 1.
    scores = {"a": [0.0], "b": [1.0]}
    narrow = bootstrap_rate(scores, level=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)
    wide = bootstrap_rate(scores, level=0.6)
    assert (wide.low, wide.high) == (0.0, 1.0)


def test_interval_has_the_width_of_the_normal_approximation():
    rng = np.random.default_rng(3)
    scores = {f"t{i}": rng.integers(0, 2, 4).tolist() for i in range(400)}
    means = np.array([np.mean(value) for value in scores.values()])
    half = 1.96 * means.std() / np.sqrt(len(means))
    interval = bootstrap_rate(scores, seed=5)
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.06)


def test_samples_of_one_task_do_not_narrow_the_interval():
    # Ten copies of every episode are no new tasks.
    few = {f"t{i}": [float(i % 2)] for i in range(30)}
    many = {task: value * 10 for task, value in few.items()}
    assert bootstrap_rate(few, seed=2) == bootstrap_rate(many, seed=2)


def test_gain_is_paired_by_task():
    # Every task gains exactly 0.25, whatever its level: no draw can differ from 0.25.
    before = {f"t{i}": [float(i < 20), 0, 0, 0] for i in range(40)}
    after = {task: [*value[:1], 1, 0, 0] for task, value in before.items()}
    gain = bootstrap_gain(before, after)
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.25, 0.25, 0.25))


def test_no_gain_holds_zero_and_equal_seeds_are_equal():
    rng = np.random.default_rng(0)
    before = {f"t{i}": rng.integers(0, 2, 4).tolist() for i in range(64)}
    after = {f"t{i}": rng.integers(0, 2, 4).tolist() for i in range(64)}
    gain = bootstrap_gain(before, after, seed=9)
    assert gain.low < 0 < gain.high
    assert gain == bootstrap_gain(before, after, seed=9)
    assert gain != bootstrap_gain(before, after, seed=10)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"a": [1]}, {"a": [1], "b": [0]}, "'b'"),
        ({"a": []}, {"a": [1]}, "'a' has no episode"),
        ({}, {}, "at least one task"),
    ],
)
def test_unpaired_or_empty_is_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_gain(before, after)
