"""Rows of an episode: verbatim, longest prefix, every used token trained exactly once."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import LOGPROB_CEILING
from tests.batching.make import episode, turn


def rows(*turns):
    """Return [(ids, ids with mask 1)] of the rows, and check what must hold of every row."""
    made = make_rows(episode(*turns))
    out = []
    for row in made.sequences:
        lengths = {
            len(a) for a in (row.token_ids, row.mask, row.behavior_logprobs, row.weight_versions)
        }
        assert len(lengths) == 1
        idle = row.mask == 0
        assert (row.behavior_logprobs[idle] == 0).all() and (row.weight_versions[idle] == -1).all()
        assert row.temperature == 0.7 and row.rollout_id == "t/0"
        out.append((row.token_ids.tolist(), row.mask.astype(int).tolist()))
    return out, made


def test_three_turns_are_one_row() -> None:
    """Faults C6: the prefix is everything so far, not the last step's ids."""
    out, made = rows(turn([1, 2], [3]), turn([1, 2, 3, 4], [5]), turn([1, 2, 3, 4, 5, 6], [7]))
    assert out == [([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 1, 0, 1])]
    (row,) = made.sequences
    np.testing.assert_allclose(row.behavior_logprobs, [0, 0, -0.3, 0, -0.5, 0, -0.7], rtol=1e-6)
    assert row.weight_versions.tolist() == [-1, -1, 1, -1, 1, -1, 1] and made.forks == 0


def test_the_mask_is_exactly_on_the_sampled_tokens() -> None:
    """A mask moved by one, in either direction, is caught here."""
    out, made = rows(
        turn([10, 11, 12], [20, 21], [-0.5, -0.25]), turn([10, 11, 12, 20, 21, 13], [22])
    )
    ids, mask = out[0]
    assert [i for i, m in zip(ids, mask, strict=True) if m] == [20, 21, 22]
    logprobs = made.sequences[0].behavior_logprobs
    assert dict(zip(ids, logprobs.tolist(), strict=True))[20] == -0.5
    assert dict(zip(ids, logprobs.tolist(), strict=True))[21] == -0.25


def test_the_longest_match_wins() -> None:
    """Faults C7."""
    out, _ = rows(
        turn([1, 2], [3, 4]),
        turn([1, 2, 3, 4, 5], [6]),
        turn([1, 2], [3, 4, 5, 6, 7]),
        turn([1, 2, 3, 4, 5, 6, 7, 8], [9]),
    )
    assert out == [
        ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 1, 1, 1, 1, 1, 0, 1]),
    ]


def test_the_longest_match_wins_also_over_a_later_one() -> None:
    out, made = rows(turn([1], [2, 3]), turn([1], [2]), turn([1, 2, 3, 4], [5]))
    assert out == [([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])] and made.abandoned_tokens == 1


def test_a_sample_that_ends_alike_is_not_the_one_that_was_continued() -> None:
    out, made = rows(turn([1], [3, 4]), turn([1], [9, 4]), turn([1, 3, 4, 5], [6]))
    assert out == [([1, 3, 4, 5, 6], [0, 1, 1, 0, 1])] and made.abandoned_tokens == 2


def test_a_branch_trains_the_shared_token_once() -> None:
    """Faults C4e: openenv trains token 3 twice here."""
    out, made = rows(turn([1, 2], [3]), turn([1, 2, 3, 4], [5]), turn([1, 2, 3, 6], [7]))
    assert out == [([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]), ([1, 2, 3, 6, 7], [0, 0, 0, 0, 1])]
    assert made.forks == 1


def test_stripped_thinking_makes_two_rows_and_loses_nothing() -> None:
    """Faults C4, C5, C4e: slime loses 8, 8, 3 here."""
    out, _ = rows(turn([1, 2], [8, 8, 3]), turn([1, 2, 3, 4], [5]))
    assert out == [([1, 2, 8, 8, 3], [0, 0, 1, 1, 1]), ([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])]


def test_a_retokenized_span_makes_two_rows() -> None:
    """Faults C3, C4e."""
    out, _ = rows(turn([1, 2], [3, 4]), turn([1, 2, 34, 5], [6]))
    assert out == [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 34, 5, 6], [0, 0, 0, 0, 1])]


