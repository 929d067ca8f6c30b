"""The list of this user's sandboxes, from create to destroy: it outlives their owner.

Each provider keeps one file, ``<tmp>/skyrl-sandboxes-<uid>/<run name>.jsonl``: a line about the
owner, then a line for each sandbox that is made and for each that is destroyed. The owner holds a
lock on its file for as long as it lives; the kernel gives the lock back whatever kills the owner,
also in another pid namespace. So a file that can be locked is a dead owner's, and what is still
open in it is left over: sandbox/reaper.py removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from skyrl_jax.core.errors import InfraError

B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one file says.

    Args:
        path: the file.
        backend: "bwrap", "docker", ...; "" where the first line is damaged.
        run: the run name: ``<run id>.<owner pid>.<owner start>.<random>``.
        where: of docker, the daemon's address.
        since: when the owner began, in seconds of the epoch.
        alive: the owner lives: hands off.
        open: {number: traces} of the sandboxes that are not destroyed. Traces are what may be left
            of one: cgroup directories (bwrap), its folder (process), its container's id.
    """

    path: Path
    backend: str
    run: str
    where: str
    since: float
    alive: bool
    open: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def registry_folder() -> Path:
    """Return this user's folder of run files, made when it is missing.

    Raises:
        InfraError: the path is there and is not this user's directory.
    """
    path = Path(tempfile.gettempdir()) / f"skyrl-sandboxes-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise InfraError(f"{path} is not a directory of this user: remove it", cause="registry")
    return path


class Book(Generic[B]):
    """The open sandboxes of one provider: a set in memory, and the same in its run's file.

    Before ``open`` and after ``close`` it is the set alone.

    Args:
        backend: the provider's name.
    """

    def __init__(self, backend: str) -> None:
        """Keep the name; no file is made."""
        self._backend = backend
        self._numbers: dict[B, int] = {}
        self._left: set[int] = set()
        self._next = 0
        self._path = Path()
        self._fd = -1

    def open(self, run: str, where: str = "") -> None:
        """Make the run's file and lock it.

        Raises:
            InfraError: it cannot be written.
        """
        self._path = registry_folder() / f"{run}.jsonl"
        head = {"backend": self._backend, "run": run, "where": where, "since": time.time()}
        draft = self._path.with_suffix(".new")  # nobody may lock it between open and lock
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
            self._fd = os.open(draft, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(head)
            os.rename(draft, self._path)
        except OSError as error:
            raise _not_written(self._path, error) from error

    def add(self, box: B, traces: Iterable[str] = ()) -> None:
        """Note a sandbox that is about to be made.

        Raises:
            InfraError: the file cannot be written; nothing is noted.
        """
        number, self._next = self._next, self._next + 1
        try:
            self._write({"made": number, "traces": list(traces)})
        except OSError as error:
            raise _not_written(self._path, error) from error
        self._numbers[box] = number

    def note(self, box: B, traces: Iterable[str]) -> None:
        """Note traces of an open sandbox that were not known before it was made.

        Raises:
            InfraError: the file cannot be written.
        """
        try:
            self._write({"made": self._numbers[box], "traces": list(traces)})
        except OSError as error:
            raise _not_written(self._path, error) from error

    def forget(self, box: B, left: bool) -> None:
        """Take a sandbox off; ``left``: something of it may be left, its line stays for the reaper.

        Unknown ones are fine.
        """
        number = self._numbers.pop(box, None)
        if number is not None:
            self._left.add(number)
            if not left:
                self._settle(number)

    @property
    def left(self) -> int:
        """Return of how many sandboxes something may be left."""
        return len(self._left)

    def settle(self) -> None:
        """Note that of none of these anything is left any more."""
        for number in list(self._left):
            self._settle(number)

    def _settle(self, number: int) -> None:
        self._left.discard(number)
        with contextlib.suppress(OSError):  # the reaper will find nothing: no harm
            self._write({"gone": number})

    def close(self) -> None:
        """Give the file back: gone when every sandbox is, else left to the next reaper."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if not _read_open(self._path.read_text()):
                self._path.unlink()
        os.close(self._fd)
        self._fd = -1

    def __len__(self) -> int:
        """Return how many sandboxes are open."""
        return len(self._numbers)

    def __iter__(self) -> Iterator[B]:
        """Yield the open sandboxes."""
        return iter(self._numbers)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._fd >= 0:
            os.write(self._fd, json.dumps(line).encode() + b"\n")


def _not_written(path: Path, error: OSError) -> InfraError:
    return InfraError(
        f"the list of open sandboxes cannot be written ({path}: {error.strerror}): make room, or "
        "set TMPDIR to a folder that can",
        cause="registry",
    )


def runs() -> list[Run]:
    """Return what the files of this user's runs say, the oldest first."""
    found = [read_run(path) for path in registry_folder().glob("*.jsonl")]
    return sorted((run for run in found if run is not None), key=lambda run: run.since)


def read_run(path: Path) -> Run | None:
    """Return what one file says; ``None``: it went away meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        alive = not _can_lock(fd)
        with os.fdopen(os.dup(fd)) as file:
            text = file.read()
    finally:
        os.close(fd)
    head = _parse(text.partition("\n")[0])
    return Run(
        path=path,
        backend=str(head.get("backend", "")),
        run=str(head.get("run", path.stem)),
        where=str(head.get("where", "")),
        since=float(head.get("since", 0.0)),
        alive=alive,
        open=_read_open(text),
    )


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read_open(text: str) -> dict[int, tuple[str, ...]]:
    """Replay a file; a last line that a kill cut short counts for nothing."""
    found: dict[int, tuple[str, ...]] = {}
    for line in text.splitlines():
        entry = _parse(line)
        if "made" in entry:
            found[entry["made"]] = tuple(entry.get("traces", ()))
        elif "gone" in entry:
            found.pop(entry["gone"], None)
    return found


def _parse(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
