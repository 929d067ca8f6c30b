"""A real registry on loopback (the Debian package docker-registry), and a door in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from aiohttp import ClientSession, web

_CONFIG = """version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def free_port() -> int:
    """Return a port that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_registry(folder: Path) -> Iterator[str]:
    """Yield "127.0.0.1:PORT" of a registry that keeps its images in a folder."""
    port = free_port()
    config = folder / "registry.yml"
    config.write_text(_CONFIG.format(root=folder / "registry", port=port))
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=2).close()
                break
            assert process.poll() is None, (folder / "registry.log").read_text()
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


class Door:
    """A reverse proxy in front of a registry whose answers a test can change.

    Attributes:
        asked: "METHOD path" of every request.
        answer: called with the request before it is passed on; a response that it returns is the
            answer.
    """

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self.asked: list[str] = []
        self.answer: Callable[[web.Request], web.Response | None] = lambda request: None
        self.address = ""

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        changed = self.answer(request)
        if changed is not None:
            return changed
        headers = {k: v for k, v in request.headers.items() if k.lower() != "host"}
        url = f"http://{self._registry}{request.path_qs}"
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(request.method, url, headers=headers) as found,
        ):
            kept = {
                k: v
                for k, v in found.headers.items()
                if k.lower() not in ("transfer-encoding", "connection")
            }
            if request.method == "HEAD":
                return web.Response(status=found.status, headers=kept)
            kept.pop("Content-Length", None)
            return web.Response(status=found.status, headers=kept, body=await found.read())

    @contextlib.contextmanager
    def open(self) -> Iterator[Door]:
        """Serve in a thread of its own."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        async def begin() -> web.AppRunner:
            app = web.Application()
            app.router.add_route("*", "/{rest:.*}", self._pass)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.address = f"127.0.0.1:{runner.addresses[0][1]}"
            return runner

        runner = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()
