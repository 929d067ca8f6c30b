"""Where metrics go: a JSON line a step, TensorBoard, or several of them at once.

Names the report knows (others are kept and drawn under "more"):
    resolved_rate, reward_mean             fractions over the step's episodes
    resolved_rate_fresh                    of the tasks whose turn it was (not played again)
    loss, entropy_mean, mismatch_abs_mean  learner; entropy and mismatch in nats
    clip_low_fraction, clip_high_fraction  share of trained tokens where the clip stops the gradient
    wait_s, pack_s, step_s, publish_s, checkpoint_s, wall_s     the split of a step's wall time
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tensorboardX import SummaryWriter

from skyrl_jax.core.protocols import Tracker


class JsonlTracker:
    """Appends one JSON object a step; a line is on disk before ``log`` returns.

    Args:
        path: the file, e.g. WORKDIR/metrics.jsonl.
        restored_step: on resume, the step of the restored state: later rows are cut, since their
            steps will be run again. ``None`` keeps every whole row.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        path: Path,
        *,
        restored_step: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Remember the arguments; the file is opened by ``__enter__``."""
        self._path = path
        self._restored_step = restored_step
        self._clock = clock
        self._file: IO[str] | None = None

    def __enter__(self) -> JsonlTracker:
        """Cut what a resumed run will write again, and open the file for appending."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._cut()
        self._file = self._path.open("a")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step", "time", **metrics}``; a number that is not finite becomes null."""
        if self._file is None:
            raise ValueError(f"{self._path} is not open: use JsonlTracker in a with block")
        row: dict[str, Any] = {"step": step, "time": round(self._clock(), 3)}
        row |= {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _cut(self) -> None:
        """Keep whole rows up to the restored step; a row half-written at a kill is no row."""
        last = math.inf if self._restored_step is None else self._restored_step
        kept = [row for row in read_metrics(self._path) if row["step"] <= last]
        partial = self._path.with_name(self._path.name + ".partial")
        with partial.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)


class TensorBoardTracker:
    """Writes TensorBoard event files; a "/" in a name groups its curve.

    Args:
        folder: where the event files go, e.g. WORKDIR/tensorboard.
        restored_step: on resume, the step of the restored state: TensorBoard drops later points.
    """

    def __init__(self, folder: Path, *, restored_step: int | None = None) -> None:
        """Remember the arguments; the writer (a thread) starts in ``__enter__``."""
        self._folder = folder
        self._restored_step = restored_step
        self._writer: SummaryWriter | None = None

    def __enter__(self) -> TensorBoardTracker:
        """Start the writer."""
        purge = None if self._restored_step is None else self._restored_step + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=purge, flush_secs=10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush and stop the writer."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point to each metric's curve; numbers that are not finite are left out."""
        if self._writer is None:
            raise ValueError(f"{self._folder} is not open: use TensorBoardTracker in a with block")
        for name, value in metrics.items():
            plain = _plain(value)
            if plain is not None:
                self._writer.add_scalar(name, plain, step)


class Fanout:
    """Hands every row to several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        """Keep the trackers; their owner opens and closes them."""
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to each tracker in order."""
        for tracker in self._trackers:
            tracker.log(step, metrics)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the whole rows of a metrics file; an unfinished last line is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _plain(value: Any) -> float | int | None:
    """Turn a numpy or jax scalar into a JSON number, or ``None`` when it is not finite."""
    if isinstance(value, bool | int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
