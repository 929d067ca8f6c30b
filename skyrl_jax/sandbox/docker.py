"""Docker sandboxes: one container per sandbox, the supervisor as PID 1, one attached channel.

The supervisor runs as container uid 0 with no capability but SETUID, SETGID and KILL; commands run
as uid 1 (an agent's program, in a container of its own, as uid 2) with none and no_new_privileges.
Without userns-remap container uid 0 is host uid 0: only the supervisor has it, never a command. The
container's standard input is the channel: when the owner dies the daemon closes it, the supervisor
ends, and the container removes itself.

Docker cannot limit a container's disk use on most storage drivers: ``disk_mb`` limits single files
only, so it must be accepted with ``best_effort``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from skyrl_jax.core.errors import HostError, ImageError, InfraError, SandboxGone, SandboxTimeout
from skyrl_jax.core.protocols import SHARED, ExecResult, SandboxSpec
from skyrl_jax.sandbox.cgroup import OomCounter, run_name
from skyrl_jax.sandbox.channel import BASE_ENV, SupervisorChannel
from skyrl_jax.sandbox.docker_stream import AttachedStream
from skyrl_jax.sandbox.native_build import NativePrograms, build_native
from skyrl_jax.sandbox.orphans import end_orphan
from skyrl_jax.sandbox.reaper import (
    LABEL_HOST,
    LABEL_RUN,
    LABEL_UID,
    boot_id,
    docker_address,
    is_dead,
    reap,
)
from skyrl_jax.sandbox.registry import Book

T = TypeVar("T")
_CALL_TIMEOUT_S = 60.0
_LIFE_MARGIN_S = 2.0  # a container ends itself this long after its owner should have ended it
_ENTRYPOINT = ["/.skyrl/supervisor", "--mode", "pid1"]
_OOM_FILES = (
    "/sys/fs/cgroup/memory/docker/{id}/memory.oom_control",
    "/sys/fs/cgroup/memory/system.slice/docker-{id}.scope/memory.oom_control",
    "/sys/fs/cgroup/docker/{id}/memory.events",
    "/sys/fs/cgroup/system.slice/docker-{id}.scope/memory.events",
)


class DockerProvider:
    """Makes docker sandboxes. Use as an async context manager; leaving it destroys all.

    Args:
        run_id: label of every container.
        cache_dir: the compiled supervisor lives here (and is bind-mounted read-only).
        host: daemon address; ``None`` reads DOCKER_HOST.
        call_timeout_s: deadline of every single call to the daemon.
    """

    def __init__(
        self,
        *,
        run_id: str,
        cache_dir: Path,
        host: str | None = None,
        call_timeout_s: float = _CALL_TIMEOUT_S,
    ) -> None:
        """Keep the settings; nothing is started."""
        self._run = run_name(run_id)
        self._cache_dir = cache_dir
        self._host = host or docker_address()
        self._timeout_s = call_timeout_s
        self._sandboxes: Book[DockerSandbox] = Book("docker")
        self.lost: list[str] = []  # containers whose removal failed
        self._ids = itertools.count()
        self._threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="docker")
        self._client: Any = None

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return len(self._sandboxes)

    @property
    def program_uid(self) -> int | None:
        """Host uid of processes in sandboxes with ``user=2`` (the daemon remaps no ids)."""
        return 2

    async def __aenter__(self) -> Self:
        """Compile the supervisor, reach the daemon, remove containers of dead runs.

        Raises:
            InfraError: no daemon answers; the message names the address.
        """
        self._native: NativePrograms = await asyncio.to_thread(build_native, self._cache_dir)
        self._client = await self.call(self._connect)
        await self.call(self._reap)
        await asyncio.to_thread(reap)
        self._sandboxes.open(self._run, self._host)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Destroy every sandbox; the first failure is raised at the end."""
        outcomes = await asyncio.gather(
            *(box.destroy() for box in list(self._sandboxes)), return_exceptions=True
        )
        if self._sandboxes.left:  # the daemon may have been away for a moment
            with contextlib.suppress(HostError):
                await self.call(self._remove_own)
                self._sandboxes.settle()
        self._sandboxes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def call(
        self, function: Callable[..., T], *args: Any, late: Callable[[T], None] | None = None
    ) -> T:
        """Run a call to the daemon in a thread, with a deadline.

        Args:
            function: the call.
            *args: its arguments.
            late: takes a result that nobody waits for any more, in the call's own thread.

        Raises:
            ImageError, InfraError: what the daemon or the client said.
        """
        job = self._threads.submit(function, *args)
        try:
            return await self._wait(job)
        except BaseException:
            if late is not None:
                job.add_done_callback(lambda done: _hand_over(done, late))
            raise

    async def _wait(self, job: Future[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s + 1.0):
                return await asyncio.wrap_future(job)
        except TimeoutError as error:
            raise InfraError(
                f"docker at {self._host} did not answer within {self._timeout_s:.0f} s",
                cause="docker",
            ) from error
        except HostError:
            raise
        except Exception as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        import docker.errors
        import requests.exceptions

        if isinstance(error, docker.errors.ImageNotFound):
            return ImageError(
                f"docker image not found: {error.explanation} (the sandbox's own image is made by "
                "the two commands in skyrl_jax/sandbox/images.py)"
            )
        if isinstance(error, (docker.errors.DockerException, requests.exceptions.RequestException)):
            return InfraError(f"docker at {self._host}: {error}", cause="docker")
        if isinstance(error, OSError):
            return InfraError(f"docker at {self._host}: {error}", cause="docker")
        return error

    def _connect(self) -> Any:
        import docker
        import docker.errors

        try:
            made = docker.APIClient(
                base_url=self._host, timeout=int(self._timeout_s), version="auto"
            )
            made.ping()
        except docker.errors.DockerException as error:
            where = self._host or os.environ.get("DOCKER_HOST") or "the default socket"
            raise InfraError(
                f"docker at {where}: no daemon answers; start one, or put `.venv/bin/python "
                f".ci/with_docker.py` before the command, which starts one ({error})",
                cause="docker",
            ) from error
        return made

    def _reap(self) -> None:
        for found in self._client.containers(all=True, filters={"label": LABEL_RUN}):
            if is_dead(found["Labels"]):
                self.remove(found["Id"])

    def _remove_own(self) -> None:
        label = f"{LABEL_RUN}={self._run}"
        for found in self._client.containers(all=True, filters={"label": label}):
            self.remove(found["Id"])
        for container in self.lost:
            end_orphan(container)

    def remove(self, container: str) -> None:
        """Remove a container; one that is gone or going already is fine."""
        import docker.errors

        try:
            self._client.remove_container(container, force=True, v=True)
        except docker.errors.NotFound:
            end_orphan(container)
        except docker.errors.APIError as error:
            if error.status_code != 409:  # 409: auto-removal is on its way
                raise

    def ping(self) -> None:
        """Ask the daemon for a sign of life."""
        self._client.ping()

    def prepare(self, spec: SandboxSpec) -> tuple[str, socket.socket]:
        """Create a container, put the layers in, attach; nothing runs yet."""
        name = f"skyrl-{self._run}-{next(self._ids)}".replace(".", "-")
        try:
            container = self._make(name, spec)
        except BaseException:  # the daemon may have made it, and only its answer was lost
            with contextlib.suppress(Exception):
                self.remove(name)
            raise
        try:
            for layer in reversed(spec.layers):
                self._put_layer(container, layer)
            params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            attached = self._client.attach_socket(container, params=params)
            raw = getattr(attached, "_sock", attached)
            channel = socket.socket(fileno=os.dup(raw.fileno()))
            attached.close()
        except BaseException:
            self.remove(container)
            raise
        return container, channel

    def _make(self, name: str, spec: SandboxSpec) -> str:
        life = ["--life", str(math.ceil(spec.lifetime_s + _LIFE_MARGIN_S))]
        made: str = self._client.create_container(
            spec.image,
            name=name,
            entrypoint=_ENTRYPOINT,
            command=["--uid", str(spec.user), "--fsize", str(spec.disk_mb << 20), *life],
            user="0:0",
            stdin_open=True,
            stop_signal="SIGKILL",  # PID 1 hears no other: a daemon that ends would wait for it
            labels={LABEL_RUN: self._run, LABEL_HOST: boot_id(), LABEL_UID: str(os.geteuid())},
            hostname="sandbox",
            working_dir="/",
            host_config=self._host_config(spec),
        )["Id"]
        return made

    def _host_config(self, spec: SandboxSpec) -> Any:
        binds = {str(self._native.supervisor): {"bind": "/.skyrl/supervisor", "mode": "ro"}}
        if spec.shared:
            binds[os.path.abspath(spec.shared)] = {"bind": SHARED, "mode": "ro"}
        return self._client.create_host_config(
            network_mode="bridge" if spec.network else "none",
            cap_drop=["ALL"],
            cap_add=["SETUID", "SETGID", "KILL"],
            security_opt=["no-new-privileges"],
            mem_limit=spec.memory_mb << 20,
            memswap_limit=spec.memory_mb << 20,
            pids_limit=spec.pids,
            cpu_period=100_000,
            cpu_quota=max(1000, int(spec.cpus * 100_000)),
            binds=binds,
            auto_remove=True,
        )

    def _put_layer(self, container: str, layer: str) -> None:
        if not os.path.isdir(layer):
            raise ImageError(f"sandbox layer {layer} is not a directory")
        with tempfile.TemporaryFile() as spool:
            with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for name in sorted(os.listdir(layer)):
                    archive.add(os.path.join(layer, name), arcname=name, filter=_owned_by_agent)
            spool.seek(0)
            self._client.put_archive(container, "/", spool)

    def note(self, box: DockerSandbox, container: str) -> None:
        """Keep a sandbox's container for whoever comes after this process."""
        if box in self._sandboxes:
            self._sandboxes.note(box, [container])

    def drop(self, prepared: tuple[str, socket.socket]) -> None:
        """Remove a container that was prepared too late for its sandbox."""
        prepared[1].close()
        with contextlib.suppress(Exception):  # nobody to tell; the next run reaps
            self.remove(prepared[0])

    def start(self, container: str) -> None:
        """Start a prepared container."""
        self._client.start(container)

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """Start a sandbox.

        Raises:
            ImageError: no such image or layer.
            InfraError: the daemon failed, or ``disk_mb`` is not accepted as best effort.
        """
        if spec.user not in (1, 2):
            raise InfraError(f"no uid {spec.user} in a sandbox: user must be 1 or 2", cause="user")
        if spec.shared and not os.path.isdir(spec.shared):
            raise ImageError(f"shared folder {spec.shared} is not a directory")
        if not spec.best_effort:
            raise InfraError(
                "docker cannot limit a sandbox's disk use (only single files): accept this with "
                "sandbox.best_effort=True",
                cause="limits",
            )
        box = DockerSandbox(self, spec, self._sandboxes.forget)
        self._sandboxes.add(box)
        try:
            await box.open()
        except BaseException:
            await box.destroy()
            raise
        return box


def _hand_over(done: Future[T], late: Callable[[T], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        late(done.result())


def _owned_by_agent(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 1
    member.uname = member.gname = ""
    return member


class DockerSandbox:
    """One container. Made by ``DockerProvider.create``."""

    def __init__(
        self,
        provider: DockerProvider,
        spec: SandboxSpec,
        forget: Callable[[DockerSandbox, bool], None],
    ) -> None:
        """Keep the spec; ``open`` does the work."""
        self._provider = provider
        self._spec = spec
        self._forget = forget
        self._env = {**BASE_ENV, **spec.env}
        self._container = ""
        self._oom = OomCounter(())
        self._channel: SupervisorChannel | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        self._destroyed: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Create, attach, start, and wait for the supervisor's first word."""
        provider = self._provider
        self._container, raw = await provider.call(provider.prepare, self._spec, late=provider.drop)
        self._provider.note(self, self._container)
        raw.setblocking(False)
        self._channel = channel = SupervisorChannel()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10.0):
            await loop.create_connection(lambda: AttachedStream(channel), sock=raw)
        await self._provider.call(self._provider.start, self._container)
        try:
            async with asyncio.timeout(30.0):
                await channel.hello
        except TimeoutError as error:
            raise InfraError("a container's supervisor did not speak", cause="start") from error
        if channel.closed.done():
            raise InfraError(f"a container did not start: {channel.last_words}", cause="start")
        self._oom = OomCounter(name.format(id=self._container) for name in _OOM_FILES)
        self._timer = loop.call_later(self._spec.lifetime_s, self._expire)

    def _expire(self) -> None:
        self._expired = True
        if self._channel is not None:
            self._channel.write_eof()

    async def _open_channel(self) -> SupervisorChannel:
        if self._channel is None or self._destroyed is not None:
            raise SandboxGone("the sandbox is destroyed")
        if self._channel.closed.done():
            raise await self._end_cause()
        return self._channel

    async def _end_cause(self) -> Exception:
        if self._destroyed is not None:
            return SandboxGone("the sandbox was destroyed while a command ran")
        if self._expired:
            return SandboxTimeout(f"the sandbox ended after its {self._spec.lifetime_s:.0f} s")
        try:
            await self._provider.call(self._provider.ping)
        except HostError as error:
            return error
        # commands cannot signal PID 1: only memory tells the agent's doing from the host's
        return SandboxGone("the container ended", certain=self._oom.rose())

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output_bytes: int = 65536,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command; see ``core.protocols.Sandbox``."""
        channel = await self._open_channel()
        try:
            result = await channel.run(
                command,
                timeout_s=timeout_s,
                cwd=cwd or self._spec.workdir,
                env={**self._env, **(env or {})},
                max_output_bytes=max_output_bytes,
                stdin=stdin,
            )
        except SandboxGone as error:
            raise await self._end_cause() from error
        return self._oom.mark(result)

    async def put(self, path: str, tar: bytes) -> None:
        """Unpack a tar stream under ``path``."""
        await (await self._open_channel()).put(path, tar)

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Return a file or directory as a tar stream."""
        return await (await self._open_channel()).get(path, max_bytes)

    async def destroy(self) -> None:
        """Remove the container. Idempotent."""
        if self._destroyed is None:
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        left = True  # without a container's id, too: the call that makes one may still be under way
        try:
            if self._timer is not None:
                self._timer.cancel()
            if self._channel is not None:
                self._channel.abort()
            if self._container:
                await self._provider.call(self._provider.remove, self._container)
                left = False
        finally:
            if left and self._container:
                self._provider.lost.append(self._container)
            self._oom.close()
            self._forget(self, left)
