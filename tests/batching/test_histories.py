"""Faults C4e: eleven histories on which two peers' row builders were run, and what ours makes.

(prompt ids -> sampled ids) turn by turn; rows as (ids, mask); tokens of the ledger's causes.
"""

from __future__ import annotations

import pytest

from skyrl_jax.batching.sequences import make_rows
from tests.batching.make import episode, turn

HISTORIES = {
    "three turns": (
        [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [7])],
        [([1, 2, 3, 4, 5, 6, 7], "0010101")],
        {},
    ),
    "the longest prefix": (
        [
            ([1, 2], [3, 4]),
            ([1, 2, 3, 4, 5], [6]),
            ([1, 2], [3, 4, 5, 6, 7]),
            ([1, 2, 3, 4, 5, 6, 7, 8], [9]),
        ],
        [([1, 2, 3, 4, 5, 6], "001101"), ([1, 2, 3, 4, 5, 6, 7, 8, 9], "001111101")],
        {},
    ),
    "a re-tokenized span and a long answer": (
        [([1, 2], [3, 4]), ([1, 2, 34, 5], [6, 7, 8, 9]), ([1, 2, 34, 5, 6, 7, 8, 9, 10], [11])],
        [([1, 2, 3, 4], "0011"), ([1, 2, 34, 5, 6, 7, 8, 9, 10, 11], "0000111101")],
        {},
    ),
    "compaction": (
        [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 20, 21], [6]), ([1, 2, 20, 21, 6, 7], [8])],
        [([1, 2, 3, 4, 5], "00101"), ([1, 2, 20, 21, 6, 7, 8], "0000101")],
        {},
    ),
    "an interleaved sub-agent": (
        [([1, 2], [3]), ([50, 51], [52]), ([1, 2, 3, 4], [5]), ([50, 51, 52, 53], [54])],
        [([1, 2, 3, 4, 5], "00101"), ([50, 51, 52, 53, 54], "00101")],
        {},
    ),
    "a retry with another sample": (
        [([1, 2], [9, 9]), ([1, 2], [3]), ([1, 2, 3, 4], [5])],
        [([1, 2, 3, 4, 5], "00101")],
        {"abandoned": 2},
    ),
    "an empty output": (
        [([1, 2], []), ([1, 2], [3])],
        [([1, 2, 3], "001")],
        {},
    ),
    "an identical retry": (
        [([1, 2], [3]), ([1, 2], [3]), ([1, 2, 3, 4], [5])],
        [([1, 2, 3, 4, 5], "00101")],
        {"abandoned": 1},
    ),
    "branch": (
        [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 6], [7])],
        [([1, 2, 3, 4, 5], "00101"), ([1, 2, 3, 6, 7], "00001")],
        {},
    ),
    "thinking stripped": (
        [([1, 2], [8, 8, 3]), ([1, 2, 3, 4], [5])],
        [([1, 2, 8, 8, 3], "00111"), ([1, 2, 3, 4, 5], "00001")],
        {},
    ),
    "the last span re-tokenized": (
        [([1, 2], [3, 4]), ([1, 2, 34, 5], [6])],
        [([1, 2, 3, 4], "0011"), ([1, 2, 34, 5, 6], "00001")],
        {},
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_rows_of_a_history(name) -> None:
    turns, expected, dropped = HISTORIES[name]
    made = make_rows(episode(*(turn(prompt, ids) for prompt, ids in turns)))
    rows = [
        (row.token_ids.tolist(), "".join(str(int(bit)) for bit in row.mask))
        for row in made.sequences
    ]
    assert rows == expected
    assert made.dropped == dropped
    trained = sum(mask.count("1") for _, mask in rows)
    assert trained + sum(dropped.values()) == sum(len(ids) for _, ids in turns)


def test_they_are_eleven() -> None:
    assert len(HISTORIES) == 11
