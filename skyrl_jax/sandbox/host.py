"""A sandbox host without its HTTP: capacity, leases, and sandboxes and commands by key.

Whoever makes something names it, so that a repeated request finds what the first one made: a
sandbox by its id, a command by its number within the sandbox. An owner that is silent for the lease
loses its sandboxes; a command whose client is gone for a few seconds is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from skyrl_jax.core.errors import CapacityError, DataError, InfraError
from skyrl_jax.core.protocols import Sandbox, SandboxProvider, SandboxSpec
from skyrl_jax.sandbox import host_wire
from skyrl_jax.sandbox.host_layers import LayerStore

_QUEUE_TIMEOUT_S = 30.0  # for a turn to be made
_CREATE_TIMEOUT_S = 60.0
_REPLY_GRACE_S = 20.0  # above the provider's own grace: this one is for a broken provider
_TREE_TIMEOUT_S = 90.0
_KEPT = 4  # results of a sandbox that are kept for a client that asks again
_TOMBSTONES = 10_000


class MissingLayers(Exception):
    """The host lacks layers of a spec; ``digests`` are those to send."""

    def __init__(self, digests: Sequence[str]) -> None:
        """Keep them."""
        super().__init__(f"{len(digests)} layers are not here")
        self.digests = list(digests)


@dataclass(eq=False, slots=True, kw_only=True)
class _Operation:
    """A command that runs or has run, and how many requests wait for it."""

    task: asyncio.Task[bytes]
    waiters: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class _Entry:
    """A sandbox from its first request to its end."""

    owner: str
    layers: tuple[str, ...]
    making: asyncio.Task[Sandbox]
    operations: dict[int, _Operation] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    finished: deque[int] = field(default_factory=deque)
    ending: asyncio.Task[None] | None = None


class SandboxHost:
    """Makes sandboxes for owners elsewhere. Use as an async context manager.

    Args:
        provider: makes them here; entered and left by the caller.
        layers: where layers of the owners are kept.
        capacity: sandboxes at once, those being made included.
        creates: sandboxes being made at once; more wait.
        lease_s: an owner that says nothing for so long loses its sandboxes.
        resolve_image: turns a spec's image ("" = the host's own) into the provider's.
        gone_s: a client whose connection was lost has this long to ask for its command again.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        layers: LayerStore,
        *,
        capacity: int,
        creates: int,
        lease_s: float,
        resolve_image: Callable[[str], str],
        gone_s: float = 5.0,
    ) -> None:
        """Start with no sandbox."""
        self.layers = layers
        self.lease_s = lease_s
        self.boot = secrets.token_hex(8)  # another process has another
        self.capacity = capacity
        self._provider = provider
        self._turn = asyncio.Semaphore(creates)
        self._resolve_image = resolve_image
        self._gone_s = gone_s
        self._entries: dict[str, _Entry] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._owners: dict[str, float] = {}
        self._reaper: asyncio.Task[None] | None = None
        self._drops: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Begin to watch the leases."""
        self._reaper = asyncio.create_task(self._reap())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Destroy every sandbox."""
        if self._reaper is not None:
            self._reaper.cancel()
        await self._end_all(list(self._entries))

    # -- owners ----------------------------------------------------------------------------------

    def renew(self, owner: str) -> dict[str, Any]:
        """Take a sign of life; return what the owner wants to know of this host."""
        self._owners[owner] = time.monotonic()
        return self.status(owner)

    def status(self, owner: str = "") -> dict[str, Any]:
        """Return the host's load, and how much of it an owner is."""
        return {
            "boot": self.boot,
            "lease_s": self.lease_s,
            "capacity": self.capacity,
            "live": len(self._entries),
            "mine": sum(entry.owner == owner for entry in self._entries.values()),
        }

    async def drop_owner(self, owner: str) -> None:
        """Destroy everything that an owner has."""
        self._owners.pop(owner, None)
        await self._end_all([key for key, e in self._entries.items() if e.owner == owner])

    async def _reap(self) -> None:
        pause = min(1.0, self.lease_s / 4)
        while True:
            due = time.monotonic() + pause
            await asyncio.sleep(pause)
            self.expire(time.monotonic(), time.monotonic() - due)

    def expire(self, now: float, stalled: float) -> None:
        """End what belongs to silent owners; time in which this host itself stood still is free.

        Args:
            now: of ``time.monotonic``, s.
            stalled: how much later than it should be, s (the process was stopped, or had no CPU).
        """
        for owner, seen in list(self._owners.items()):
            self._owners[owner] = seen = seen + max(0.0, stalled)
            if now - seen > self.lease_s:
                task = asyncio.create_task(self.drop_owner(owner))
                self._drops.add(task)  # one that cannot be ended does not keep the others
                task.add_done_callback(self._drops.discard)

    async def _end_all(self, keys: Sequence[str]) -> None:
        await asyncio.gather(*(self.destroy(key) for key in keys), return_exceptions=True)

    # -- sandboxes -------------------------------------------------------------------------------

    async def create(self, owner: str, key: str, spec: SandboxSpec) -> None:
        """Make the sandbox ``key``, or wait for it when it is being made already.

        Raises:
            CapacityError: the host is full; at once.
            MissingLayers: send them and ask again.
            HostError: whatever the provider raises.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = self._begin(owner, key, spec)
        await asyncio.shield(entry.making)

    def _begin(self, owner: str, key: str, spec: SandboxSpec) -> _Entry:
        if key in self._ended:
            raise InfraError(f"sandbox {key} has been destroyed before", cause="destroyed")
        if len(self._entries) >= self.capacity:
            raise CapacityError(f"the sandbox host holds {self.capacity} sandboxes, its capacity")
        if spec.shared:
            raise DataError("a spec's shared directory cannot be on another machine")
        missing = self.layers.missing(spec.layers)
        if missing:
            raise MissingLayers(missing)
        folders = self.layers.pin(spec.layers)
        image = self._resolve_image(spec.image)
        making = asyncio.create_task(
            self._make(dataclasses.replace(spec, layers=folders, image=image))
        )
        entry = _Entry(owner=owner, layers=spec.layers, making=making)
        self._entries[key] = entry

        def made(task: asyncio.Task[Sandbox]) -> None:
            if (task.cancelled() or task.exception()) and entry.ending is None:
                self._forget(key, entry)

        making.add_done_callback(made)
        return entry

    async def _make(self, spec: SandboxSpec) -> Sandbox:
        try:
            async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise CapacityError(
                f"no turn to make a sandbox within {_QUEUE_TIMEOUT_S:.0f} s (sandbox_host "
                "--creates)"
            ) from error
        try:
            async with asyncio.timeout(_CREATE_TIMEOUT_S):
                return await self._provider.create(spec)
        except TimeoutError as error:
            raise InfraError(
                f"a sandbox was not made within {_CREATE_TIMEOUT_S:.0f} s", cause="create"
            ) from error
        finally:
            self._turn.release()

    def _forget(self, key: str, entry: _Entry) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
            self.layers.unpin(entry.layers)

    async def destroy(self, key: str) -> None:
        """End a sandbox, made or being made. Idempotent; what was never here stays away."""
        self._ended[key] = None
        if len(self._ended) > _TOMBSTONES:
            self._ended.popitem(last=False)
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.ending is None:
            entry.ending = asyncio.create_task(self._end(key, entry))
        await asyncio.shield(entry.ending)

    async def _end(self, key: str, entry: _Entry) -> None:
        try:
            if not entry.making.done():
                entry.making.cancel()  # the provider removes what it has begun
            await asyncio.wait({entry.making})
            if not entry.making.cancelled() and entry.making.exception() is None:
                await entry.making.result().destroy()
        finally:
            self._forget(key, entry)

    # -- commands --------------------------------------------------------------------------------

    async def operate(
        self, key: str, number: int, work: Callable[[Sandbox], Awaitable[bytes]]
    ) -> bytes:
        """Do ``work`` in a sandbox as its operation ``number``, or wait for it where it runs.

        Raises:
            InfraError: no such sandbox, or the number's result is not kept any more.
            SkyrlError: whatever the work raises.
        """
        entry = self._entry(key)
        operation = entry.operations.get(number)
        if operation is None:
            operation = self._start(entry, number, work)
        operation.waiters += 1
        try:
            return await asyncio.shield(operation.task)
        except asyncio.CancelledError:
            if operation.task.cancelled():
                raise InfraError("the command was ended by its client", cause="cancelled") from None
            raise
        finally:
            operation.waiters -= 1
            if not operation.waiters and not operation.task.done():
                asyncio.get_running_loop().call_later(self._gone_s, _abandon, operation)

    def _entry(self, key: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise InfraError(
                f"sandbox {key[:8]} is not on this host: the host was started again, or its owner "
                f"was silent for {self.lease_s:g} s",
                cause=host_wire.UNKNOWN_SANDBOX,
            )
        return entry

    def _start(
        self, entry: _Entry, number: int, work: Callable[[Sandbox], Awaitable[bytes]]
    ) -> _Operation:
        if number in entry.seen:
            raise InfraError(
                f"operation {number} of a sandbox was done or ended before; its result is not kept",
                cause="lost_answer",
            )
        entry.seen.add(number)

        async def run() -> bytes:
            return await work(await asyncio.shield(entry.making))

        operation = _Operation(task=asyncio.create_task(run()))
        entry.operations[number] = operation

        def ended(task: asyncio.Task[bytes]) -> None:
            if not task.cancelled():
                task.exception()  # somebody has looked
            entry.finished.append(number)
            if len(entry.finished) > _KEPT:
                entry.operations.pop(entry.finished.popleft(), None)

        operation.task.add_done_callback(ended)
        return operation

    async def cancel(self, key: str, number: int) -> None:
        """End an operation and wait for its end; one that has not come yet never runs."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.seen.add(number)
        operation = entry.operations.get(number)
        if operation is not None and not operation.task.done():
            operation.task.cancel()
            await asyncio.wait({operation.task}, timeout=_REPLY_GRACE_S)


