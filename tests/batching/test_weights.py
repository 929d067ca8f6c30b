"""Loss weights by hand: every reduction is in them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.batching.weights import loss_weights, sft_weights
from skyrl_jax.core.errors import ConfigError
from tests.batching.make import sequence

A, B1, B2 = sequence([0, 1, 1], "a/0"), sequence([0, 1], "b/0"), sequence([0, 0, 1, 1], "b/0")


def listed(weights):
    return [w.tolist() for w in weights]


def test_token_mean() -> None:
    made = listed(loss_weights([A, B1, B2], "token_mean"))
    fifth = float(np.float32(0.2))
    assert made == [[0, fifth, fifth], [0, fifth], [0, 0, fifth, fifth]]


def test_sequence_mean_is_per_rollout() -> None:
    """Faults C22: rollout b has two rows and weighs what a weighs."""
    made = loss_weights([A, B1, B2], "sequence_mean")
    quarter, sixth = 1 / 4, 1 / 6
    np.testing.assert_allclose(made[0], [0, quarter, quarter])
    np.testing.assert_allclose(made[1], [0, sixth], rtol=1e-6)
    np.testing.assert_allclose(made[2], [0, 0, sixth, sixth], rtol=1e-6)


def test_a_rollout_of_ten_rows_weighs_what_one_of_one_row_does() -> None:
    many = [sequence([0, 1, 1], "many/0") for _ in range(10)]
    made = loss_weights([*many, A], "sequence_mean")
    assert sum(w.sum() for w in made[:10]) == pytest.approx(0.5)
    assert made[10].sum() == pytest.approx(0.5)


def test_sequence_sum_norm_divides_by_a_constant() -> None:
    made = listed(loss_weights([A, B1, B2], "sequence_sum_norm", norm=50.0))
    hundredth = float(np.float32(1 / 100))
    assert made == [[0, hundredth, hundredth], [0, hundredth], [0, 0, hundredth, hundredth]]


def test_rollouts_without_a_trained_token_do_not_count() -> None:
    empty = sequence([0, 0], "e/0")
    for reduction in ("token_mean", "sequence_mean", "sequence_sum_norm"):
        with_it = loss_weights([A, empty], reduction, norm=10.0)
        assert with_it[0].tolist() == loss_weights([A], reduction, norm=10.0)[0].tolist()
        assert with_it[1].tolist() == [0.0, 0.0]
    assert loss_weights([], "token_mean") == []


@given(st.permutations(range(3)))
def test_the_order_of_rows_does_not_matter(order) -> None:
    rows = [A, B1, B2]
    for reduction in ("token_mean", "sequence_mean"):
        straight = loss_weights(rows, reduction)
        mixed = loss_weights([rows[i] for i in order], reduction)
        for place, i in enumerate(order):
            assert mixed[place].tolist() == straight[i].tolist()
        assert sum(float(w.sum(dtype=np.float64)) for w in mixed) == pytest.approx(1.0)


def test_bad_reductions_are_named() -> None:
    with pytest.raises(ConfigError, match=r"objective\.reduction is 'mean'"):
        loss_weights([A], "mean")
    with pytest.raises(ConfigError, match=r"objective\.reduction_norm is 0"):
        loss_weights([A], "sequence_sum_norm", norm=0)


def test_sft_weights_by_hand() -> None:
    made = sft_weights([sequence([0, 0, 1, 1]), sequence([0, 1])], prompt_loss_weight=0.5)
    total = 0.5 + 1 + 1 + 1
    np.testing.assert_allclose(made[0], np.array([0, 0.5, 1, 1]) / total, rtol=1e-6)
    np.testing.assert_allclose(made[1], np.array([0, 1]) / total, rtol=1e-6)


def test_sft_teaches_the_last_actions_and_never_a_wrong_edit() -> None:
    (made,) = sft_weights(
        [sequence([0, 1, 1, 0, 1, 0, 1])], prompt_loss_weight=0.25, last_actions=2
    )
    total = 1 + 1 + 0.5
    np.testing.assert_allclose(made * total, [0, 0, 0, 0.25, 1, 0.25, 1], rtol=1e-6)
    (every,) = sft_weights([sequence([0, 1, 0, 1])], prompt_loss_weight=0.0, last_actions=2)
    np.testing.assert_allclose(every, [0, 0.5, 0, 0.5])
