"""Docker sandboxes: one container per sandbox, the supervisor as PID 1, one attached channel.

The supervisor runs as container uid 0 with no capability but SETUID, SETGID and KILL; commands run
as uid 1 (an agent's program, in a container of its own, as uid 2) with none and no_new_privileges.
Without userns-remap container uid 0 is host uid 0: only the supervisor has it, never a command. The
container's standard input is the channel: when the owner dies the daemon closes it, the supervisor
ends, and the container removes itself.

A create is three requests to the daemon (create, attach, start). The layers are part of an image
that is made once (docker_layers.py), the daemon keeps no log of the channel, and a sandbox without
a network has a network namespace that the runtime makes (its own loopback): the daemon's network
"none" does the same by starting the daemon's program once more, half of a container's start.

Docker cannot limit a container's disk use on most storage drivers: ``disk_mb`` limits single files
only, so it must be accepted with ``best_effort``; ``DockerOptions.read_only`` does limit it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skyrl_jax.core.errors import HostError, ImageError, InfraError
from skyrl_jax.core.protocols import SHARED, SandboxSpec
from skyrl_jax.sandbox.cgroup import run_name
from skyrl_jax.sandbox.docker_daemon import DockerOptions
from skyrl_jax.sandbox.docker_layers import LAYERS_TIMEOUT_S, layers_image
from skyrl_jax.sandbox.docker_sandbox import ContainerMaker, DockerSandbox
from skyrl_jax.sandbox.image_store import ImageOptions, ImageStore
from skyrl_jax.sandbox.native_build import NativePrograms, build_native
from skyrl_jax.sandbox.orphans import end_orphan
from skyrl_jax.sandbox.reaper import LABEL_HOST, LABEL_RUN, LABEL_UID, boot_id, is_dead, reap
from skyrl_jax.sandbox.registry import Book

_LIFE_MARGIN_S = 2.0  # a container ends itself this long after its owner should have ended it
_ENTRYPOINT = ["/.skyrl/supervisor", "--mode", "pid1"]
# The daemon writes this file only for its own networks.
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n"


class DockerProvider(ContainerMaker):
    """Makes docker sandboxes. Use as an async context manager; leaving it destroys all.

    Args:
        run_id: label of every container.
        cache_dir: the compiled supervisor lives here (and is bind-mounted read-only).
        host: daemon address; ``None``: DOCKER_HOST, else the socket that is there
            (docker_daemon.py).
        options: how the daemon is used.
        images: how images come and go.
        say: takes a line for a person, such as that an image is pulled.
        call_timeout_s: in place of the options' own.
    """

    def __init__(
        self,
        *,
        run_id: str,
        cache_dir: Path,
        host: str | None = None,
        options: DockerOptions | None = None,
        images: ImageOptions | None = None,
        say: Callable[[str], None] = lambda line: None,
        call_timeout_s: float | None = None,
    ) -> None:
        """Keep the settings; nothing is started."""
        super().__init__(host, options or DockerOptions())
        if call_timeout_s is not None:
            self._timeout_s = call_timeout_s
        self._run = run_name(run_id)
        self._cache_dir = cache_dir
        self.images = ImageStore(self, images or ImageOptions(), cache_dir / "docker", say)
        self._sandboxes: Book[DockerSandbox] = Book("docker")
        self.lost: list[str] = []  # containers whose removal failed
        self._ids = itertools.count()
        self._layered: dict[Hashable, asyncio.Task[str]] = {}
        self._warned = False

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return len(self._sandboxes)

    @property
    def program_uid(self) -> int | None:
        """Host uid of processes in sandboxes with ``user=2``; ``None``: the daemon remaps ids."""
        return None if self._facts.maps_ids else 2

    async def __aenter__(self) -> Self:
        """Compile the supervisor, reach the daemon, remove containers of dead runs.

        Raises:
            InfraError: no daemon answers; the message names the address.
        """
        self._native: NativePrograms = await asyncio.to_thread(build_native, self._cache_dir)
        self._hosts = await asyncio.to_thread(_write_hosts, self._cache_dir)
        await self.connect()
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
        try:
            outcomes = await asyncio.gather(
                *(box.destroy() for box in list(self._sandboxes)), return_exceptions=True
            )
            if self._sandboxes.left:  # the daemon may have been away for a moment
                with contextlib.suppress(HostError):
                    await self.call(self._remove_own)
                    self._sandboxes.settle()
            if self._layered:
                await asyncio.wait(self._layered.values())
            await self.images.close()
        finally:
            self._sandboxes.close()
            self.disconnect()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

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

    async def layered(self, spec: SandboxSpec, *, again: bool = False) -> str:
        """Return the image that holds the spec's layers; those who ask at once share the work.

        Args:
            spec: names image and layers.
            again: the one that was returned before is gone.
        """
        self.images.touch(spec.image)
        if not spec.layers:
            return await self.images.ensure(spec.image) if again else spec.image
        seeded = spec.workdir if self.read_only else ""
        key = (spec.image, spec.layers, seeded)
        made = self._layered.get(key)
        if made is None or (made.done() and (again or made.cancelled() or made.exception())):
            made = self._layered[key] = asyncio.ensure_future(self._layer(spec, seeded))
        return await asyncio.shield(made)

    async def _layer(self, spec: SandboxSpec, seeded: str) -> str:
        async with self.images.held(spec.image):
            return await self.call(self._make_layered, spec, seeded, seconds=LAYERS_TIMEOUT_S)

    def _make_layered(self, spec: SandboxSpec, seeded: str) -> str:
        patient = self.new_client(LAYERS_TIMEOUT_S)
        with contextlib.closing(patient):
            return layers_image(
                self._client,
                patient,
                spec.image,
                spec.layers,
                seeded=seeded,
                name=self._name(),
                labels=self.labels(),
                remove=self.remove,
            )

    def _name(self) -> str:
        return f"skyrl-{self._run}-{next(self._ids)}".replace(".", "-")

    def labels(self) -> dict[str, str]:
        """Return the labels by which a reaper knows a container's owner."""
        return {LABEL_RUN: self._run, LABEL_HOST: boot_id(), LABEL_UID: str(os.geteuid())}

    def make(self, spec: SandboxSpec) -> tuple[str, socket.socket]:
        """Create a container of an image that has the layers, attach; nothing runs yet."""
        name = self._name()
        try:
            container = self._make(name, spec)
        except BaseException:  # the daemon may have made it, and only its answer was lost
            with contextlib.suppress(Exception):
                self.remove(name)
            raise
        try:
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
            labels=self.labels(),
            hostname="sandbox",
            working_dir="/",
            network_disabled=not spec.network,
            host_config=self._host_config(spec),
        )["Id"]
        return made

    def _host_config(self, spec: SandboxSpec) -> Any:
        binds = {str(self._native.supervisor): {"bind": "/.skyrl/supervisor", "mode": "ro"}}
        if not spec.network:
            binds[str(self._hosts)] = {"bind": "/etc/hosts", "mode": "ro"}
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
            log_config={"Type": "none"},  # the channel's frames are nobody's log
            runtime=self._options.runtime or None,
            read_only=self.read_only,
            tmpfs=_tmpfs(spec) if self.read_only else None,
        )

    def note(self, box: DockerSandbox, container: str) -> None:
        """Keep a sandbox's container for whoever comes after this process."""
        if box in self._sandboxes:
            self._sandboxes.note(box, [container])

    def lose(self, container: str) -> None:
        """Remember a container whose removal failed."""
        self.lost.append(container)

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
            InfraError: the daemon failed, or a limit is not accepted as best effort.
        """
        self._check(spec)
        box = DockerSandbox(self, spec, self._sandboxes.forget)
        self._sandboxes.add(box)
        try:
            await box.open()
        except BaseException:
            await box.destroy()
            raise
        return box

    def _check(self, spec: SandboxSpec) -> None:
        if spec.user not in (1, 2):
            raise InfraError(f"no uid {spec.user} in a sandbox: user must be 1 or 2", cause="user")
        if spec.shared and not os.path.isdir(spec.shared):
            raise ImageError(f"shared folder {spec.shared} is not a directory")
        if self.read_only and (spec.workdir.strip("/") in ("", "tmp") or spec.workdir[0] != "/"):
            raise InfraError(
                f"workdir {spec.workdir!r} cannot be made a tmpfs, which "
                "sandbox.docker_read_only needs: name another absolute path",
                cause="workdir",
            )
        if not self.read_only and not spec.best_effort:
            raise InfraError(
                "docker cannot limit a sandbox's disk use (only single files): accept this with "
                "sandbox.best_effort=True, or set sandbox.docker_read_only=True",
                cause="limits",
            )
        missing = ", ".join(self._facts.missing_limits)
        if missing and not spec.best_effort:
            raise InfraError(
                f"docker at {self._host} cannot limit {missing} (rootless without delegated "
                "cgroups?): accept this with sandbox.best_effort=True",
                cause="limits",
            )
        if missing and not self._warned:
            warnings.warn(
                f"sandbox: docker at {self._host} does not limit {missing} (best_effort)",
                stacklevel=4,
            )
            self._warned = True


def _tmpfs(spec: SandboxSpec) -> dict[str, str]:
    """Return the writable places of a read-only sandbox: together ``disk_mb``."""
    half = max(1, spec.disk_mb // 2)
    return {
        spec.workdir: f"rw,exec,nosuid,nodev,size={half}m,uid=1,gid=1,mode=0755",
        "/tmp": f"rw,exec,nosuid,nodev,size={half}m,mode=1777",
    }


def _write_hosts(cache_dir: Path) -> Path:
    """Return the file that every sandbox without a network sees as /etc/hosts."""
    path = (cache_dir / "docker" / "hosts").resolve()
    if not path.exists() or path.read_text() != _HOSTS:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"hosts.{os.getpid()}")
        draft.write_text(_HOSTS)
        draft.chmod(0o644)
        draft.replace(path)
    return path
