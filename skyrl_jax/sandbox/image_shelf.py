"""Which images we pulled, when each was used last, and which have to go: a file per daemon.

Images are the user's disk: only those that this project pulled or made of one are ever removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An image that we pulled. ``used`` is in seconds of the epoch, ``size`` in bytes."""

    name: str
    used: float
    size: int


def too_much(
    kept: Sequence[Kept], limit: int, busy: Sequence[str] = (), reserve: int = 0
) -> list[Kept]:
    """Return the images to remove, the longest unused first, so that the others fit.

    Args:
        kept: all images that we pulled.
        limit: bytes; 0 = no limit.
        busy: names that must stay.
        reserve: bytes that are about to come.
    """
    total = sum(item.size for item in kept) + reserve
    found: list[Kept] = []
    for item in sorted(kept, key=lambda item: item.used):
        if not limit or total <= limit:
            break
        if item.name not in busy:
            found.append(item)
            total -= item.size
    return found


class Shelf:
    """The file; processes that share it take turns.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        """Keep the path."""
        self._path = path

    def kept(self) -> list[Kept]:
        """Return what the file says; a damaged line or file counts as nothing."""
        with self._locked() as values:
            return [_kept(name, value) for name, value in values.items()]

    def note(self, name: str, size: int) -> None:
        """Remember an image as pulled and used now."""
        with self._locked() as values:
            values[name] = {"used": time.time(), "size": size}

    def touch(self, name: str) -> None:
        """Remember that an image was used now, if it is ours."""
        with self._locked() as values:
            if name in values:
                values[name]["used"] = time.time()

    def forget(self, name: str) -> None:
        """Take an image off."""
        with self._locked() as values:
            values.pop(name, None)

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            values = self._read()
            before = json.dumps(values)
            yield values
            if json.dumps(values) != before:
                draft = self._path.with_suffix(".part")
                draft.write_text(json.dumps(values, indent=1))
                draft.replace(self._path)
        finally:
            os.close(fd)

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        good = values if isinstance(values, dict) else {}
        return {str(k): dict(v) for k, v in good.items() if isinstance(v, dict) and "used" in v}


def _kept(name: str, value: Mapping[str, Any]) -> Kept:
    return Kept(name=name, used=float(value["used"]), size=int(value.get("size", 0)))
