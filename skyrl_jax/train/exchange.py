"""Batches from process 0 to the others, as files in the run folder that all of them see.

FOLDER/index.json            written last: how many batches, which channels
FOLDER/0/tokens.npy ...      one file an array, so that a reader maps them and touches its rows
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import Batch
from skyrl_jax.train.workdir import read_json, write_json

_ARRAYS = tuple(item.name for item in dataclasses.fields(Batch) if item.name != "channels")


def write_batches(folder: Path, batches: Sequence[Batch]) -> None:
    """Write batches to a new folder."""
    channels = []
    for number, batch in enumerate(batches):
        part = folder / str(number)
        part.mkdir(parents=True)
        arrays = {name: getattr(batch, name) for name in _ARRAYS}
        arrays |= {f"channel-{name}": array for name, array in batch.channels.items()}
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", np.asarray(array), allow_pickle=False)
        channels.append(sorted(batch.channels))
    write_json(folder / "index.json", {"channels": channels})


def read_batches(folder: Path, *, wait_s: float = 10.0) -> list[Batch]:
    """Return the batches of a folder as memory maps.

    Args:
        folder: what ``write_batches`` wrote, maybe on another host.
        wait_s: a network file system may show the files so much later than they were written.

    Raises:
        DataError: they are not there in time, or damaged.
    """
    until = time.monotonic() + wait_s
    while (index := read_json(folder / "index.json")) is None:
        if time.monotonic() > until:
            raise DataError(
                f"{folder} has no batch {wait_s:g} s after process 0 wrote it: do all processes "
                "see the same --workdir?"
            )
        time.sleep(0.05)
    return [
        _read(folder / str(number), channels) for number, channels in enumerate(index["channels"])
    ]


def _read(part: Path, channels: Sequence[str]) -> Batch:
    def load(name: str) -> Any:
        try:
            return np.load(part / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{part / name}.npy of a batch cannot be read: {error}") from error

    arrays = {name: load(name) for name in _ARRAYS}
    return Batch(**arrays, channels={name: load(f"channel-{name}") for name in channels})
