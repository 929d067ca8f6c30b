"""The engine's thread: the event loop hands it requests, it hands back results.

Only this thread touches the Engine. Everything it is asked goes through one inbox; answers return
by ``loop.call_soon_threadsafe``, one call a round.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from skyrl_jax.engine.engine import Engine, Request, Result


class EngineDeadError(RuntimeError):
    """The engine's thread has ended: no request will be answered any more."""


class RequestFailedError(RuntimeError):
    """The engine could not take this one request; the others go on."""


class Worker:
    """Run an Engine in a thread of its own; an async context manager.

    Args:
        engine: the engine; touched by no one else from now on.
        on_death: called on the event loop when the thread died of an exception.
    """

    def __init__(self, engine: Engine, on_death: Callable[[BaseException], None]) -> None:
        self._engine = engine
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[tuple[str, Any, asyncio.Future[Any] | None]]
        self._inbox = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._futures: dict[str, tuple[Request, asyncio.Future[Result]]] = {}
        self._actions: set[asyncio.Future[Any]] = set()
        self._cause: BaseException | None = None
        self._exclusive: deque[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = deque()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def __aenter__(self) -> Worker:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop the thread after its current round; what still runs is dropped."""
        self._inbox.put(("stop", None, None))
        await asyncio.to_thread(self._thread.join, 10.0)

    @property
    def alive(self) -> bool:
        """Whether the thread still serves."""
        return self._cause is None and self._thread.is_alive()

    @property
    def pending(self) -> int:
        """Requests that have no answer yet (queued or running)."""
        return len(self._futures)

    def live(self, rid: str) -> bool:
        """Whether a request of this rid has no answer yet."""
        return rid in self._futures

    async def generate(self, request: Request) -> Result:
        """Run one request to its end. Cancelling the call aborts the request.

        Raises:
            EngineDeadError: the thread has ended.
            RequestFailedError: the engine could not take the request.
        """
        self._check_alive()
        future: asyncio.Future[Result] = self._loop.create_future()
        self._futures[request.rid] = (request, future)
        self._inbox.put(("request", request, None))
        try:
            return await future
        except asyncio.CancelledError:
            self.abort(lambda rid: rid == request.rid)
            raise
        finally:
            del self._futures[request.rid]

    def abort(self, match: Callable[[str], bool]) -> None:
        """End every queued or running request whose rid matches; their calls answer at once."""
        self._inbox.put(("abort", match, None))

    async def when_idle(self, action: Callable[[Engine], Any]) -> Any:
        """Run ``action(engine)`` once nothing is running; requests that come later wait for it.

        Raises:
            EngineDeadError: the thread has ended.
        """
        self._check_alive()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._actions.add(future)
        future.add_done_callback(self._actions.discard)
        self._inbox.put(("exclusive", action, future))
        return await future

    def _check_alive(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(f"the engine died: {self._cause!r}")

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._die, error)
            raise

    def _die(self, error: BaseException) -> None:
        self._cause = error
        waiting = [future for _, future in self._futures.values()]
        for future in [*waiting, *self._actions]:
            _fail(future, EngineDeadError(f"the engine died: {error!r}"))
        self._on_death(error)

    def _round(self) -> bool:
        engine = self._engine
        ended: list[Result] = []
        if not self._read(ended):
            return False
        while self._exclusive and not engine.active:
            self._run_exclusive(*self._exclusive.popleft())
        while self._waiting and engine.free_slots and not self._exclusive and engine.loaded:
            self._admit(self._waiting.popleft())
        if engine.active:
            ended += engine.step()
        if ended:
            self._loop.call_soon_threadsafe(self._deliver, ended)
        return True

    def _admit(self, request: Request) -> None:
        try:
            self._engine.admit(request)
        except Exception as error:  # whatever is wrong with one request, the others go on
            self._loop.call_soon_threadsafe(self._refuse, request, error)

    def _refuse(self, request: Request, error: Exception) -> None:
        found, future = self._futures.get(request.rid, (None, None))
        if future is not None and found is request:
            text = f"the engine could not take request {request.rid!r}: {error!r}"
            _fail(future, RequestFailedError(text))

    def _read(self, ended: list[Result]) -> bool:
        """Take what the inbox holds; wait for the first item when there is nothing else to do."""
        idle = not (self._engine.active or self._exclusive)
        idle = idle and not (self._waiting and self._engine.loaded)
        while True:
            try:
                kind, item, future = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if kind == "stop":
                return False
            if kind == "request":
                self._waiting.append(item)
            elif kind == "abort":
                ended += self._abort(item)
            else:
                self._exclusive.append((item, future))

    def _abort(self, match: Callable[[str], bool]) -> list[Result]:
        queued = [request for request in self._waiting if match(request.rid)]
        self._waiting = deque(r for r in self._waiting if not match(r.rid))
        ended = [
            Result(
                request=request,
                token_ids=(),
                logprobs=(),
                finish="abort",
                version=self._engine.version,
                queued=True,
            )
            for request in queued
        ]
        return ended + self._engine.abort(match)

    def _run_exclusive(self, action: Callable[[Engine], Any], future: asyncio.Future[Any]) -> None:
        try:
            outcome: Any = action(self._engine)
        except Exception as error:
            self._loop.call_soon_threadsafe(_fail, future, error)
        else:
            self._loop.call_soon_threadsafe(_settle, future, outcome)

    def _deliver(self, results: list[Result]) -> None:
        for result in results:
            found, future = self._futures.get(result.request.rid, (None, None))
            # a rid may be in use again by the time the answer to its aborted request comes
            if future is not None and found is result.request:
                _settle(future, result)


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
