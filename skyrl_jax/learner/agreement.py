"""How the processes of one learner agree on the host before any enters a device program.

    turn/T/at/I       process I has arrived at its T-th meeting: [name of the meeting, value]
    turn/T/verdict    written once, by whoever comes first: {"values": [...]} or {"error": "..."}
    message/../N      the N-th message of process 0
    pulse/I           a number that process I raises as long as it lives
    failed/I          why process I has left

A meeting has one verdict for all: process 0 writes "go on" when all have arrived, any process
writes "give up" when its deadline passes, and a key can be written only once. So either all go on
or none does, also when the last one arrives just as another gives up. A process that waits inside
a collective instead is fatal on TPU and silent elsewhere (marin PR 7039, jax #38503).
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from skyrl_jax.core.errors import PeerError

# Seconds that one question to the store blocks: between two, failures and pulses are looked at.
_SLICE_S = 0.5
# Seconds that process 0 waits, when it fails, for the others to learn why.
_FAREWELL_S = 10.0
# Messages of a folder: whole folders are dropped.
_FOLDER = 256


@runtime_checkable
class Store(Protocol):
    """Keys and values that all processes see (learner/distributed.py has the real one)."""

    def put(self, key: str, value: str, *, overwrite: bool = False) -> bool:
        """Write a value; return False, without a change, where the key has one already."""

    def take(self, key: str, wait_s: float) -> str | None:
        """Return the value of a key, waiting for it; ``None`` when the time is over."""

    def items(self, folder: str) -> dict[str, str]:
        """Return {last part of the key: value} of the keys in ``folder``."""

    def drop(self, folder: str) -> None:
        """Remove all keys under ``folder``."""


class Agreement:
    """The meetings of a fixed set of processes. Use as a context manager.

    All processes call ``gather`` in the same order. The caller must not use one instance from two
    threads at a time.

    Args:
        store: seen by all.
        index: which process this is, 0 .. count - 1.
        count: how many there are.
        deadline_s: how long a process waits for the others.
        lost_after_s: a process without a sign of life for so long is dead.
    """

    def __init__(
        self, store: Store, index: int, count: int, *, deadline_s: float, lost_after_s: float
    ) -> None:
        """Remember the arguments; pulses start in ``__enter__``."""
        self._store = store
        self._index = index
        self._count = count
        self._deadline_s = deadline_s
        self._lost_after_s = lost_after_s
        self._turn = 0
        self._message = 0
        self._pulses: dict[str, tuple[str, float]] = {}
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._pulse, name="pulse", daemon=True)

    def __enter__(self) -> Agreement:
        """Begin to give signs of life."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say why this process leaves, where it is for an error, and stop the pulse."""
        if error is not None:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            with contextlib.suppress(PeerError):  # the store may be what failed
                self._put(f"failed/{self._index}", text[:1000])
            if self._index == 0:
                self._let_them_read()
        self._left.set()
        self._thread.join(timeout=self._lost_after_s)

    def gather(self, name: str, value: Any = None, *, deadline_s: float | None = None) -> list[Any]:
        """Meet all other processes; return everybody's value, by index.

        Args:
            name: what the meeting is for; the same in all processes.
            value: anything JSON can hold.
            deadline_s: how long to wait for the others, where it is not the usual time.

        Raises:
            PeerError: a process did not come in time, has failed or died, or came for something
                else. All processes get it, or none.
        """
        turn = self._turn
        self._turn += 1
        self._put(f"turn/{turn}/at/{self._index}", [name, value])
        try:
            verdict = self._wait_for_verdict(turn, name, deadline_s or self._deadline_s)
        except PeerError as error:
            # Not alone: what was decided in the meantime holds.
            verdict = self._decide(turn, {"error": str(error)})
        if "error" in verdict:
            raise PeerError(verdict["error"])
        if self._index == 0 and turn:
            self._store.drop(f"turn/{turn - 1}")  # all have left it: they are here
        values: list[Any] = verdict["values"]
        return values

    def send(self, message: Mapping[str, Any]) -> int:
        """Leave a message for all others (process 0 only); return its number, 1, 2, ..."""
        self._message += 1
        folder = self._message // _FOLDER
        self._put(f"message/{folder}/{self._message}", dict(message))
        if self._message % _FOLDER == 0 and folder >= 2:
            self._store.drop(f"message/{folder - 2}")
        return self._message

    def receive(self) -> tuple[int, dict[str, Any]]:
        """Return the next message of process 0 and its number.

        Raises:
            PeerError: none came in time, or a process has failed or died.
        """
        self._message += 1
        key = f"message/{self._message // _FOLDER}/{self._message}"
        found = self._await(key, time.monotonic() + self._deadline_s)
        if found is None:
            raise PeerError(
                f"process 0 has sent nothing for {self._deadline_s:g} s, not even that it lives: "
                "look at its log"
            )
        return self._message, found

    def lost(self) -> list[int]:
        """Return the processes without a sign of life for ``lost_after_s``, as seen here."""
        now, found = time.monotonic(), self._store.items("pulse")
        gone = []
        for other in range(self._count):
            value = found.get(str(other), "")
            if self._pulses.get(str(other), (None, 0.0))[0] != value:
                self._pulses[str(other)] = (value, now)
            silent_s = now - self._pulses[str(other)][1]
            if other != self._index and silent_s > self._lost_after_s:
                gone.append(other)
        return gone

    def wait_for_lost(self) -> list[int]:
        """Return the dead processes, waiting as long as it takes to be sure that there are none."""
        until = time.monotonic() + 1.5 * self._lost_after_s
        while not (gone := self.lost()) and time.monotonic() < until:
            time.sleep(min(_SLICE_S, self._lost_after_s / 8))
        return gone

    def check_alive(self) -> None:
        """Make sure that no other process has failed or died.

        Raises:
            PeerError: one has; the message names it and, where it said so, why.
        """
        for other, text in self._store.items("failed").items():
            if other != str(self._index):
                raise PeerError(f"process {other} has failed: {json.loads(text)}")
        if gone := self.lost():
            raise PeerError(
                f"{processes(gone)} gone: no sign of life for {self._lost_after_s:g} s; "
                "the run can be resumed with all processes"
            )

    def _let_them_read(self) -> None:
        """Wait until the others have left too: the store may end with this process."""
        until = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(PeerError):
            while time.monotonic() < until:
                left = {int(other) for other in self._store.items("failed")} | set(self.lost())
                if left >= set(range(self._count)):
                    return
                time.sleep(_SLICE_S / 2)

    def _wait_for_verdict(self, turn: int, name: str, deadline_s: float) -> dict[str, Any]:
        until = time.monotonic() + deadline_s
        late = functools.partial(self._missing, turn, name, deadline_s)
        if self._index:
            verdict: dict[str, Any] | None = self._await(f"turn/{turn}/verdict", until)
            return verdict or self._decide(turn, {"error": late()})
        values = []
        for other in range(self._count):
            arrived = self._await(f"turn/{turn}/at/{other}", until)
            if arrived is None:
                return self._decide(turn, {"error": late()})
            if arrived[0] != name:
                text = f"process {other} is at {arrived[0]!r} while process 0 is at {name!r}"
                return self._decide(turn, {"error": f"{text}: they do not run the same steps"})
            values.append(arrived[1])
        return self._decide(turn, {"values": values})

    def _missing(self, turn: int, name: str, deadline_s: float) -> str:
        here = {int(other) for other in self._store.items(f"turn/{turn}/at")}
        absent = [other for other in range(self._count) if other not in here] or [0]
        return (
            f"{processes(absent)} not come to {name!r} within {deadline_s:g} s (there: "
            f"{', '.join(map(str, sorted(here)))}). No device program was entered"
        )

    def _decide(self, turn: int, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """Write the verdict unless there is one; return the one that holds."""
        key = f"turn/{turn}/verdict"
        self._put(key, dict(verdict))
        found = self._store.take(key, 10.0)
        holds: dict[str, Any] = dict(verdict) if found is None else json.loads(found)
        return holds

    def _await(self, key: str, until: float) -> Any:
        """Wait for a value, looking out for failures; ``None`` when the time is over."""
        while True:
            left = until - time.monotonic()
            found = self._store.take(key, max(0.001, min(_SLICE_S, left)))
            if found is not None:
                return json.loads(found)
            self.check_alive()
            if left <= 0:
                return None

    def _put(self, key: str, value: Any) -> None:
        self._store.put(key, json.dumps(value))

    def _pulse(self) -> None:
        beat = 0
        while not self._left.is_set():
            beat += 1
            try:
                self._store.put(f"pulse/{self._index}", str(beat), overwrite=True)
            except PeerError:
                return  # the store is gone: whoever waits for something finds out
            self._left.wait(self._lost_after_s / 8)


def processes(indices: Sequence[int]) -> str:
    """Return "process 1 has" or "processes 1, 2 have"."""
    names = ", ".join(map(str, indices))
    return f"process {names} has" if len(indices) == 1 else f"processes {names} have"


class MemoryStore:
    """A ``Store`` for processes that are threads of one program: for tests."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: str, *, overwrite: bool = False) -> bool:
        """Write a value; return False, without a change, where the key has one already."""
        with self._changed:
            if key in self._values and not overwrite:
                return False
            self._values[key] = value
            self._changed.notify_all()
            return True

    def take(self, key: str, wait_s: float) -> str | None:
        """Return the value of a key, waiting for it; ``None`` when the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, wait_s)
            return self._values.get(key)

    def items(self, folder: str) -> dict[str, str]:
        """Return {last part of the key: value} of the keys in ``folder``."""
        with self._changed:
            found = {key.rpartition("/"): value for key, value in self._values.items()}
        return {key[2]: value for key, value in found.items() if key[0] == folder}

    def drop(self, folder: str) -> None:
        """Remove all keys under ``folder``."""
        with self._changed:
            for key in [key for key in self._values if key.startswith(f"{folder}/")]:
                del self._values[key]
