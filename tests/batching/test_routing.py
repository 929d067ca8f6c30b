"""The engine's routing of every token, from the answers of its calls to a channel of the batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from skyrl_jax.batching.packing import Segment, pack
from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.errors import DataError
from tests.batching.make import episode, turn

LAYERS, EACH = 2, 3


def routed(made, call):
    """Give a turn the routing of all it fed: entry of token t is 10 x call + t in every place."""
    fed = len(made.prompt_ids) + len(made.completion.token_ids) - 1
    numbers = 10 * call + np.arange(fed, dtype=np.int16)
    told = np.broadcast_to(numbers[:, None, None], (fed, LAYERS, EACH))
    return dataclasses.replace(
        made, completion=dataclasses.replace(made.completion, routed_experts=told)
    )


def told(row):
    assert row.routed_experts.shape == (len(row.token_ids), LAYERS, EACH)
    assert (row.routed_experts == row.routed_experts[:, :1, :1]).all()
    return row.routed_experts[:, 0, 0].tolist()


def test_each_token_has_the_routing_of_the_call_that_fed_it_first() -> None:
    """Token 3 (index 2) is sampled by call 1 and fed by call 2; the last one is fed by none."""
    turns = routed(turn([1, 2], [3]), 1), routed(turn([1, 2, 3, 4], [5, 6]), 2)
    (row,) = make_rows(episode(*turns)).sequences
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert told(row) == [10, 11, 22, 23, 24, -1]


def test_a_row_that_begins_anew_has_its_own_call_s_routing() -> None:
    turns = routed(turn([1, 2], [3]), 1), routed(turn([1, 9], [5]), 2)
    first, second = make_rows(episode(*turns)).sequences
    assert told(first) == [10, 11, -1] and told(second) == [20, 21, -1]


def test_a_call_without_routing_is_filled_by_the_next() -> None:
    turns = turn([1, 2], [3]), routed(turn([1, 2, 3, 4], [5]), 2)
    (row,) = make_rows(episode(*turns)).sequences
    assert told(row) == [20, 21, 22, 23, -1]
    (plain,) = make_rows(episode(turn([1, 2], [3]))).sequences
    assert plain.routed_experts is None


def segment(sequence):
    return Segment(sequence=sequence, weights=sequence.mask, advantage=1.0)


def test_the_channel_lies_where_its_tokens_lie() -> None:
    (long,) = make_rows(episode(routed(turn([1, 2, 3], [4]), 1))).sequences
    (plain,) = make_rows(episode(turn([7], [8]))).sequences
    batch = pack([segment(plain), segment(long)], row_length=8, micro_rows=2)
    channel = batch.channels["routed_experts"]
    assert channel.dtype == np.int16 and channel.shape == (2, 8, LAYERS, EACH)
    assert batch.tokens[0].tolist() == [1, 2, 3, 4, 7, 8, 0, 0]
    assert channel[0, :, 1, 2].tolist() == [10, 11, 12, -1, -1, -1, -1, -1]
    assert (channel[1] == -1).all()
    assert not pack([segment(plain)], row_length=8, micro_rows=2).channels


def test_routings_of_two_models_or_of_another_length_are_refused() -> None:
    (row,) = make_rows(episode(routed(turn([1, 2, 3], [4]), 1))).sequences
    other = dataclasses.replace(row, routed_experts=row.routed_experts[:, :1])
    with pytest.raises(DataError, match="differ in their routed_experts"):
        pack([segment(row), segment(other)], row_length=8, micro_rows=2)
    short = dataclasses.replace(row, routed_experts=row.routed_experts[:2])
    with pytest.raises(DataError, match="differ in length"):
        pack([segment(short)], row_length=8, micro_rows=2)
