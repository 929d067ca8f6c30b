"""The warm start's choices: what is demonstrated, and what success is measured on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.train.warmstart import choose_played


@pytest.mark.parametrize(
    ("total", "played", "probed", "want"),
    [
        (1024, 360, 384, (360, 480)),  # the preset: three of four tasks teach
        (512, 360, 384, (192, 256)),  # half of the tasks stay for probes
        (8, 360, 384, (3, 4)),
        (1, 360, 384, (0, 0)),
    ],
)
def test_demonstrations_come_from_the_head_and_leave_a_tail(total, played, probed, want):
    teachable = [at % 4 != 0 for at in range(total)]
    chosen, tail = choose_played(teachable, played, probed)
    assert (len(chosen), tail) == want


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 80), st.integers(1, 80))
def test_no_probe_task_was_a_demonstration(teachable, played, probed):
    chosen, tail = choose_played(teachable, played, probed)
    assert all(teachable[at] and at < tail for at in chosen)
    assert len(chosen) <= played
    assert len(teachable) - tail >= min(probed, -(-len(teachable) // 2)) >= 1
