"""One docker container as a sandbox: its channel, its end and who is to blame for it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from skyrl_jax.core.errors import HostError, ImageError, InfraError, SandboxGone, SandboxTimeout
from skyrl_jax.core.protocols import ExecResult, SandboxSpec
from skyrl_jax.sandbox.cgroup import OomCounter
from skyrl_jax.sandbox.channel import BASE_ENV, SupervisorChannel
from skyrl_jax.sandbox.docker_daemon import DaemonConnection
from skyrl_jax.sandbox.docker_layers import SEED
from skyrl_jax.sandbox.docker_stream import AttachedStream

# The last three are of rootless daemons and of podman.
_OOM_FILES = (
    "/sys/fs/cgroup/memory/docker/{id}/memory.oom_control",
    "/sys/fs/cgroup/memory/system.slice/docker-{id}.scope/memory.oom_control",
    "/sys/fs/cgroup/docker/{id}/memory.events",
    "/sys/fs/cgroup/system.slice/docker-{id}.scope/memory.events",
    "/sys/fs/cgroup/user.slice/user-{uid}.slice/user@{uid}.service/user.slice/docker-{id}.scope/memory.events",
    "/sys/fs/cgroup/machine.slice/libpod-{id}.scope/memory.events",
    "/sys/fs/cgroup/user.slice/user-{uid}.slice/user@{uid}.service/user.slice/libpod-{id}.scope/memory.events",
)
_FILL_TIMEOUT_S = 300.0


class ContainerMaker(DaemonConnection):
    """What a sandbox needs of its provider."""

    @property
    def read_only(self) -> bool:
        """Whether root filesystems are read-only."""
        return self._options.read_only

    async def layered(self, spec: SandboxSpec, *, again: bool = False) -> str:
        """Return the image that holds the spec's layers."""
        raise NotImplementedError

    def labels(self) -> dict[str, str]:
        """Return the labels by which a reaper knows a container's owner."""
        raise NotImplementedError

    def make(self, spec: SandboxSpec) -> tuple[str, socket.socket]:
        """Create a container and attach to it."""
        raise NotImplementedError

    def drop(self, prepared: tuple[str, socket.socket]) -> None:
        """Remove a container that was prepared too late for its sandbox."""
        raise NotImplementedError

    def start(self, container: str) -> None:
        """Start a prepared container."""
        raise NotImplementedError

    def note(self, box: DockerSandbox, container: str) -> None:
        """Keep a sandbox's container for whoever comes after this process."""
        raise NotImplementedError

    def lose(self, container: str) -> None:
        """Remember a container whose removal failed."""
        raise NotImplementedError


class DockerSandbox:
    """One container. Made by ``DockerProvider.create``."""

    def __init__(
        self,
        provider: ContainerMaker,
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
        self._container, raw = await self._prepared()
        provider.note(self, self._container)
        raw.setblocking(False)
        self._channel = channel = SupervisorChannel()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10.0):
            await loop.create_connection(lambda: AttachedStream(channel), sock=raw)
        await provider.call(provider.start, self._container)
        try:
            async with asyncio.timeout(30.0):
                await channel.hello
        except TimeoutError as error:
            raise InfraError("a container's supervisor did not speak", cause="start") from error
        if channel.closed.done():
            raise InfraError(f"a container did not start: {channel.last_words}", cause="start")
        self._oom = OomCounter(
            name.format(id=self._container, uid=os.geteuid()) for name in _OOM_FILES
        )
        self._timer = loop.call_later(self._spec.lifetime_s, self._expire)
        if provider.read_only:
            await self._fill()

    async def _prepared(self) -> tuple[str, socket.socket]:
        """Make the container of the image that holds the layers; once more where it was removed."""
        provider, spec = self._provider, self._spec
        for last in (False, True):
            image = await provider.layered(spec, again=last)
            try:
                return await provider.call(
                    provider.make,
                    dataclasses.replace(spec, image=image, layers=()),
                    late=provider.drop,
                )
            except ImageError:
                if last:
                    raise
        raise AssertionError("not reached")

    async def _fill(self) -> None:
        """Copy the tree into the working directory of a read-only sandbox, as the commands' uid."""
        script = f"test ! -d {SEED} || cp -a {SEED}/. ."
        done = await self.exec(script, timeout_s=_FILL_TIMEOUT_S, max_output_bytes=4096)
        if done.returncode:
            raise ImageError(
                f"the tree does not fit into {self._spec.workdir} (disk_mb is "
                f"{self._spec.disk_mb}, half of it): {done.output.strip()[-500:]}"
            )

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

    async def ping(self) -> None:
        """Return when the supervisor has answered an empty request; ``core.protocols.Pinged``."""
        await (await self._open_channel()).ping()

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
                self._provider.lose(self._container)
            self._oom.close()
            self._forget(self, left)
