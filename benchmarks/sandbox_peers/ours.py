"""Our side: a provider, and on request a warm pool around it.

{"do": "pooled", "concurrency": c, "seconds": s}  {"cycles": n, "seconds": s}
    cycles whose sandboxes come from a pool; it is full when the time begins and is full again
    when the time ends, so that what it had made before is paid for
{"do": "paced", "rate": r, "seconds": s}          {"first": [ms], "made": n}
    an arrival every 1/r seconds takes a sandbox and runs ``true``: milliseconds to its result
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import side

from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.docker_daemon import DockerOptions
from skyrl_jax.sandbox.pool import WarmPool
from skyrl_jax.sandbox.process import ProcessProvider

MANY = 1_000_000  # announced: the pool never stops to make more


def _provider(job: Mapping[str, Any]) -> Any:
    cache = Path(job["cache"])
    if job["backend"] == "docker":
        options = DockerOptions(connections=side.THREADS)
        return DockerProvider(run_id="bench", cache_dir=cache, host=job["host"], options=options)
    kind = {"bwrap": BwrapProvider, "process": ProcessProvider}[job["backend"]]
    return kind(run_id="bench", cache_dir=cache)


async def _run(box: Any) -> None:
    done = await box.exec(["true"])
    if done.returncode:
        raise RuntimeError(f"true failed: {done}")


async def _destroy(box: Any) -> None:
    await box.destroy()


async def _ping(box: Any) -> None:
    await box.ping()


class _Pooled:
    """Requests that go through a pool; each opens its own, over the same provider."""

    def __init__(self, provider: Any, spec: SandboxSpec, size: int, creates: int) -> None:
        self.provider, self.spec, self.size, self.creates = provider, spec, size, creates

    async def _open(self) -> WarmPool:
        pool = WarmPool(_Left(self.provider), size=self.size, creates=self.creates)
        await pool.__aenter__()
        pool.prepare(self.spec, MANY)
        await self._full(pool)
        return pool

    async def _full(self, pool: WarmPool) -> None:
        async with asyncio.timeout(120):
            while pool.warm < self.size:
                await asyncio.sleep(0.005)

    async def pooled(self, request: Mapping[str, Any]) -> dict[str, Any]:
        pool = await self._open()

        async def create() -> Any:
            return await pool.create(self.spec)

        try:
            began = time.perf_counter()
            found = await side.cycles(
                side.Side(create, _run, _destroy), request["concurrency"], request["seconds"]
            )
            await self._full(pool)
            return {"cycles": found["cycles"], "seconds": time.perf_counter() - began}
        finally:
            await pool.__aexit__(None, None, None)

    async def paced(self, request: Mapping[str, Any]) -> dict[str, Any]:
        pool = await self._open()
        first: list[float] = []

        async def arrival() -> None:
            began = time.perf_counter()
            box = await pool.create(self.spec)
            await _run(box)
            first.append((time.perf_counter() - began) * 1e3)
            for _ in range(side.EXECS - 1):
                await _run(box)
            await box.destroy()

        try:
            began, arrivals = time.perf_counter(), []
            while time.perf_counter() < began + request["seconds"]:
                arrivals.append(asyncio.ensure_future(arrival()))
                await asyncio.sleep(
                    max(0.0, began + len(arrivals) / request["rate"] - time.perf_counter())
                )
            await asyncio.gather(*arrivals)
            return {"first": first}
        finally:
            await pool.__aexit__(None, None, None)


class _Left:
    """A provider that stays open when the pool around it is left."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self.create = provider.create
        self.program_uid = None

    @property
    def live(self) -> int:
        return int(self._provider.live)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass


async def prepare(job: Mapping[str, Any]) -> side.Side:
    """Open the provider."""
    provider = _provider(job)
    await provider.__aenter__()
    spec = SandboxSpec(
        image=job["image"],
        cpus=job["cpus"],
        memory_mb=job["memory_mb"],
        pids=job["pids"],
        disk_mb=64,
        best_effort=True,
    )
    pooled = _Pooled(provider, spec, job["pool"], job["creates"])

    async def create() -> Any:
        return await provider.create(spec)

    async def close() -> None:
        await provider.__aexit__(None, None, None)

    return side.Side(
        create,
        _run,
        _destroy,
        ping=_ping,
        more={"pooled": pooled.pooled, "paced": pooled.paced},
        close=close,
        about=f"skyrl_jax, {job['backend']}",
    )


if __name__ == "__main__":
    side.serve(prepare)
