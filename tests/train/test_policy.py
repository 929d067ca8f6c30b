"""The learner of a run: what an update says of itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from configs.swe import get_config
from skyrl_jax.batching.packing import Segment, pack
from skyrl_jax.core.config import parse_config
from skyrl_jax.core.errors import TrainingError
from skyrl_jax.core.types import Sequence
from skyrl_jax.train.policy import Policy, mismatch
from tests.train.jobs import SMALL


def _config():
    values = get_config("quickstart")
    values.update_from_flattened_dict(SMALL | {"objective.entropy_coef": 0.0})
    return parse_config(values.to_dict())


def _batch(advantage: float):
    mask = np.asarray([0, 0, 1, 1, 1], np.float32)
    sequence = Sequence(
        rollout_id="t/0",
        token_ids=np.asarray([5, 6, 7, 8, 9], np.int32),
        mask=mask,
        behavior_logprobs=mask * np.float32(-6.0),
        weight_versions=np.zeros(5, np.int32),
        temperature=1.0,
    )
    segment = Segment(sequence=sequence, weights=mask / 3, advantage=advantage)
    return pack([segment], row_length=512, micro_rows=2)


def test_an_update_counts_and_a_step_without_one_finite_gradient_stops_the_run(tmp_path):
    with Policy(_config(), tmp_path) as policy:
        policy.start_rl()
        found = policy.update([_batch(1.0)])
        assert found["skipped_updates"] == 0
        assert found["grad_norm"] > 0
        before = np.asarray(policy.params["embed"]["embedding"])
        with pytest.raises(TrainingError, match="all 1 updates"):
            policy.update([_batch(float("inf"))])
        assert (np.asarray(policy.params["embed"]["embedding"]) == before).all()


def test_mismatch_is_over_trained_tokens_and_absent_where_there_are_none():
    batch = _batch(1.0)
    logprobs = np.where(batch.loss_weights != 0, batch.behavior_logprobs + 0.5, 99.0)
    found = mismatch([batch], [logprobs])
    assert found == {"mismatch_abs_mean": 0.5, "mismatch_abs_max": 0.5}
    idle = dataclasses.replace(batch, loss_weights=np.zeros_like(batch.loss_weights))
    assert mismatch([idle], [logprobs]) == {}
    assert mismatch([], []) == {}