@pytest.mark.parametrize("first", [[3], [9, 9]])
def test_a_sample_that_was_left_behind_is_abandoned(first) -> None:
    """Faults C4e: a retry, identical or not, whose sibling the agent continued."""
    out, made = rows(turn([1, 2], first), turn([1, 2], [3]), turn([1, 2, 3, 4], [5]))
    assert out == [([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])]
    assert made.abandoned_tokens == len(first)


def test_an_abandoned_branch_at_the_end_of_a_row_keeps_the_rest_of_the_row() -> None:
    out, made = rows(
        turn([1], [2]), turn([1, 2, 3], [4, 4]), turn([1, 2, 3], [5]), turn([1, 2, 3, 5, 6], [7])
    )
    assert made.abandoned_tokens == 2
    assert sorted(out) == [
        ([1, 2, 3, 4, 4], [0, 1, 0, 0, 0]),
        ([1, 2, 3, 5, 6, 7], [0, 0, 0, 1, 0, 1]),
    ]


def test_a_replayed_history_of_eight_turns_is_one_row() -> None:
    """Faults C35: prompts that keep the stored ids never fork."""
    ids: list[int] = [1]
    turns = []
    for number in range(8):
        turns.append(turn(ids, [100 + number, 50]))
        ids = [*ids, 100 + number, 50, 7]
    out, made = rows(*turns)
    assert len(out) == 1 and sum(out[0][1]) == 16 and made.forks == 0


def test_an_empty_answer_makes_no_row_and_abandons_nobody() -> None:
    """Faults C19."""
    assert rows(turn([1, 2], []))[0] == []
    out, made = rows(turn([1, 2], []), turn([1, 2], [3]))
    assert out == [([1, 2, 3], [0, 0, 1])] and made.abandoned_tokens == 0


@pytest.mark.parametrize("bad", [-9999.0, -1000.0, math.nan, -math.inf, 2e-6, 0.5, None])
def test_log_probs_that_cannot_be_are_refused(bad) -> None:
    """Faults C11, C12: at the boundary, with the turn and the token in the message."""
    with pytest.raises(DataError, match=r"t/0 turn 1: log-prob of token 1 is"):
        rows(turn([1], [2]), turn([1, 2], [5, 6], [-0.1, bad]))


def test_fewer_log_probs_than_tokens_never_become_a_completion() -> None:
    with pytest.raises(ValueError, match="ids 3, logprobs 2"):
        turn([1], [5, 6, 7], [-0.1, -0.2])


def test_a_rounding_error_above_zero_becomes_zero() -> None:
    for value in (1e-7, LOGPROB_CEILING):
        _, made = rows(turn([1], [5], [value]))
        assert made.sequences[0].behavior_logprobs.tolist() == [0.0, 0.0]


def test_an_unlikely_token_is_trained() -> None:
    _, made = rows(turn([1], [5], [-999.0]))
    assert made.sequences[0].behavior_logprobs.tolist() == [0.0, -999.0]


def test_negative_ids_and_empty_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="negative"):
        rows(turn([1], [-5], [-0.1]))
    with pytest.raises(DataError, match="empty prompt"):
        rows(turn([], [5]))


def aborted(item):
    completion = dataclasses.replace(item.completion, finish_reason="abort")
    return dataclasses.replace(item, completion=completion)


def test_a_partial_answer_is_dropped_unless_it_was_continued() -> None:
    """Faults C10: masked, and what comes after it too, in arrays of one length."""
    out, made = rows(turn([1], [2]), aborted(turn([1, 2, 3], [4, 4, 4])), turn([1, 2, 3], [5, 6]))
    assert out == [
        ([1, 2, 3, 4, 4, 4], [0, 1, 0, 0, 0, 0]),
        ([1, 2, 3, 5, 6], [0, 0, 0, 1, 1]),
    ]
    assert made.dropped == {"abandoned": 3}
    on = [turn([1], [2]), aborted(turn([1, 2, 3], [4, 4])), turn([1, 2, 3, 4, 4, 5], [6])]
    out, made = rows(*on)
    assert out == [([1, 2, 3, 4, 4, 5, 6], [0, 1, 0, 1, 1, 0, 1])] and made.dropped == {}


def test_abandoned_samples_are_trained_where_the_config_says_so() -> None:
    turns = (turn([1, 2], [8]), turn([1, 2], [3]), turn([1, 2, 3, 4], [5]))
    made = make_rows(episode(*turns), abandoned="train")
    assert [row.mask.sum() for row in made.sequences] == [1, 2] and made.dropped == {}
    partial = make_rows(episode(aborted(turn([1], [2]))), abandoned="train")
    assert partial.sequences == () and partial.dropped == {"abandoned": 1}
    with pytest.raises(DataError, match="'keep' is none of drop, train"):
        make_rows(episode(), abandoned="keep")


