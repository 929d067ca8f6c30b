"""What is missing on a host is named: bwrap, a compiler, packages, a daemon, an image."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl_jax.core.config import SandboxConfig
from skyrl_jax.core.errors import ConfigError, DataError, ImageError, InfraError
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox import images, native_build, wire
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.factory import make_provider
from skyrl_jax.sandbox.pool import WarmPool
from skyrl_jax.sandbox.process import ProcessProvider
from tests.sandbox.conftest import CACHE, Backend

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes


async def _enter(provider: BwrapProvider | DockerProvider) -> None:
    async with provider:
        raise AssertionError("must not be reached")


def test_missing_bwrap_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfraError, match="install the Debian package bubblewrap"):
        asyncio.run(_enter(BwrapProvider(run_id="r", cache_dir=CACHE)))


def test_missing_compiler_names_the_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfraError, match="gcc and libc6-dev"):
        native_build.build_native(tmp_path / "cache")


def test_a_failing_compiler_shows_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'stdio.h: no such file' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InfraError, match=r"libc6-dev.*stdio\.h"):
        native_build.build_native(tmp_path / "cache")
    assert list((tmp_path / "cache" / "native").iterdir()) == []


def test_programs_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native_build.build_native(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert native_build.build_native(tmp_path) == first
    assert os.access(first.launcher, os.X_OK) and os.access(first.supervisor, os.X_OK)
    assert [path.name for path in first.layer.iterdir()] == [".skyrl"]


def test_missing_packages_of_the_image_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = images._installed()
    monkeypatch.setattr(
        images, "_installed", lambda: {k: v for k, v in installed.items() if k != "git"}
    )
    with pytest.raises(ImageError, match="lacks the Debian packages: git"):
        images.base_image(CACHE)


def test_no_docker_daemon(tmp_path: Path) -> None:
    host = f"unix://{tmp_path}/none.sock"
    with pytest.raises(InfraError, match=r"docker at .*none\.sock"):
        asyncio.run(_enter(DockerProvider(run_id="r", cache_dir=CACHE, host=host)))


def test_a_hung_docker_daemon_meets_its_deadline(tmp_path: Path) -> None:
    async def run() -> None:
        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(30)

        server = await asyncio.start_unix_server(never, str(tmp_path / "hung.sock"))
        host = f"unix://{tmp_path}/hung.sock"
        began = time.monotonic()
        with pytest.raises(InfraError, match="docker at"):
            await _enter(DockerProvider(run_id="r", cache_dir=CACHE, host=host, call_timeout_s=1.0))
        assert time.monotonic() - began < 5
        server.close()

    asyncio.run(run())


class _Proxy:
    """A socket in front of the daemon that can go away."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    @contextlib.asynccontextmanager
    async def serve(self, path: str, target: str) -> AsyncIterator[_Proxy]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_unix_connection(target)
            self.writers += [writer, up_writer]
            await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))

        self.server = await asyncio.start_unix_server(handle, path)
        yield self
        self.go_away()

    def go_away(self) -> None:
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()


def test_a_docker_daemon_that_goes_away_is_the_hosts_fault(
    docker: Backend, daemon: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "proxy.sock")

    async def run() -> None:
        async with _Proxy().serve(path, daemon.removeprefix("unix://")) as proxy:
            provider = DockerProvider(
                run_id="r", cache_dir=CACHE, host=f"unix://{path}", call_timeout_s=5.0
            )
            with pytest.raises(InfraError, match="docker at"):
                async with provider:
                    box = await provider.create(docker.spec())
                    assert (await box.exec("echo hi")).output == "hi\n"
                    running = asyncio.ensure_future(box.exec("sleep 30"))
                    await asyncio.sleep(0.2)
                    proxy.go_away()
                    os.unlink(path)
                    began = time.monotonic()
                    with pytest.raises(InfraError, match="docker at"):
                        await running
                    with pytest.raises(InfraError, match="docker at"):
                        await provider.create(docker.spec())
                    assert time.monotonic() - began < 15
                    # leaving the block cannot reach the daemon either, and says so
            assert provider.live == 0

    asyncio.run(run())


def test_docker_refuses_what_it_cannot_do(docker: Backend) -> None:
    async def run() -> None:
        async with docker.make() as provider:
            with pytest.raises(ImageError, match="skyrl-none"):
                await provider.create(docker.spec(image="skyrl-none:never"))
            with pytest.raises(ImageError, match="no-such-layer"):
                await provider.create(docker.spec(layers=("/no-such-layer",)))
            with pytest.raises(InfraError, match="disk"):
                await provider.create(docker.spec(best_effort=False))
            assert provider.live == 0

    asyncio.run(run())


CONFIG = SandboxConfig(
    backend="bwrap",
    image="",
    cpus=1.0,
    memory_mb=1,
    pids=1,
    disk_mb=1,
    command_timeout_s=1.0,
    lifetime_s=1.0,
    best_effort=False,
    warm=0,
    warm_creates=1,
    docker_runtime="",
    docker_read_only=False,
    docker_connections=16,
    docker_timeout_s=60.0,
)


def test_the_factory_makes_what_the_configuration_names() -> None:
    kinds = {"bwrap": BwrapProvider, "docker": DockerProvider, "process": ProcessProvider}
    for backend, kind in kinds.items():
        config = dataclasses.replace(CONFIG, backend=backend)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = make_provider(config, run_id="r", cache_dir=CACHE)
        assert isinstance(made, kind) and made.live == 0
        assert ("no isolation" in str([w.message for w in caught])) == (backend == "process")
    warm = make_provider(dataclasses.replace(CONFIG, warm=2), run_id="r", cache_dir=CACHE)
    assert isinstance(warm, WarmPool) and isinstance(warm.inner, BwrapProvider)
    with pytest.raises(ConfigError, match=r"sandbox\.backend"):
        make_provider(dataclasses.replace(CONFIG, backend="podman"), run_id="r", cache_dir=CACHE)


def test_requests_refuse_what_a_c_string_cannot_hold() -> None:
    with pytest.raises(DataError, match="NUL"):
        wire.request(b"E", 1, args=["a\0b"], timeout_s=1, head_cap=1, tail_cap=1)
    with pytest.raises(DataError, match="ends early"):
        wire.records_to_tar(b"F\0\0")
    assert wire.safe_name("./a/./b") == "a/b" and wire.safe_name(".") == ""


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_container_that_comes_too_late_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    provider = DockerProvider(run_id="r", cache_dir=tmp_path, call_timeout_s=-0.8)
    ours, theirs = socket.socketpair()
    removed: list[str] = []

    def make(spec: SandboxSpec) -> tuple[str, socket.socket]:
        time.sleep(0.5)
        return "late", ours

    monkeypatch.setattr(provider, "make", make)
    monkeypatch.setattr(provider, "remove", removed.append)

    async def run() -> None:
        spec = SandboxSpec(image="i", best_effort=True)
        making = asyncio.ensure_future(provider.create(spec))
        await asyncio.sleep(0.05)
        if cancelled:
            making.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else InfraError):
            await making
        assert provider.live == 0 and removed == []

    asyncio.run(run())
    provider._threads.shutdown(wait=True)  # the loop is gone already
    assert removed == ["late"] and ours.fileno() == -1
    theirs.close()
