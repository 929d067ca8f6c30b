"""The leak test in small: a few children on bwrap and docker, each fault at least once."""

from __future__ import annotations

import os

import pytest

from benchmarks.sandbox_leaks import KINDS, failed, run


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a docker daemon")
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("sandbox")
def test_nothing_is_left_of_sixty_episodes_whatever_happens_to_them():
    result = run(42, 18, size=(14, 9), crashes=0.0)
    assert failed(result, 1) == [], result
    assert result["episodes"] >= 60 and result["bwrap"] >= 42 and result["docker"] >= 18
    assert all(result["injected"][kind] >= 1 for kind in KINDS)


def test_what_is_left_late_or_missing_fails_the_promise():
    fine = {
        "left": {"sandboxes": 0, "mounts": 0},
        "over_deadline": 0,
        "injected": dict.fromkeys(KINDS, 20),
        "problems": [],
    }
    assert failed(fine, 20) == []
    assert failed(fine | {"left": {"mounts": 2}}, 20) == ["2 mounts left"]
    assert failed(fine | {"over_deadline": 1}, 20) == ["1 past their deadline"]
    assert failed(fine, 21) == [f"only 20 x {kind}" for kind in KINDS]
    assert failed(fine | {"problems": ["Traceback"]}, 20) == ["a child broke: Traceback"]
