"""The warm pool: what is handed over, what is thrown away, what gives way, what is never lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest

from skyrl_jax.core.errors import CapacityError, HostError, ImageError, InfraError, SandboxGone
from skyrl_jax.core.protocols import Pinged, SandboxSpec, Warming
from skyrl_jax.sandbox.fake import FakeProvider, FakeSandbox, succeed
from skyrl_jax.sandbox.pool import WarmPool, spec_key
from tests.sandbox.conftest import Backend

A = SandboxSpec(image="a", env={"X": "1", "Y": "2"})
B = SandboxSpec(image="b")


class SlowProvider(FakeProvider):
    """A fake whose creates take a while, which has room for ``room``, and counts what goes on."""

    def __init__(
        self,
        *,
        seconds: float = 0.01,
        room: int = 1000,
        create_errors: Sequence[HostError | None] = (),
    ) -> None:
        super().__init__(succeed, create_errors=create_errors)
        self.seconds, self.room = seconds, room
        self.under_way = self.most = 0

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        if self.live >= self.room:
            raise CapacityError("full")
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
            return await super().create(spec)
        finally:
            self.under_way -= 1


async def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def opened(inner: Any, **settings: Any) -> AsyncIterator[WarmPool]:
    """A pool; at the end nothing of it is left."""
    async with WarmPool(inner, **{"size": 3, **settings}) as pool:
        yield pool
    assert inner.live == 0 and not pool._tasks


def play(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_the_key_is_the_whole_spec() -> None:
    same = dataclasses.replace(A, env={"Y": "2", "X": "1"})
    assert spec_key(A) == spec_key(same) and hash(spec_key(A)) == hash(spec_key(same))
    changes: dict[str, Any] = {
        "image": "c", "layers": ("/l",), "workdir": "/w", "cpus": 2.0, "memory_mb": 1, "pids": 1,
        "disk_mb": 1, "network": True, "env": {"X": "1"}, "lifetime_s": 1.0, "best_effort": True,
        "shared": "/s", "user": 2,
    }  # fmt: skip
    keys = [spec_key(dataclasses.replace(A, **{name: value})) for name, value in changes.items()]
    assert len({spec_key(A), *keys}) == len(changes) + 1


def test_expected_sandboxes_are_ready_and_each_is_used_once() -> None:
    async def run() -> None:
        inner = SlowProvider(seconds=0.05)
        async with opened(inner, size=3, creates=2) as pool:
            assert isinstance(pool, Warming)
            pool.prepare(A, 5)
            await until(lambda: pool.warm == 3)
            await asyncio.sleep(0.1)
            assert (pool.live, inner.most) == (3, 2)  # bounded: in number and at a time
            began = time.monotonic()
            first = await pool.create(A)
            assert time.monotonic() - began < 0.03
            boxes = [first, *[await pool.create(A) for _ in range(4)]]
            assert len({id(box) for box in boxes}) == 5 == len(inner.created)
            await first.destroy()
            await asyncio.sleep(0.1)
            assert pool.warm == 0 and len(inner.created) == 5  # no more were announced
            other = await pool.create(A)
            assert other not in boxes

    play(run())


def test_a_create_of_another_spec_gets_no_warm_one() -> None:
    async def run() -> None:
        inner = SlowProvider()
        async with opened(inner) as pool:
            pool.prepare(A, 1)
            await until(lambda: pool.warm == 1)
            box = await pool.create(dataclasses.replace(A, memory_mb=7))
            assert box is not inner.created[0] and box.spec.memory_mb == 7 and pool.warm == 1

    play(run())


def test_the_first_announced_come_first_and_what_is_called_off_goes() -> None:
    async def run() -> None:
        inner = SlowProvider()
        async with opened(inner, size=2, creates=1) as pool:
            pool.prepare(A, 2)
            pool.prepare(B, 2)
            await until(lambda: pool.warm == 2)
            assert [box.spec for box in inner.created] == [A, A]
            pool.prepare(A, 0)
            await until(lambda: [b.spec for b in inner.created if not b.destroyed] == [B, B])
            pool.prepare(B, 1)
            await until(lambda: pool.live == 1)
            pool.prepare(B, 0)
            await until(lambda: pool.live == 0 and not pool._shelves)
            with pytest.raises(ValueError, match="-1"):
                pool.prepare(A, -1)

    play(run())


def test_one_that_is_being_made_is_waited_for() -> None:
    async def run() -> None:
        inner = SlowProvider(seconds=0.2)
        async with opened(inner, creates=1) as pool:
            pool.prepare(A, 1)
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await pool.create(A)
            assert time.monotonic() - began < 0.18 and len(inner.created) == 1
            pool.prepare(A, 1)
            await asyncio.sleep(0.1)
            waiting = asyncio.ensure_future(pool.create(A))  # its user goes: it stays for the next
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: pool.warm == 1)
            assert await pool.create(A) is inner.created[1] and len(inner.created) == 2

    play(run())


def test_one_that_comes_as_its_user_goes_is_not_lost() -> None:
    async def run() -> None:
        inner = SlowProvider(seconds=0.05)
        async with opened(inner, creates=1) as pool:
            pool.prepare(A, 1)
            await asyncio.sleep(0.01)
            waiting = asyncio.ensure_future(pool.create(A))
            await until(lambda: bool(inner.created))  # given to the waiter, who has not run yet
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await waiting).destroy()
            assert pool.live == pool.warm

    play(run())


def test_ended_and_old_ones_are_thrown_away_and_replaced() -> None:
    class Pingable(FakeSandbox):
        async def ping(self) -> None:
            self._check()

    async def run() -> None:
        inner = SlowProvider()
        async with opened(inner, size=2) as pool:
            pool.prepare(A, 2)
            await until(lambda: pool.warm == 2)
            inner.created[0].destroyed = True  # somebody killed it: asked by a command
            inner.created[1].__class__ = Pingable  # asked without one
            assert isinstance(inner.created[1], Pinged) and not isinstance(inner.created[0], Pinged)
            assert await pool.create(A) is inner.created[1]
            assert inner.created[1].commands == []
            assert await pool.create(A) is inner.created[2]  # one was still expected
        inner = SlowProvider()
        async with opened(inner, size=1, idle_s=0.1) as pool:
            pool.prepare(A, 1)
            await until(lambda: len(inner.created) >= 3)
            assert inner.live <= 2 and inner.created[0].destroyed
        inner = SlowProvider()
        async with opened(inner, size=1) as pool:
            pool.prepare(dataclasses.replace(A, lifetime_s=1.0), 1)
            await until(lambda: len(inner.created) >= 2)  # a tenth of the lifetime

    play(run())


def test_warm_ones_give_way_where_there_is_no_room() -> None:
    async def run() -> None:
        inner = SlowProvider(room=3)
        async with opened(inner, size=3, retry_s=0.05) as pool:
            pool.prepare(A, 2)
            pool.prepare(B, 1)
            await until(lambda: pool.warm == 3)
            other = await pool.create(SandboxSpec(image="other"))
            gone = [box.spec for box in inner.created if box.destroyed]
            assert gone == [B] and pool.live == 3  # the last announced
            kept = [await pool.create(A), await pool.create(A)]
            with pytest.raises(CapacityError):
                await pool.create(B)
            await kept[0].destroy()
            await until(lambda: pool.warm == 1)  # there is room again: made in advance again
            assert await pool.create(B) is not other

    play(run())


def test_the_first_error_of_the_background_reaches_the_next_create_of_its_spec() -> None:
    async def run() -> None:
        inner = SlowProvider(create_errors=[ImageError("no such image a")])
        async with opened(inner, creates=1) as pool:
            pool.prepare(A, 1)
            await until(lambda: not inner._errors)
            await asyncio.sleep(0.05)
            assert inner.created == []  # not tried again and again
            await pool.create(B)  # another spec is not to blame
            with pytest.raises(ImageError, match="no such image a"):
                await pool.create(A)
            await until(lambda: pool.warm == 1)  # told once, then tried again
            await pool.create(A)
        inner = SlowProvider(create_errors=[InfraError("first"), InfraError("second")])
        with pytest.warns(UserWarning, match="nobody asked for it since: InfraError: first"):
            async with opened(inner, creates=2) as pool:
                pool.prepare(A, 2)
                await until(lambda: not inner._errors)
                await asyncio.sleep(0.05)

    play(run())


def test_an_error_reaches_the_one_who_waits() -> None:
    async def run() -> None:
        inner = SlowProvider(seconds=0.05, create_errors=[InfraError("broken")])
        async with opened(inner, creates=1) as pool:
            pool.prepare(A, 1)
            await asyncio.sleep(0.01)
            with pytest.raises(InfraError, match="broken"):
                await pool.create(A)
            await pool.create(A)

    play(run())


def test_a_failing_destroy_in_the_background_is_raised_by_the_next_create() -> None:
    async def run() -> None:
        inner = SlowProvider()
        pool = WarmPool(inner, size=1)
        async with pool:
            pool.prepare(A, 1)
            await until(lambda: pool.warm == 1)
            box = inner.created[0]

            async def refuse() -> None:
                if box.destroyed:
                    return
                box.destroyed = True
                raise InfraError("it will not end")

            box.destroy = refuse  # type: ignore[method-assign]
            pool.prepare(A, 0)
            await until(lambda: pool._error is not None)
            with pytest.raises(InfraError, match="will not end"):
                await pool.create(B)
            await pool.create(B)

    play(run())


def test_closing_ends_everything_and_what_comes_after_is_refused() -> None:
    async def run() -> None:
        inner = SlowProvider(seconds=0.3)
        async with opened(inner, size=4, creates=2) as pool:
            pool.prepare(A, 4)
            await until(lambda: inner.under_way == 2)
            waiting = asyncio.ensure_future(pool.create(A))
            await asyncio.sleep(0.01)
        with pytest.raises(InfraError, match="closed"):
            await waiting
        with pytest.raises(InfraError, match="not open"):
            await pool.create(A)
        with pytest.raises(InfraError, match="not open"):
            pool.prepare(A, 1)

    play(run())


def test_sizes_that_make_no_sense_are_refused() -> None:
    for size, creates in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="1 or more"):
            WarmPool(FakeProvider(), size=size, creates=creates)


@pytest.mark.xdist_group("sandbox")
def test_a_pool_of_every_backend(backend: Backend) -> None:
    async def run() -> None:
        async with WarmPool(backend.make(), size=2) as pool:
            pool.prepare(backend.spec(), 3)
            await until(lambda: pool.warm == 2, 30)
            boxes = [await pool.create(backend.spec()) for _ in range(3)]
            assert all(isinstance(box, Pinged) for box in boxes)
            await boxes[0].exec("echo mine > a.txt")
            assert (await boxes[1].exec("cat a.txt")).output == "one\n"
            await boxes[0].destroy()
            with pytest.raises(SandboxGone):
                await boxes[0].ping()
            await boxes[1].ping()
            await boxes[1].ping()
            assert (await boxes[1].exec("echo after")).output == "after\n"
            for box in boxes[1:]:
                await box.destroy()
            assert pool.live == 0
        assert pool.live == 0

    asyncio.run(run())
