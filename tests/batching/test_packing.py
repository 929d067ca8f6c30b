"""Packing keeps every token, restarts positions, and fills up with rows of weight 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.batching.packing import (
    Segment,
    bucket_length,
    fits,
    pack,
    plan_rows,
    segment_lengths,
    trained_tokens,
)
from skyrl_jax.core.errors import DataError
from tests.batching.make import sequence


def segment(mask, number=0, advantage=1.0, weights=None):
    made = sequence(mask, f"t/{number}", start=1 + 100 * number)
    weights = made.mask if weights is None else np.asarray(weights, np.float32)
    return Segment(sequence=made, weights=weights, advantage=advantage)


def test_two_segments_in_a_row_by_hand() -> None:
    batch = pack(
        [segment([0, 1], 0, 2.0), segment([0, 0, 1, 1], 1, -1.0)], row_length=7, micro_rows=2
    )
    assert batch.tokens.tolist() == [[101, 102, 103, 104, 1, 2, 0], [0] * 7]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 2, 2, 0], [0] * 7]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0], [0] * 7]
    assert batch.loss_weights.tolist() == [[0, 0, 1, 1, 0, 1, 0], [0] * 7]
    assert batch.advantages.tolist() == [[0, 0, -1, -1, 0, 2, 0], [0] * 7]
    assert batch.behavior_logprobs.tolist() == [[0, 0, -0.5, -0.5, 0, -0.5, 0], [0] * 7]
    np.testing.assert_allclose(batch.temperature[0], [0.7] * 6 + [1.0], rtol=1e-6)
    assert (batch.temperature[1] == 1.0).all()  # padding divides by it too
    assert trained_tokens(batch) == 3
    kinds = {(a.dtype, a.shape) for a in (batch.tokens, batch.segment_ids, batch.positions)}
    assert kinds == {(np.dtype(np.int32), (2, 7))}


def test_garbage_log_probs_of_untrained_tokens_are_not_carried() -> None:
    """Faults C39."""
    made = segment([0, 0, 1])
    made.sequence.behavior_logprobs[:2] = [1.0, np.nan]
    assert pack([made], row_length=4, micro_rows=1).behavior_logprobs.tolist() == [[0, 0, -0.5, 0]]


def test_first_fit_longest_first() -> None:
    assert plan_rows([3, 6, 4, 5, 2], 10) == [[1, 2], [3, 0, 4]]
    assert plan_rows([5, 5, 5], 10) == [[0, 1], [2]]
    assert plan_rows([], 10) == []


def test_rows_are_nearly_full_on_long_tailed_lengths() -> None:
    """Agent episodes: lognormal, median 12,000 tokens, sigma 0.5; rows a multiple of 8."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(12_000), 0.5, 512)
    lengths = np.minimum(drawn, 32_768).astype(int).tolist()
    layout = plan_rows(lengths, 32_768)
    rows = -(-len(layout) // 8) * 8
    assert sum(lengths) / (rows * 32_768) >= 0.95
    assert layout == plan_rows(lengths, 32_768)
    assert sorted(i for row in layout for i in row) == list(range(512))
    assert max(sum(lengths[i] for i in row) for row in layout) <= 32_768
    # In the order of arrival, first fit needs more rows: the sort is what fills them.
    room: list[int] = []
    for size in lengths:
        at = next((r for r, free in enumerate(room) if free >= size), len(room))
        if at == len(room):
            room.append(32_768)
        room[at] -= size
    assert len(room) > len(layout)


def test_bucket_is_the_smallest_that_holds_the_longest() -> None:
    assert bucket_length([3, 8, 2], [16, 8, 32]) == 8
    assert bucket_length([9], [8, 16, 32]) == 16
    assert bucket_length([], [16, 8]) == 8
    with pytest.raises(
        DataError, match=r"no row length of \[8, 16\] holds a sequence of 17 tokens"
    ):
        bucket_length([17], [16, 8])
    with pytest.raises(DataError, match="no row length"):
        bucket_length([], [])


def test_pack_with_buckets_shortens_the_rows() -> None:
    segments = [segment([0, 1, 1], 0), segment([0, 1], 1)]

    def shape(*buckets: int, row_length: int = 12) -> tuple[int, ...]:
        return pack(segments, row_length=row_length, micro_rows=1, buckets=buckets).tokens.shape

    assert shape() == (1, 12)
    assert shape(2, 4, 8) == (2, 4)
    assert shape(8) == (1, 8)
    assert shape(2) == (1, 12)  # none holds three tokens: the whole row length
    assert shape(64, row_length=3) == (2, 3)  # row_length stays the most
    batch = pack(segments, row_length=12, micro_rows=2, buckets=(8,))
    assert segment_lengths(batch).tolist() == [3, 2]
    assert segment_lengths(pack([], row_length=4, micro_rows=2)).tolist() == []


def test_rows_are_a_multiple_or_the_fixed_number() -> None:
    one = [segment([0, 1])]
    assert pack(one, row_length=2, micro_rows=4).tokens.shape == (4, 2)
    assert pack(one * 5, row_length=2, micro_rows=4).tokens.shape == (8, 2)
    assert pack(one, row_length=2, micro_rows=4, total_rows=12).tokens.shape == (12, 2)
    assert pack([], row_length=2, micro_rows=4).tokens.shape == (4, 2)
    with pytest.raises(DataError, match="need 5 rows of 2 tokens; total_rows is 4"):
        pack(one * 5, row_length=2, micro_rows=4, total_rows=4)
    with pytest.raises(DataError, match="multiple of 4"):
        pack(one, row_length=2, micro_rows=4, total_rows=6)


def test_what_does_not_belong_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"t/0: 3 tokens do not fit a row of 2"):
        pack([segment([0, 0, 1])], row_length=2, micro_rows=1)
    with pytest.raises(DataError, match="first token of a sequence cannot be trained"):
        pack([segment([1, 0])], row_length=2, micro_rows=1)
    with pytest.raises(DataError, match="differ in length"):
        pack([segment([0, 1], weights=[0, 1, 1])], row_length=4, micro_rows=1)
    assert fits(sequence([0, 1]), 2) and not fits(sequence([0, 1]), 1)


