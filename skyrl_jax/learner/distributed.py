"""Several processes as one learner: they start together, meet on the host, stop and end together.

    with ProcessGroup(Rendezvous(coordinator="host0:1234", num_processes=2, process_id=0)) as peers:
        peers.check_shared(folder)               # all see the same files
        for step in range(1, steps + 1):
            peers.ready(f"step {step}")          # on the host; its deadline names who is late
            with peers.running(f"step {step}"):  # device programs over all processes
                ...
            if peers.stop_requested():           # SIGTERM to any: true for all at the same step
                ...                              # save together

``Peers`` is the same for one process: nothing to wait for, so that callers need no second path.

Ends of a process (launchers/train.py): 75 = asked to stop, state saved, start it again; 69 =
another process is missing, late or dead. When process 0 is killed, JAX itself ends the others at
once (signal 6) with a text of its own. SIGTERM belongs to JAX's preemption notifier from the start
on: a handler installed later, by asyncio too, would keep the notice from the others.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from skyrl_jax.core.errors import ConfigError, PeerError
from skyrl_jax.learner.agreement import Agreement, processes
from skyrl_jax.learner.roll_call import call_roll
from skyrl_jax.learner.waiting import say, waiting

EXIT_PREEMPTED = 75  # sysexits.h EX_TEMPFAIL: start it again
EXIT_PEER_LOST = 69  # sysexits.h EX_UNAVAILABLE

# Seconds for a device program to fail by itself after a process died.
_GRACE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the processes find each other and how long they wait, in seconds.

    Args:
        coordinator: "host:port" of process 0; "" = ask the TPU pod, Slurm or Open MPI.
        num_processes: how many there are. ``process_id``: which one this is, from 0 on.
        folder: one that all see, for the roll call before the start. Without it, and on a TPU pod,
            JAX itself ends a process that waited in vain, and does not say for whom.
        start_timeout_s: for all to be there.
        deadline_s: how long a process may keep the others waiting at a meeting.
        lost_after_s: silence after which a process that is waited for counts as dead.
        heartbeat_timeout_s: JAX's own limit, which also ends a process whose device program waits
            for a dead one. Its default is 100: too long.
        file_delay_s: how late a network file system may show a file to another host.
        unknown_host: why this machine does not know the host of the coordinator; "" where it does
            (the learner asks no network by itself: launchers/common.py does).
    """

    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1
    folder: str = ""
    start_timeout_s: float = 300.0
    deadline_s: float = 120.0
    lost_after_s: float = 20.0
    heartbeat_timeout_s: int = 40
    file_delay_s: float = 10.0
    unknown_host: Callable[[str], str] = lambda address: ""


def rendezvous_from_flags(
    *, distributed: bool, coordinator: str, num_processes: int, process_id: int
) -> Rendezvous | None:
    """Return what the flags ask for; ``None`` = one process.

    Raises:
        ConfigError: flags are missing or do not fit each other.
    """
    if not coordinator:
        if num_processes or process_id >= 0:
            raise ConfigError(
                "--num_processes and --process_id need --coordinator=HOST:PORT (of process 0); on "
                "a TPU pod --distributed alone finds all three"
            )
        return Rendezvous() if distributed else None
    if not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise ConfigError(f"--coordinator={coordinator!r} must be HOST:PORT of process 0")
    if num_processes < 1:
        raise ConfigError("--coordinator needs --num_processes=N, the number of all processes")
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process_id={process_id} must be 0 to {num_processes - 1} (--num_processes="
            f"{num_processes}), another one in each process"
        )
    return Rendezvous(coordinator=coordinator, num_processes=num_processes, process_id=process_id)


