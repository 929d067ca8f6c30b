"""A process that owns sandboxes and is killed: run as a script by test_owner_death.

Arguments: backend, image, cache directory, layer, docker host. Prints one line when the sandboxes
run their commands, then waits.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.process import ProcessProvider
from skyrl_jax.sandbox.remote import RemoteProvider
from tests.sandbox.hosts import TOKEN


async def own(backend: str, image: str, cache: str, layer: str, host: str) -> None:
    providers = {
        "bwrap": lambda: BwrapProvider(run_id="owner", cache_dir=Path(cache)),
        "docker": lambda: DockerProvider(run_id="owner", cache_dir=Path(cache), host=host),
        "remote": lambda: RemoteProvider(host, token=TOKEN),
        "process": lambda: ProcessProvider(run_id="owner", cache_dir=Path(cache)),
    }
    spec = SandboxSpec(image=image, layers=(layer,), workdir="/testbed", best_effort=True)
    async with providers[backend]() as provider:
        boxes = [await provider.create(spec) for _ in range(3)]
        command = f"setsid sleep 87651.{os.getpid()} & sleep 87652.{os.getpid()}"
        running = [asyncio.ensure_future(box.exec(command)) for box in boxes]
        await asyncio.sleep(0.3)
        print("running", flush=True)
        await asyncio.wait(running, timeout=120)


if __name__ == "__main__":
    asyncio.run(own(*sys.argv[1:6]))
