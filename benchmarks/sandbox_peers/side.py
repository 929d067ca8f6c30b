"""One side of the sandbox benchmark: makes, uses and destroys sandboxes when told to.

A side is a script that calls ``serve``; benchmarks/sandbox.py starts it with the job as JSON in its
first argument. It answers one JSON line to each request on its standard input:

    (once ready)                                      {"about": text}
    {"do": "latency", "cycles": n, "execs": m}        {"create": [ms], "exec": [ms],
                                                      "destroy": [ms], "roundtrip": [ms]}
    {"do": "cycles", "concurrency": c, "seconds": s}  {"cycles": n, "seconds": s}
    {"do": "end"}                                     {}

A cycle is create, three commands ``true``, destroy; ``seconds`` ends with the last one begun in
time. Functions that block run in threads; what is timed is the call itself, not the way to it.
Standard library only: each side has an interpreter of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

EXECS = 3  # commands of a cycle
THREADS = 40


class Side:
    """What a side can do; functions may be plain or async. ``ping``: an answer without a process.

    Args:
        create: returns a sandbox.
        run: runs ``true`` in it; raises when that fails.
        destroy: ends it; returns when it is gone.
        ping: optional.
        more: {request name: async function of the request}.
        close: called at the end.
        about: versions and settings, for the reader.
    """

    def __init__(
        self,
        create: Callable[[], Any],
        run: Callable[[Any], Any],
        destroy: Callable[[Any], Any],
        *,
        ping: Callable[[Any], Any] | None = None,
        more: Mapping[str, Callable[[Mapping[str, Any]], Any]] | None = None,
        close: Callable[[], Any] | None = None,
        about: str = "",
    ) -> None:
        """Keep the functions."""
        self.create, self.run, self.destroy, self.ping = create, run, destroy, ping
        self.more, self.close, self.about = dict(more or {}), close, about


def serve(prepare: Callable[[Mapping[str, Any]], Any]) -> None:
    """Answer requests until the input ends; ``prepare`` gets the job and returns a Side."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints goes to the log, never among the answers
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    asyncio.set_event_loop(loop)

    async def opened() -> Side:
        side = prepare(json.loads(sys.argv[1]))
        return await side if inspect.isawaitable(side) else side

    side = loop.run_until_complete(opened())
    answers.write(json.dumps({"about": side.about}) + "\n")
    for line in sys.stdin:
        answer = loop.run_until_complete(_answer(side, json.loads(line)))
        answers.write(json.dumps(answer) + "\n")


async def _answer(side: Side, request: Mapping[str, Any]) -> dict[str, Any]:
    if request["do"] == "latency":
        return await _latency(side, request["cycles"], request["execs"])
    if request["do"] == "cycles":
        return await cycles(side, request["concurrency"], request["seconds"])
    if request["do"] == "end":
        if side.close is not None:
            await timed(side.close)
        return {}
    if request["do"] in side.more:
        return await side.more[request["do"]](request)
    raise ValueError(f"no such request: {dict(request)}")


async def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Call a function; return its result and the milliseconds it took."""
    if inspect.iscoroutinefunction(function):
        began = time.perf_counter()
        result = await function(*args)
        return result, (time.perf_counter() - began) * 1e3

    def call() -> tuple[Any, float]:
        began = time.perf_counter()
        result = function(*args)
        return result, (time.perf_counter() - began) * 1e3

    return await asyncio.get_running_loop().run_in_executor(None, call)


async def _latency(side: Side, count: int, execs: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"create": [], "exec": [], "destroy": [], "roundtrip": []}
    for _ in range(count):
        box, took = await timed(side.create)
        found["create"].append(took)
        for _ in range(execs):
            found["exec"].append((await timed(side.run, box))[1])
            if side.ping is not None:
                found["roundtrip"].append((await timed(side.ping, box))[1])
        found["destroy"].append((await timed(side.destroy, box))[1])
    return found


async def cycles(side: Side, concurrency: int, seconds: float) -> dict[str, Any]:
    """Let ``concurrency`` workers do cycles; none begins one after ``seconds``."""
    began = time.perf_counter()
    done = 0

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < began + seconds:
            box, _ = await timed(side.create)
            for _ in range(EXECS):
                await timed(side.run, box)
            await timed(side.destroy, box)
            done += 1

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return {"cycles": done, "seconds": time.perf_counter() - began}
