"""One server process: flags -> engine -> HTTP, until SIGTERM or the parent's death."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import ConfigError, SkyrlError

_PR_SET_PDEATHSIG = 1
_SHUTDOWN_S = 1.0  # for what runs; then it is cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to serve (launchers/serve.py documents each as a flag)."""

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    port_file: str = ""
    slots: int = 64
    max_context: int = 512
    prefill_rows: int = 4
    prefill_chunk: int = 32
    decode_steps: int = 8
    weight_version: str = "default"
    wait_for_weights: bool = False
    threads: int = 0
    parent_pid: int = 0  # whoever starts the server says who it is; 0 = whoever that is at start


def run_server(options: ServeOptions) -> int:
    """Serve until told to end; return the exit code.

    Raises:
        ConfigError: the port is in use, the model folder is wrong, or ``parent_pid`` is not (or no
            longer) this process's parent.
    """
    parent = options.parent_pid or os.getppid()
    die_with_parent()
    if os.getppid() != parent:  # it died before the kernel was told: no signal will come
        raise ConfigError(f"--parent_pid={parent} is not the parent of this server: it has ended")
    limit_threads(options.threads)
    listener = _listen(options.host, options.port)
    import uvloop

    try:
        return uvloop.run(_serve(options, listener, parent))
    finally:
        listener.close()


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies (Linux; a poll backs it up)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_threads(threads: int) -> None:
    """Bound the threads of XLA's CPU programs (0 = all cores). Call before jax is imported."""
    if threads <= 0:
        return
    os.environ["NPROC"] = str(threads)  # XLA sizes its thread pools by it
    if threads == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port "
            "(0 = any free one)"
        ) from None
    return listener


async def _serve(options: ServeOptions, listener: socket.socket, parent: int) -> int:
    from aiohttp import web

    from skyrl_jax.serve.worker import Worker

    stop = asyncio.Event()
    failure: list[BaseException] = []

    def died(error: BaseException) -> None:
        failure.append(error)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    port = listener.getsockname()[1]
    engine, build = _build(options, port)
    async with Worker(engine, died) as worker:
        runner = web.AppRunner(
            build(worker).application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await runner.setup()
        await web.SockSite(runner, listener).start()
        _announce(options, port)
        await _until(stop, parent)
        async with asyncio.timeout(10.0):
            await runner.cleanup()
    if failure:
        print(f"error: the engine died: {failure[0]!r}", file=sys.stderr, flush=True)
        return 1
    return 0


def _build(options: ServeOptions, port: int) -> tuple[Any, Any]:
    """Make the engine, and a function that makes the handlers once there is a worker."""
    from skyrl_jax.engine.engine import Engine, EngineShape
    from skyrl_jax.models import hf
    from skyrl_jax.serve import weights
    from skyrl_jax.serve.app import Server, server_version
    from skyrl_jax.serve.requests import Limits

    folder = Path(options.model)
    cfg = hf.load_config(folder)
    shape = EngineShape(
        slots=options.slots,
        max_context=options.max_context,
        prefill_rows=options.prefill_rows,
        prefill_chunk=options.prefill_chunk,
        decode_steps=options.decode_steps,
    )
    # Before the engine takes its cache: a folder that is wrong costs no device memory.
    params = None if options.wait_for_weights else weights.read_weights(folder, cfg)
    engine = Engine(cfg, shape, params, options.weight_version)
    del params  # the engine has its own
    started = time.monotonic()
    engine.warm_up(weights.random_params(cfg))
    limits = Limits(
        vocab_size=cfg.vocab_size,
        max_context=options.max_context,
        eos_ids=weights.eos_ids(folder),
    )
    info = {
        "version": server_version(),
        "host": options.host,
        "port": port,
        "slots": options.slots,
        "decode_steps": options.decode_steps,
        "compile_s": round(time.monotonic() - started, 3),
        "page_counts": engine.page_counts,
        "skip_tokenizer_init": True,
    }

    def build(worker: Any) -> Server:
        return Server(
            worker,
            cfg,
            limits,
            model_path=options.model,
            version=engine.version if engine.loaded else "none",
            load_weights=weights.read_weights,
            info=info,
        )

    return engine, build


def _announce(options: ServeOptions, port: int) -> None:
    if options.port_file:
        target = Path(options.port_file)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(str(port))
        partial.replace(target)
    print(f"serving {options.model} at http://{options.host}:{port}", flush=True)


async def _until(stop: asyncio.Event, parent: int) -> None:
    """Wait for a signal or for the parent's death, whichever comes first."""
    while not stop.is_set():
        if os.getppid() != parent:
            return
        try:
            async with asyncio.timeout(0.5):
                await stop.wait()
        except TimeoutError:
            continue


def main(options: ServeOptions) -> int:
    """Run a server; expected failures become one line on stderr and exit code 2."""
    try:
        return run_server(options)
    except SkyrlError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":  # serve/child.py starts this with the options as JSON
    sys.exit(main(ServeOptions(**json.loads(sys.argv[1]))))
