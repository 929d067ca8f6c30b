"""Short names of prompts: of one that goes on from an earlier one, only what is new is hashed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple


class _Hashed(NamedTuple):
    """A prompt's bytes, and the hash that has read them and can read on."""

    raw: bytes
    state: Any


class Digests:
    """Names the prompts of one session.

    Args:
        keep: how many prompts are remembered (sub-agents take turns).
    """

    def __init__(self, keep: int = 4) -> None:
        """Nothing was hashed."""
        self._keep = keep
        self._known: list[_Hashed] = []  # the latest last

    def of(self, ids: Sequence[int]) -> bytes:
        """Return 16 bytes: blake2b of the token ids as int32."""
        raw = array("i", ids).tobytes()
        begun = [known for known in self._known if raw.startswith(known.raw)]
        longest = max(begun, key=lambda known: len(known.raw), default=None)
        if longest is None:
            state, done = hashlib.blake2b(digest_size=16), 0
        else:
            state, done = longest.state.copy(), len(longest.raw)
        state.update(memoryview(raw)[done:])
        others = [known for known in self._known if known is not longest]
        self._known = [*others, _Hashed(raw, state)][-self._keep :]
        name: bytes = state.digest()
        return name
