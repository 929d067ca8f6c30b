"""The ledger: balances, says by how much it does not, survives JSON."""

from __future__ import annotations

import json

import pytest

from skyrl_jax.batching.ledger import CAUSES, PLACES, Ledger
from skyrl_jax.core.errors import DataError, LedgerError


def test_it_balances_and_is_a_value() -> None:
    empty = Ledger()
    full = empty.sample(100).train(60).drop("failed", 10).drop("failed", 5).hold("buffered", 25)
    assert full.check() is full and full.dropped == {"failed": 15}
    assert empty == Ledger() and empty.difference == 0


def test_hold_sets_and_does_not_add() -> None:
    held = Ledger().sample(10).hold("in_flight", 4).hold("in_flight", 10)
    assert held.check().pending == {"in_flight": 10}


def test_an_imbalance_is_raised_with_the_figures() -> None:
    with pytest.raises(LedgerError) as caught:
        Ledger().sample(10).train(6).drop("stale", 3).check()
    text = str(caught.value)
    assert "off by 1" in text and "sampled 10" in text and "trained 6" in text
    assert "'stale': 3" in text


def test_nothing_may_be_pending_at_the_end() -> None:
    ledger = Ledger().sample(10).hold("checkpoint", 10)
    ledger.check()
    with pytest.raises(LedgerError, match=r"pending: \{'checkpoint': 10\}"):
        ledger.check_closed()
    assert ledger.train(10).hold("checkpoint", 0).check_closed()


def test_json_round_trip() -> None:
    ledger = Ledger().sample(9).train(1)
    for cause in CAUSES:
        ledger = ledger.drop(cause, 1)
    for place in PLACES:
        ledger = ledger.hold(place, 2)
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


@pytest.mark.parametrize(
    ("value", "needle"),
    [
        ({"sampled": 1}, "'trained' is missing"),
        ({"sampled": -1, "trained": 0, "dropped": {}, "pending": {}}, "-1 is no count"),
        ({"sampled": 1.5, "trained": 0, "dropped": {}, "pending": {}}, "1.5 is no count"),
        ({"sampled": 1, "trained": 0, "dropped": {"lost": 1}, "pending": {}}, "'lost' is no cause"),
        ({"sampled": 1, "trained": 0, "dropped": 3, "pending": {}}, "3 is no mapping"),
        ({"sampled": 1, "trained": 0, "dropped": {}, "pending": {"x": 1}}, "'x' is no place"),
    ],
)
def test_a_broken_record_is_refused(value, needle) -> None:
    with pytest.raises(DataError, match=needle):
        Ledger.from_json(value)