def _abandon(operation: _Operation) -> None:
    """End what nobody waits for."""
    if not operation.waiters:
        operation.task.cancel()


async def execute(box: Sandbox, header: dict[str, Any], body: bytes) -> bytes:
    """Run a command as a request says.

    Raises:
        DataError: the request lacks a field.
        InfraError: the provider did not keep the deadline.
    """
    try:
        command, timeout_s = header["command"], float(header["timeout_s"])
        options = {
            "cwd": header["cwd"],
            "env": header["env"],
            "max_output_bytes": int(header["max_output_bytes"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"a request for a command is wrong: {error!r}") from error
    with _deadline(f"a command with a limit of {timeout_s:g} s"):
        async with asyncio.timeout(timeout_s + _REPLY_GRACE_S):
            result = await box.exec(command, timeout_s=timeout_s, stdin=body, **options)
    return host_wire.result_to_message(result)


async def put(box: Sandbox, header: dict[str, Any], body: bytes) -> bytes:
    """Unpack a tar stream as a request says."""
    with _deadline("a put"):
        async with asyncio.timeout(_TREE_TIMEOUT_S):
            await box.put(str(header.get("path", "")), body)
    return host_wire.pack({})


async def get(box: Sandbox, header: dict[str, Any], body: bytes) -> bytes:
    """Return a tar stream as a request says."""
    with _deadline("a get"):
        async with asyncio.timeout(_TREE_TIMEOUT_S):
            tar = await box.get(str(header.get("path", "")), max_bytes=int(header["max_bytes"]))
    return host_wire.pack({}, tar)


async def ping(box: Sandbox, header: dict[str, Any], body: bytes) -> bytes:
    """Wait for a sign of life: the supervisor's, or a command's where the backend has no ping."""
    ask = getattr(box, "ping", None)
    with _deadline("a ping"):
        async with asyncio.timeout(_REPLY_GRACE_S):
            await (box.exec(["true"]) if ask is None else ask())
    return host_wire.pack({})


OPERATIONS = {"exec": execute, "put": put, "get": get, "ping": ping}


@contextlib.contextmanager
def _deadline(what: str) -> Any:
    try:
        yield
    except TimeoutError as error:
        raise InfraError(f"{what} did not end on the host", cause="supervisor") from error
