"""A prompt's name is the hash of its ids, however much of it was hashed before."""

from __future__ import annotations

import hashlib
from array import array

from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.gateway.digests import Digests

IDS = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 6), IDS), max_size=12), st.integers(1, 3))
def test_it_is_the_hash_of_all_ids(steps, keep) -> None:
    digests, ids = Digests(keep=keep), []
    for kept, new in steps:
        ids = [*ids[:kept], *new]
        assert digests.of(ids) == hashlib.blake2b(array("i", ids), digest_size=16).digest()
        assert len(digests._known) <= keep


def test_only_what_is_new_is_hashed() -> None:
    digests = Digests()
    first = digests.of(range(1000))
    state = digests._known[-1].state
    digests.of(range(2000))
    assert len(digests._known) == 1, "a prompt stands in for the one it goes on from"
    assert state.digest() == first, "the earlier hash was read on in a copy"
