"""The interval of a mean gain over several runs, by hand and against the normal approximation."""

from __future__ import annotations

import importlib
import random
import sys

import pytest


@pytest.fixture(scope="module")
def main_job(repo_root):
    sys.path.insert(0, str(repo_root / "benchmarks"))
    try:
        yield importlib.import_module("main_job")
    finally:
        sys.path.remove(str(repo_root / "benchmarks"))


def test_equal_gains_leave_no_width(main_job):
    runs = [{"a": 0.25, "b": 0.0}, {"a": -0.25, "b": 0.0}]  # each task's mean is 0
    assert main_job.mean_interval(runs) == (0.0, 0.0)
    assert main_job.mean_interval([{"a": 0.5, "b": 0.5}]) == (0.5, 0.5)


def test_many_tasks_give_the_normal_interval(main_job):
    rng = random.Random(1)
    run = {str(at): rng.gauss(0.1, 1.0) for at in range(400)}
    low, high = main_job.mean_interval([run], resamples=4000)
    mean = sum(run.values()) / 400
    assert low == pytest.approx(mean - 1.96 / 20, abs=0.015)
    assert high == pytest.approx(mean + 1.96 / 20, abs=0.015)
