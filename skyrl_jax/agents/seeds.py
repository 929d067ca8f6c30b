"""One seed per (run, task, sample, turn, phase): the same draw whatever ran beside it."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """Hash ``parts`` to a number in [0, 2^31), the same on every machine and Python.

    Example: ``derive_seed(0, "toolz-3", 1, 0, "train/12")``. Parts are length-prefixed, so
    ("a", "bc") and ("ab", "c") differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(len(data).to_bytes(4, "big") + data)
    return int.from_bytes(digest.digest(), "big") & 0x7FFFFFFF