def test_an_answer_after_a_way_back_is_no_abandoned_one() -> None:
    """Its sibling was continued before it was asked for: the agent chose to sample again."""
    out, made = rows(turn([1], [2]), turn([1, 2, 3], [4]), turn([1], [5]))
    assert made.abandoned_tokens == 0
    assert out == [([1, 2, 3, 4], [0, 1, 0, 1]), ([1, 5], [0, 1])]


def test_auxiliary_calls_make_no_row_and_are_in_nobodys_way() -> None:
    aux = dataclasses.replace(turn([1, 2, 3, 9], [9, 9]), kind="aux")
    out, made = rows(turn([1, 2], [3]), aux, turn([1, 2, 3, 4], [5]))
    assert out == [([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])]
    assert made.dropped == {"aux": 2} and made.forks == 0
    with pytest.raises(DataError, match="turn 0: kind 'title'"):
        rows(dataclasses.replace(aux, kind="title"))


def test_forks_are_counted_by_cause() -> None:
    told = dataclasses.replace(turn([1, 9], [5]), fork="compaction")
    turns = [turn([1, 2], [3]), turn([1, 2, 3, 4], [5]), turn([1, 2, 3, 6], [7]), told]
    _, made = rows(*turns, turn([1, 8], [5]))
    assert made.forks_by_cause == {"branch": 1, "compaction": 1, "rewrite": 1} and made.forks == 3
    _, made = rows(dataclasses.replace(told, fork="new"))
    assert made.forks == 0, "the first row is no fork"


def test_routing_that_is_needed_and_absent_is_refused() -> None:
    """Faults C15: the router replay that silently did nothing."""
    with pytest.raises(DataError, match="t/0 turn 1.*no routed_experts.*replay_routing"):
        make_rows(episode(turn([1], []), turn([1], [2])), routing=True)


def test_many_rows_of_long_prompts_are_cheap() -> None:
    """300 sub-agents of two turns that share a long opening: the worst that can be compared."""
    opening = tuple(range(10, 3000))
    turns = []
    for number in range(300):
        turns.append(turn((*opening, number), [5, 6], [-1.0, -1.0]))
    for number in range(300):
        turns.append(turn((*opening, number, 5, 6, 7), [8], [-1.0]))
    begun = time.process_time()
    made = make_rows(episode(*turns))
    assert len(made.sequences) == 300 and all(row.mask.sum() == 3 for row in made.sequences)
    assert time.process_time() - begun < 5.0


@st.composite
def histories(draw):
    """Turns that extend, branch from, or rewrite earlier ones; every token id is unique."""
    fresh = iter(range(10, 10_000))
    count = draw(st.integers(1, 7))
    turns, ends = [], [(1, 2)]
    for _ in range(count):
        base = draw(st.sampled_from(ends))
        if draw(st.booleans()):
            base = (*base, next(fresh))
        if draw(st.integers(0, 5)) == 0:  # a rewritten history
            base = (1, next(fresh), *base[2:])
        completion = [next(fresh) for _ in range(draw(st.integers(0, 3)))]
        turns.append(turn(base, completion, [-0.25] * len(completion)))
        ends.append((*base, *completion))
    return turns


@given(histories())
def test_every_sampled_token_is_trained_once_or_abandoned(turns) -> None:
    made = make_rows(episode(*turns))
    trained = [
        int(token)
        for row in made.sequences
        for token, on in zip(row.token_ids, row.mask, strict=True)
        if on
    ]
    sampled = [token for item in turns for token in item.completion.token_ids]
    assert len(set(trained)) == len(trained) and set(trained) <= set(sampled)
    assert len(trained) + made.abandoned_tokens == len(sampled)
    # and each trained token stands behind exactly the context it was sampled in
    contexts = {}
    for item in turns:
        for position, token in enumerate(item.completion.token_ids):
            contexts[token] = (*item.prompt_ids, *item.completion.token_ids[:position])
    for row in made.sequences:
        for position in np.flatnonzero(row.mask):
            assert tuple(row.token_ids[:position]) == contexts[int(row.token_ids[position])]
