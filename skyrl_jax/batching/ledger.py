"""The token ledger: sampled = trained + dropped[cause] + pending[place], at every step.

The three sides are counted by different hands (the generator's answers, the packed batches, the
filters), so a token lost or trained twice anywhere between them shows as a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from skyrl_jax.core.errors import DataError, LedgerError

CAUSES = ("abandoned", "failed", "filtered", "stale", "overlong", "aux")
PLACES = ("in_flight", "buffered", "checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Counts of tokens since the run began.

    Example: ``Ledger().sample(10).train(7).drop("overlong", 3).check()``.
    """

    sampled: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    pending: Mapping[str, int] = field(default_factory=dict)

    def sample(self, tokens: int) -> Ledger:
        """Add tokens that the generator returned."""
        return replace(self, sampled=self.sampled + _count(tokens))

    def train(self, tokens: int) -> Ledger:
        """Add tokens that were in exactly one batch (several epochs over it count once)."""
        return replace(self, trained=self.trained + _count(tokens))

    def drop(self, cause: str, tokens: int) -> Ledger:
        """Add tokens that will never be trained."""
        if cause not in CAUSES:
            raise DataError(f"ledger: {cause!r} is no cause; causes: {', '.join(CAUSES)}")
        total = self.dropped.get(cause, 0) + _count(tokens)
        return replace(self, dropped={**self.dropped, cause: total})

    def drop_all(self, dropped: Mapping[str, int]) -> Ledger:
        """Add several causes at once."""
        ledger = self
        for cause, tokens in dropped.items():
            ledger = ledger.drop(cause, tokens)
        return ledger

    def hold(self, place: str, tokens: int) -> Ledger:
        """Set (not add) the tokens that wait at a place."""
        if place not in PLACES:
            raise DataError(f"ledger: {place!r} is no place; places: {', '.join(PLACES)}")
        return replace(self, pending={**self.pending, place: _count(tokens)})

    @property
    def difference(self) -> int:
        """Return sampled minus all that is accounted for; 0 when the ledger balances."""
        return self.sampled - self.trained - sum(self.dropped.values()) - sum(self.pending.values())

    def check(self) -> Ledger:
        """Return the ledger itself when it balances.

        Raises:
            LedgerError: with the figures of every account.
        """
        if self.difference:
            raise LedgerError(
                f"token ledger off by {self.difference}: sampled {self.sampled} != trained "
                f"{self.trained} + dropped {dict(self.dropped)} + pending {dict(self.pending)}"
            )
        return self

    def check_closed(self) -> Ledger:
        """Check at the end of a run: balanced, and nothing pending.

        Raises:
            LedgerError: tokens still wait somewhere, or the sides differ.
        """
        self.check()
        waiting = {place: tokens for place, tokens in self.pending.items() if tokens}
        if waiting:
            raise LedgerError(f"the run is over but tokens are pending: {waiting}")
        return self

    def to_json(self) -> dict[str, object]:
        """Return a JSON object (for metrics and checkpoints)."""
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "pending": dict(self.pending),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Ledger:
        """Read what ``to_json`` wrote.

        Raises:
            DataError: a field is missing or no count.
        """
        try:
            ledger = cls(sampled=_count(value["sampled"]), trained=_count(value["trained"]))
            for cause, tokens in _mapping(value["dropped"]).items():
                ledger = ledger.drop(cause, _count(tokens))
            for place, tokens in _mapping(value["pending"]).items():
                ledger = ledger.hold(place, _count(tokens))
        except KeyError as error:
            raise DataError(f"ledger: the field {error.args[0]!r} is missing") from None
        return ledger


def _count(tokens: object) -> int:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise DataError(f"ledger: {tokens!r} is no count of tokens")
    return tokens


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise DataError(f"ledger: {value!r} is no mapping of counts")
    return value
