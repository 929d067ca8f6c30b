"""A gateway in a thread of its own, for clients that block."""

import asyncio
import contextlib
import dataclasses
import threading
import time

from tests.gateway.world import SAMPLING, Budget, gateway


class Door:
    """An open session: ``url``, ``root``, ``key``; ``close()`` returns its record."""

    def __init__(self, loop, session):
        self._loop, self._session = loop, session
        self.url, self.root, self.key = session.url, session.root, session.key

    def close(self):
        return asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(20)


@contextlib.contextmanager
def door(generator, *, budget=None, **kwargs):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    gate = gateway(generator, **kwargs)

    async def begin():
        await gate.__aenter__()
        sampling = dataclasses.replace(SAMPLING, max_new_tokens=1 << 17)
        return await gate.open("task/0", sampling=sampling, budget=budget or Budget())

    try:
        yield Door(loop, wait(begin()))
    finally:
        wait(gate.__aexit__())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def until(true, seconds=20.0):
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
