"""One sandbox host as a process: provider and HTTP server, until SIGTERM; then nothing is left."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from skyrl_jax.core.errors import ConfigError, ImageError
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.docker_daemon import DockerOptions
from skyrl_jax.sandbox.host import SandboxHost
from skyrl_jax.sandbox.host_layers import LayerStore
from skyrl_jax.sandbox.host_server import make_app
from skyrl_jax.sandbox.image_store import ImageOptions
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.sandbox.process import ProcessProvider

TOKEN_VARIABLE = "SKYRL_SANDBOX_TOKEN"
BACKENDS = ("bwrap", "docker", "process")
_SHUTDOWN_S = 1.0  # for requests under way; then they are cancelled
_LOCAL_IMAGES = {"docker": "skyrl-sandbox:latest", "process": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How to be a sandbox host (launchers/sandbox_host.py documents each as a flag)."""

    token: str = field(repr=False)
    backend: str = "bwrap"
    address: str = "127.0.0.1"
    port: int = 0
    capacity: int = 64
    creates: int = 8
    lease_s: float = 60.0
    cache_dir: Path = Path(".cache")
    images: Path | None = None  # bwrap: root filesystems by name
    layer_mb: int = 20_000
    docker: DockerOptions = field(default_factory=DockerOptions)
    docker_images: ImageOptions = field(default_factory=ImageOptions)


def read_token(file: str, variable: str = "") -> str:
    """Return the token of a file, or of the value of ``TOKEN_VARIABLE`` where no file is named.

    Raises:
        ConfigError: neither is there, the file is empty, or others may read it.
    """
    if not file:
        if variable.strip():
            return variable.strip()
        raise ConfigError(
            "a sandbox host and its clients need a token: write one into a file (umask 077; "
            "openssl rand -hex 32 > FILE) and name the file (sandbox_host --token_file, "
            f"sandbox.token_file), or set {TOKEN_VARIABLE}"
        )
    try:
        token = Path(file).read_text().strip()
        mode = stat.S_IMODE(os.stat(file).st_mode)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {file}: {error}") from None
    if mode & 0o077:
        raise ConfigError(f"the token file {file} has mode {mode:o}: others may read it; chmod 600")
    if not token or not token.isprintable():
        raise ConfigError(f"the token file {file} must hold one line of printable text")
    return token


@asynccontextmanager
async def open_host(options: HostOptions, run_id: str = "host") -> AsyncIterator[str]:
    """Serve sandboxes while the block runs; yields the URL.

    Raises:
        ConfigError: the port is in use, or an unknown backend.
        HostError: the backend does not work on this machine.
    """
    listener = _listen(options.address, options.port)
    try:
        async with AsyncExitStack() as stack:
            resolve = await asyncio.to_thread(_images, options)
            provider = _provider(options, run_id)
            await stack.enter_async_context(provider)
            layers = LayerStore(options.layer_mb << 20)
            stack.callback(layers.close)
            host = SandboxHost(
                provider,
                layers,
                capacity=options.capacity,
                creates=options.creates,
                lease_s=options.lease_s,
                resolve_image=resolve,
            )
            await stack.enter_async_context(host)
            app = make_app(host, token=options.token, max_layer_bytes=options.layer_mb << 20)
            runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.SockSite(runner, listener, backlog=4096).start()
            yield f"http://{options.address}:{listener.getsockname()[1]}"
    finally:
        listener.close()


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {address}:{port}: {error.strerror}; choose another --port "
            "(0 = any free one)"
        ) from None
    return listener


def _provider(
    options: HostOptions, run_id: str
) -> BwrapProvider | DockerProvider | ProcessProvider:
    if options.backend == "bwrap":
        return BwrapProvider(run_id=run_id, cache_dir=options.cache_dir)
    if options.backend == "docker":
        return DockerProvider(
            run_id=run_id,
            cache_dir=options.cache_dir,
            options=options.docker,
            images=options.docker_images,
        )
    if options.backend == "process":
        return ProcessProvider(run_id=run_id, cache_dir=options.cache_dir)
    raise ConfigError(f"--backend={options.backend}: use {', '.join(BACKENDS)}")


def _images(options: HostOptions) -> Callable[[str], str]:
    """Return what turns a client's image name into the provider's; "" is this host's own."""
    if options.backend != "bwrap":
        return lambda name: name or _LOCAL_IMAGES[options.backend]
    own = str(base_image(options.cache_dir))

    def resolve(name: str) -> str:
        if not name:
            return own
        if options.images is None or name in (".", "..") or "/" in name or "\0" in name:
            raise ImageError(
                f"image {name!r}: a bwrap host knows images by the names of the folders in its "
                '--images; "" is its own base image'
            )
        return str(options.images / name)

    return resolve


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each sandbox and each client takes some."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve_host(options: HostOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; then destroy every sandbox."""
    raise_file_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with open_host(options) as url:
        announce(url)
        await stop.wait()
