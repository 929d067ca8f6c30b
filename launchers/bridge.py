"""Carry weight versions from a store to generation servers, as its own process.

python launchers/bridge.py --store=RUN/weights --server=http://host:30000 --scratch=/local/hf

It serves the newest complete version now and every newer one as it appears, until SIGTERM. With
--once it ends after the first. Runs on CPU only, beside the servers; the learner does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

# a bridge host may have an accelerator that belongs to somebody else
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from launchers.common import run_main
from skyrl_jax.core.errors import ConfigError

_STORE = flags.DEFINE_string("store", None, "folder of published versions", required=True)
_SERVERS = flags.DEFINE_multi_string("server", [], "base URL of a server; repeat for several")
_SCRATCH = flags.DEFINE_string(
    "scratch", None, "folder on a disk the servers can read, for HF exports", required=True
)
_POLL_S = flags.DEFINE_float("poll_s", 1.0, "seconds between looks at the store")
_ONCE = flags.DEFINE_boolean("once", False, "end after one version was acknowledged")


async def _run() -> None:
    import jax

    from skyrl_jax.generation.sglang import SGLangGenerator
    from skyrl_jax.sync.bridge import Bridge
    from skyrl_jax.weights.store import FolderStore

    if jax.default_backend() != "cpu":
        raise ConfigError(f"the bridge runs on CPU only, jax found {jax.default_backend()!r}")
    if not _SERVERS.value:
        raise ConfigError("--server is missing; name at least one base URL")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    store = FolderStore(_STORE.value)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(SGLangGenerator(url, gate_open=False))
            for url in _SERVERS.value
        ]
        bridge = await stack.enter_async_context(Bridge(store, clients, _SCRATCH.value))
        while not stop.is_set():
            version = store.latest()
            if version is not None and version.number != bridge.acknowledged:
                seconds = await bridge.update(version)
                total = sum(seconds.values())
                print(f"version {version.number} is served ({total:.2f} s)", flush=True)
                if _ONCE.value:
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S.value):
                    await stop.wait()


def main(argv: list[str]) -> int:
    """Run the bridge."""
    del argv
    asyncio.run(_run())
    return 0


if __name__ == "__main__":
    run_main(main)