class Peers:
    """The only process of a learner: every meeting is over at once."""

    index = 0
    count = 1

    def gather(self, name: str, value: Any = None, *, deadline_s: float | None = None) -> list[Any]:
        """Return every process's value, by index, when all have come to the meeting ``name``."""
        return [value]

    def ready(self, name: str, *, deadline_s: float | None = None) -> None:
        """Return when all processes are about to do ``name``: only then enter a device program.

        Raises:
            PeerError: names who did not come in time; no process goes on.
        """
        self.gather(name, deadline_s=deadline_s)

    def stop_requested(self) -> bool:
        """Return whether to save and stop here: the same answer in all processes.

        All ask equally often, at the same points. After SIGTERM to any process it is true once, at
        the first point that none of them has passed.
        """
        return False

    def check_shared(self, folder: Path) -> None:
        """Make sure that ``folder`` is one folder for all processes; process 0 may make it.

        Raises:
            ConfigError: a process does not see what process 0 wrote there.
        """

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Around device programs: where one fails since a process died, say which.

        Raises:
            PeerError: names the dead.
        """
        yield


class ProcessGroup(Peers):
    """All processes of a learner, and this one's part in ``jax.distributed``: a context manager.

    Enter it before anything asks JAX for its devices. After an error the processes leave without a
    farewell, since some may be dead: end such a process with ``leave``, or JAX's own exit handler
    waits for them.
    """

    def __init__(self, where: Rendezvous) -> None:
        """Remember where; nothing is started before ``__enter__``."""
        self._where = where
        self._agreement: Agreement | None = None
        self._asked = 0

    def __enter__(self) -> ProcessGroup:
        """Start and wait for all processes, saying what it waits for.

        Raises:
            PeerError: not all came in time; the message names the missing ones.
            ConfigError: there is nobody to ask for the coordinator, or no such host.
        """
        where = self._where
        given: dict[str, Any] = {}
        if where.coordinator:
            given = {
                "coordinator_address": where.coordinator,
                "num_processes": where.num_processes,
                "process_id": where.process_id,
                "cluster_detection_method": "deactivate",
            }
            _find_coordinator(where)
        limit_s, whom = where.start_timeout_s, where.coordinator or "the pod or scheduler"
        try:
            with waiting(lambda: f"not all processes have met at {whom}", limit_s):
                jax.distributed.initialize(
                    **given,
                    initialization_timeout=math.ceil(limit_s),
                    heartbeat_timeout_seconds=where.heartbeat_timeout_s,
                    shutdown_timeout_seconds=math.ceil(where.deadline_s),
                )
        except ValueError as error:
            raise ConfigError(
                f"--distributed found no TPU pod or scheduler to ask ({error}); give --coordinator="
                "HOST:PORT, --num_processes and --process_id"
            ) from error
        except jax.errors.JaxRuntimeError as error:
            first = str(error).splitlines()[0][:300]
            raise PeerError(f"the processes could not start together: {first}") from error
        self.index, self.count = jax.process_index(), jax.process_count()
        self._agreement = Agreement(
            _CoordinationService(),
            self.index,
            self.count,
            deadline_s=where.deadline_s,
            lost_after_s=where.lost_after_s,
        )
        self._agreement.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave together; after an error alone, saying why."""
        if error is not None:
            self._met.__exit__(kind, error, trace)
            return
        try:
            self.ready("the end")
        except PeerError as late:
            self._met.__exit__(type(late), late, None)
            raise
        self._met.__exit__(None, None, None)
        shutdown: Any = jax.distributed.shutdown  # untyped
        shutdown()

    def gather(self, name: str, value: Any = None, *, deadline_s: float | None = None) -> list[Any]:
        """Return every process's value, by index, when all have come to the meeting ``name``."""
        return self._met.gather(name, value, deadline_s=deadline_s)

    def send(self, message: Mapping[str, Any]) -> int:
        """Leave a message for all others (process 0 only); return its number."""
        return self._met.send(message)

    def receive(self) -> tuple[int, dict[str, Any]]:
        """Wait for the next message of process 0; return its number and it."""
        return self._met.receive()

    def check_alive(self) -> None:
        """Make sure, without waiting, that no other process has failed or died."""
        self._met.check_alive()

    def stop_requested(self) -> bool:
        """Return whether to save and stop here: the same answer in all processes."""
        # Counted from 1 in each start, not by steps of a run: a notice that comes before the first
        # question puts the point at 1.
        self._asked += 1
        return bool(multihost_utils.reached_preemption_sync_point(self._asked))

    def check_shared(self, folder: Path) -> None:
        """Make sure that ``folder`` is one folder for all processes; process 0 may make it."""
        nonce = secrets.token_hex(8)
        if self.index == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f".shared-{nonce}").touch()
        path = folder / f".shared-{self.gather('write a shared file', nonce)[0]}"
        until = time.monotonic() + self._where.file_delay_s
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.05)
        seen = self.gather("look for a shared file", [path.exists(), str(folder)])
        if self.index == 0:
            path.unlink(missing_ok=True)
        blind = [index for index, (found, _) in enumerate(seen) if not found]
        if blind:
            raise ConfigError(
                f"{seen[0][1]} of process 0 is not shared: {processes(blind)} not seen the file "
                f"that process 0 wrote there (looked in {seen[blind[0]][1]}); give all processes "
                "one --workdir on a file system that they share"
            )

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Around device programs: where one fails since a process died, say which.

        A program that does not even fail ends this process, with ``EXIT_PEER_LOST``: there is no
        other way out of it.
        """
        over = threading.Event()
        threading.Thread(target=self._guard, args=(name, over), daemon=True).start()
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            over.set()
            text = str(error).splitlines()[0][:300]
            if "RESOURCE_EXHAUSTED" in text:
                raise
            gone = self._met.wait_for_lost()
            if not gone:
                raise
            raise PeerError(
                f"{processes(gone)} died during {name!r}, whose device program cannot end without "
                f"all processes ({text}); start all of them again"
            ) from error
        finally:
            over.set()

    def _guard(self, name: str, over: threading.Event) -> None:
        """End the process when another one has died and ``over`` does not come."""
        while not over.wait(self._where.lost_after_s / 4):
            try:
                self._met.check_alive()
            except PeerError as error:
                if over.wait(_GRACE_S):
                    return  # it failed, and the one who waits for it says why
                print(
                    f"error: {error}. It died during {name!r}, whose device program cannot end "
                    "without it",
                    file=sys.stderr,
                )
                leave(EXIT_PEER_LOST)

    @property
    def _met(self) -> Agreement:
        if self._agreement is None:
            raise RuntimeError("ProcessGroup is not entered: use it in a with statement")
        return self._agreement


def _find_coordinator(where: Rendezvous) -> None:
    """Wait until all processes are there; then the host of process 0 must be known, too.

    Its name may come up together with process 0, so at first an unknown one is only told.

    Raises:
        PeerError: not all came in time.
        ConfigError: this machine does not know the host.
    """
    if where.folder:
        if why := where.unknown_host(where.coordinator):
            say(f"note: the host of --coordinator={where.coordinator} is not known here yet: {why}")
        call_roll(
            Path(where.folder),
            where.process_id,
            where.num_processes,
            timeout_s=where.start_timeout_s,
        )
    if why := where.unknown_host(where.coordinator):
        raise ConfigError(
            f"--coordinator={where.coordinator}: this machine knows no such host ({why}); give the "
            "name or the address by which it reaches the machine of process 0"
        )


def leave(code: int) -> NoReturn:
    """End this process now: no exit handler may wait for processes that are dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _CoordinationService:
    """The key-value store of ``jax.distributed`` as an ``agreement.Store``."""

    def __init__(self) -> None:
        self._client = _client()

    def put(self, key: str, value: str, *, overwrite: bool = False) -> bool:
        try:
            self._client.key_value_set(f"skyrl/{key}", value, allow_overwrite=overwrite)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise _no_service(error) from error
        return True

    def take(self, key: str, wait_s: float) -> str | None:
        try:
            wait_ms = max(1, round(1000 * wait_s))
            return str(self._client.blocking_key_value_get(f"skyrl/{key}", wait_ms))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise _no_service(error) from error

    def items(self, folder: str) -> dict[str, str]:
        try:
            found = self._client.key_value_dir_get(f"skyrl/{folder}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return {}
            raise _no_service(error) from error
        return {key.rpartition("/")[2]: value for key, value in found}

    def drop(self, folder: str) -> None:
        try:
            self._client.key_value_delete(f"skyrl/{folder}")
        except jax.errors.JaxRuntimeError as error:
            raise _no_service(error) from error


def _client() -> Any:
    """Return the client of the coordination service.

    The only place that reaches into JAX: its public interface has start, end and a barrier made of
    a collective, but no way to wait on the host. Orbax takes the same object from the same place.
    """
    from jax._src import distributed

    return distributed.global_state.client


def _no_service(error: Exception) -> PeerError:
    text = (str(error).splitlines() or [""])[0][:200]
    return PeerError(f"process 0, which keeps the processes together, does not answer: {text}")
