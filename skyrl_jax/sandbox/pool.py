"""A warm pool: sandboxes that are expected soon are made before anybody waits for them.

``WarmPool`` is a SandboxProvider around another one. ``prepare(spec, count)`` says how many creates
of a spec are still to come; in the background the pool makes up to ``size`` of those in advance,
the first announced ones first, ``creates`` at a time. ``create`` hands a warm one over when there
is one, waits for one that is being made, or makes one itself. What holds:

- a sandbox is handed over once: what its user had is destroyed, never used again;
- the key is the whole spec: a warm sandbox fits only a create with an equal one;
- a warm one is asked for a sign of life as it is handed over; one that has ended, or has waited
  longer than ``idle_s`` or a tenth of its lifetime, is thrown away and made anew;
- where the host has no room for a create, warm ones of the last announced specs give way;
- an error of the background is not lost: the first of a spec is raised by the next create of that
  spec, the first of a destroy by the next create of any; what nobody met is said at the end.

Warm sandboxes are live: they count in ``live`` and hold memory beside ``rollout.live_sandboxes``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import warnings
from collections import deque
from collections.abc import Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from skyrl_jax.core.errors import CapacityError, InfraError, SkyrlError
from skyrl_jax.core.protocols import Pinged, Sandbox, SandboxProvider, SandboxSpec

_PING_TIMEOUT_S = 10.0
_LIFETIME_SHARE = 0.1  # a user gets at least 0.9 of the lifetime that the spec gives


class OpenProvider(SandboxProvider, AbstractAsyncContextManager[Any], Protocol):
    """A provider that is entered and left, as those of this package are."""

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        ...

    @property
    def program_uid(self) -> int | None:
        """Host uid of processes in sandboxes with ``user=2``."""
        ...


def spec_key(spec: SandboxSpec) -> Hashable:
    """Return a value that is equal for equal specs and can be looked up (``env`` is a mapping)."""
    values = (getattr(spec, item.name) for item in dataclasses.fields(spec))
    return tuple(tuple(sorted(v.items())) if isinstance(v, Mapping) else v for v in values)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Shelf:
    """All about one spec: what is expected, what stands ready, what is being made, who waits."""

    spec: SandboxSpec
    expected: int = 0  # creates that were announced and have not come
    taking: int = 0  # creates under way
    filling: int = 0
    ready: deque[tuple[Sandbox, float]] = dataclasses.field(default_factory=deque)
    waiters: deque[asyncio.Future[Sandbox | None]] = dataclasses.field(default_factory=deque)
    error: Exception | None = None

    @property
    def stock(self) -> int:
        """Return the warm ones: ready, or being made and promised to nobody."""
        return len(self.ready) + max(0, self.filling - len(self.waiters))

    @property
    def missing(self) -> int:
        """Return how many more are expected than there are (negative: too many)."""
        return max(0, self.expected - self.taking) - self.stock

    @property
    def idle(self) -> bool:
        """Say whether nothing is known about the spec any more."""
        return not (self.expected or self.taking or self.filling or self.ready or self.error)


class WarmPool:
    """Makes expected sandboxes in advance; module docstring. Use as an async context manager.

    Args:
        inner: makes the sandboxes; entered and left with the pool.
        size: warm sandboxes at a time, those being made included.
        creates: background creates at a time.
        idle_s: a warm sandbox is thrown away after this many seconds.
        retry_s: after the host had no room the background waits this long.
    """

    def __init__(
        self,
        inner: OpenProvider,
        *,
        size: int,
        creates: int = 2,
        idle_s: float = 300.0,
        retry_s: float = 1.0,
    ) -> None:
        """Keep the settings; nothing is started."""
        if size < 1 or creates < 1:
            raise ValueError(f"size is {size}, creates {creates}: a warm pool needs 1 or more")
        self.inner = inner
        self._size = size
        self._creates = creates
        self._idle_s = idle_s
        self._retry_s = retry_s
        self._shelves: dict[Hashable, _Shelf] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._paused_until = 0.0
        self._error: Exception | None = None  # the first of a destroy in the background
        self._keeper: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet, warm ones included."""
        return self.inner.live

    @property
    def program_uid(self) -> int | None:
        """Host uid of processes in sandboxes with ``user=2``; ``None``: no second uid."""
        return self.inner.program_uid

    @property
    def warm(self) -> int:
        """Number of warm sandboxes that stand ready."""
        return sum(len(shelf.ready) for shelf in self._shelves.values())

    async def __aenter__(self) -> Self:
        """Enter the provider and begin to look after the pool."""
        await self.inner.__aenter__()
        self._keeper = asyncio.create_task(self._keep(), name="warm-pool")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the background, destroy every sandbox; the first failure is raised at the end."""
        keeper, self._keeper = self._keeper, None
        try:
            await self._close(keeper)
        finally:
            await self.inner.__aexit__(exc_type, exc, traceback)
        for shelf in self._shelves.values():
            if shelf.error is not None:
                warnings.warn(
                    f"a sandbox could not be made in advance and nobody asked for it since: "
                    f"{type(shelf.error).__name__}: {shelf.error}",
                    stacklevel=2,
                )
        if self._error is not None:
            raise self._error

    async def _close(self, keeper: asyncio.Task[None] | None) -> None:
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
        for shelf in self._shelves.values():
            shelf.expected = 0
            for waiter in shelf.waiters:
                if not waiter.done():
                    waiter.set_exception(InfraError("the warm pool is closed", cause="closed"))
            while shelf.ready:
                self._discard(shelf.ready.popleft()[0])
        for task in self._tasks:
            if task.get_name() == "warm-fill":
                task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if keeper is not None and not keeper.cancelled() and keeper.exception() is not None:
            raise keeper.exception() or AssertionError

    def prepare(self, spec: SandboxSpec, count: int) -> None:
        """Say that ``count`` more creates of ``spec`` are to come (0: none); returns at once.

        A later call of the same spec replaces the count. Each create takes one off it.

        Raises:
            ValueError: ``count`` is negative.
            InfraError: the pool is not open.
        """
        if count < 0:
            raise ValueError(f"cannot prepare {count} sandboxes")
        if self._keeper is None:
            raise InfraError("the warm pool is not open", cause="closed")
        key = spec_key(spec)
        if count or key in self._shelves:
            self._shelves.setdefault(key, _Shelf(spec=spec)).expected = count
            self._wake.set()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Hand a warm sandbox over, or start one.

        Raises:
            CapacityError, ImageError, InfraError: what the provider said, now or in the background.
        """
        if self._keeper is None or self._keeper.done():
            raise InfraError("the warm pool is not open", cause="closed")
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        shelf = self._shelves.get(spec_key(spec))
        if shelf is None:
            return await self._direct(spec)
        if shelf.error is not None:
            error, shelf.error = shelf.error, None
            self._wake.set()
            raise error
        shelf.taking += 1
        try:
            box = await self._take(shelf)
            shelf.expected = max(0, shelf.expected - 1)
            return box
        finally:
            shelf.taking -= 1
            self._wake.set()

    async def _take(self, shelf: _Shelf) -> Sandbox:
        while shelf.ready:
            box, made = shelf.ready.popleft()
            if await self._lives(box, made, shelf.spec):
                return box
        if shelf.filling > len(shelf.waiters):
            box_or_none = await self._claim(shelf)
            if box_or_none is not None:
                return box_or_none
        return await self._direct(shelf.spec)

    async def _lives(self, box: Sandbox, made: float, spec: SandboxSpec) -> bool:
        """Ask a warm sandbox for a sign of life; throw it away when it gives none."""
        if self._too_old(made, spec):
            self._discard(box)
            return False
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await (box.ping() if isinstance(box, Pinged) else box.exec(["true"]))
        except (SkyrlError, TimeoutError):
            self._discard(box)
            return False
        except BaseException:
            self._discard(box)
            raise
        return True

    def _too_old(self, made: float, spec: SandboxSpec) -> bool:
        return asyncio.get_running_loop().time() > self._until(made, spec)

    def _until(self, made: float, spec: SandboxSpec) -> float:
        return made + min(self._idle_s, _LIFETIME_SHARE * spec.lifetime_s)

    async def _claim(self, shelf: _Shelf) -> Sandbox | None:
        """Wait for one that is being made; ``None``: there was no room for it."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Sandbox | None] = loop.create_future()
        shelf.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in shelf.waiters:
                shelf.waiters.remove(waiter)
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                box = waiter.result()  # it came as its user went: for the next one
                if box is not None:
                    self._shelve(shelf, box)
            raise

    async def _direct(self, spec: SandboxSpec) -> Sandbox:
        """Make one for a user who waits; warm ones give way where there is no room."""
        while True:
            try:
                return await self.inner.create(spec)
            except CapacityError:
                self._paused_until = asyncio.get_running_loop().time() + self._retry_s
                if not await self._give_way():
                    raise

    async def _give_way(self) -> bool:
        """Destroy a warm one of the last announced spec; say whether there was one."""
        for shelf in reversed(self._shelves.values()):
            if shelf.ready:
                ending = self._discard(shelf.ready.pop()[0])
                await asyncio.wait({ending})  # not cancelled with us: it ends either way
                return True
        return False

    def _discard(self, box: Sandbox) -> asyncio.Task[None]:
        return self._start(self._destroy(box), "warm-end")

    async def _destroy(self, box: Sandbox) -> None:
        try:
            await box.destroy()
        except Exception as error:
            self._error = self._error or error

    def _start(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self) -> None:
        """Look after the pool: throw away, make anew, sleep until something changes."""
        while True:
            self._wake.clear()
            self._trim()
            self._fill_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._next_change()):
                    await self._wake.wait()

    def _trim(self) -> None:
        for key, shelf in list(self._shelves.items()):
            while shelf.ready and self._too_old(shelf.ready[0][1], shelf.spec):
                self._discard(shelf.ready.popleft()[0])
            while shelf.ready and shelf.missing < 0:
                self._discard(shelf.ready.popleft()[0])
            if shelf.idle:
                del self._shelves[key]

    def _fill_up(self) -> None:
        if self._now() < self._paused_until:
            return
        for shelf in self._shelves.values():
            while shelf.error is None and shelf.missing > 0 and self._has_room():
                shelf.filling += 1
                self._start(self._fill(shelf), "warm-fill")

    def _has_room(self) -> bool:
        shelves = self._shelves.values()
        under_way = sum(shelf.filling for shelf in shelves)
        return under_way < self._creates and sum(s.stock for s in shelves) < self._size

    def _next_change(self) -> float | None:
        now = self._now()
        times = [self._until(s.ready[0][1], s.spec) for s in self._shelves.values() if s.ready]
        if self._paused_until > now:
            times.append(self._paused_until)
        return max(0.001, min(times) - now + 0.001) if times else None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _fill(self, shelf: _Shelf) -> None:
        box: Sandbox | None = None
        error: Exception | None = None
        try:
            box = await self.inner.create(shelf.spec)
        except CapacityError:
            self._paused_until = self._now() + self._retry_s
        except Exception as caught:
            error = caught
        finally:
            shelf.filling -= 1
            self._wake.set()
        if box is not None:
            self._shelve(shelf, box)
            return
        waiter = self._next_waiter(shelf)
        if waiter is not None and error is not None:
            waiter.set_exception(error)
        elif waiter is not None:
            waiter.set_result(None)
        elif error is not None:
            shelf.error = shelf.error or error

    def _shelve(self, shelf: _Shelf, box: Sandbox) -> None:
        """Give a new sandbox to the one who waits longest, or keep it warm."""
        waiter = self._next_waiter(shelf)
        if waiter is not None:
            waiter.set_result(box)
        elif self._keeper is None:  # closing
            self._discard(box)
        else:
            shelf.ready.append((box, self._now()))
            self._wake.set()

    @staticmethod
    def _next_waiter(shelf: _Shelf) -> asyncio.Future[Sandbox | None] | None:
        while shelf.waiters:
            waiter = shelf.waiters.popleft()
            if not waiter.done():
                return waiter
        return None