@given(st.lists(st.integers(2, 12), max_size=20), st.integers(12, 20), st.integers(1, 4))
def test_packing_keeps_every_token_of_every_segment(lengths, row_length, micro_rows) -> None:
    segments = [
        segment([0] + [i % 2 for i in range(n - 1)], k, float(k)) for k, n in enumerate(lengths)
    ]
    batch = pack(segments, row_length=row_length, micro_rows=micro_rows)
    assert batch.tokens.shape[0] % micro_rows == 0
    found = {}
    for row in range(batch.tokens.shape[0]):
        ids = batch.segment_ids[row]
        used = np.flatnonzero(ids)
        assert (used == np.arange(len(used))).all()  # padding only at the right
        for number in range(1, ids.max() + 1):
            at = np.flatnonzero(ids == number)
            assert batch.positions[row, at].tolist() == list(range(len(at)))
            found[tuple(batch.tokens[row, at].tolist())] = batch.loss_weights[row, at].tolist()
        assert (batch.loss_weights[row, ids == 0] == 0).all()
    expected = {tuple(s.sequence.token_ids.tolist()): s.sequence.mask.tolist() for s in segments}
    assert found == expected


@given(st.lists(st.integers(2, 9), min_size=1, max_size=12), st.randoms())
def test_the_set_of_rows_does_not_depend_on_the_order_of_unequal_segments(lengths, rng) -> None:
    lengths = sorted(set(lengths))
    segments = [segment([0] + [1] * (n - 1), k) for k, n in enumerate(lengths)]
    straight = pack(segments, row_length=10, micro_rows=1).tokens.tolist()
    rng.shuffle(segments)
    assert pack(segments, row_length=10, micro_rows=1).tokens.tolist() == straight
