"""The learner of a run: what an update says of itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from skyrl_jax.core.errors import TrainingError
from skyrl_jax.learner.flops import step_flops
from skyrl_jax.train.policy import Policy, mismatch
from skyrl_jax.train.speed import devices_peak, learner_speed
from tests.train import tiny


def test_an_update_counts_and_a_step_without_one_finite_gradient_stops_the_run(tmp_path):
    with Policy(tiny.config(), tmp_path) as policy:
        policy.start_rl()
        found = policy.update([tiny.batch(1.0), tiny.batch(-1.0, (7, 8, 9, 10))])
        assert found["skipped_updates"] == 0
        assert found["grad_norm"] > 0 and found["update_norm"] > 0
        assert found["lr"] == pytest.approx(4.5e-5), "constant: the mean of the two"
        assert (found["num_tokens"], found["num_trained_tokens"]) == (9, 5), "of both updates"
        assert found["learner_tokens_per_s"] == pytest.approx(9 / found["update_s"])
        assert found["score_s"] > 0
        assert "mfu" not in found, "the peak of a CPU is not known"
        before = np.asarray(policy.params["embed"]["embedding"])
        with pytest.raises(TrainingError, match="all 1 updates"):
            policy.update([tiny.batch(float("inf"))])
        assert (np.asarray(policy.params["embed"]["embedding"]) == before).all()


def test_speed_is_of_all_updates_and_mfu_of_the_model_flops():
    config = tiny.config()
    parts = [tiny.batch(1.0), tiny.batch(1.0, (5, 6, 7))]
    found = learner_speed(config.model, parts, epochs=2, seconds=0.5, peak=1e9)
    assert found["learner_tokens_per_s"] == 2 * (5 + 3) / 0.5
    flops = 2 * step_flops(config.model, [5, 3])
    assert found["mfu"] == pytest.approx(flops / (0.5 * 1e9), rel=1e-12)
    without = learner_speed(config.model, parts, epochs=1, seconds=1.0, peak=None)
    assert without == {"learner_tokens_per_s": 8.0}
    assert learner_speed(config.model, [], epochs=1, seconds=1.0, peak=1e9) == {}
    assert devices_peak(config, None) is None


def test_mismatch_is_over_trained_tokens_and_absent_where_there_are_none():
    batch = tiny.batch(1.0)
    logprobs = np.where(batch.loss_weights != 0, batch.behavior_logprobs + 0.5, 99.0)
    found = mismatch([batch], [logprobs])
    assert found == {"mismatch_abs_mean": 0.5, "mismatch_abs_max": 0.5}
    idle = dataclasses.replace(batch, loss_weights=np.zeros_like(batch.loss_weights))
    assert mismatch([idle], [logprobs]) == {}
    assert mismatch([], []) == {}
