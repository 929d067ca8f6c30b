"""Kubernetes sandboxes: a pod each, the supervisor as PID 1, one websocket to its standard streams.

Tested against a fake API server alone (tests/lanes/kubernetes), never on a real cluster. What such
a pod does not have: a process limit of its own (the kubelet's holds), read-only layers (what a
layer brings can be written by the commands: grade in a fresh sandbox, as always, or put the tools
into the image), a shared directory. So a spec needs ``best_effort``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skyrl_jax.core.errors import (
    AgentCausedError,
    CapacityError,
    HostError,
    ImageError,
    InfraError,
    SandboxGone,
    SandboxTimeout,
)
from skyrl_jax.core.protocols import ExecResult, SandboxSpec
from skyrl_jax.sandbox import kubernetes_pod
from skyrl_jax.sandbox.cgroup import run_name
from skyrl_jax.sandbox.channel import BASE_ENV, SupervisorChannel
from skyrl_jax.sandbox.docker_layers import layer_tar
from skyrl_jax.sandbox.kubernetes_api import KubernetesApi, WebsocketStream
from skyrl_jax.sandbox.native_build import build_native

START_TIMEOUT_S = 300.0
_POLL_S = (0.05, 1.0)  # between two looks at a pod that does not run yet: at first, at last
_GONE_S = 30.0
_CONFLICT, _MISSING = 409, 404


class KubernetesProvider:
    """Makes sandboxes in a cluster. Use as an async context manager; leaving it deletes all.

    Args:
        run_id: part of every pod's label.
        cache_dir: the compiled supervisor lives here.
        namespace: of the pods.
        context: see ``KubernetesApi``. ``config_file``: too.
        start_timeout_s: for a pod to be scheduled, its image pulled, and started.
    """

    def __init__(
        self,
        *,
        run_id: str,
        cache_dir: Path,
        namespace: str = "default",
        context: str = "",
        config_file: str = "",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Keep the settings; nothing is reached."""
        self._run = kubernetes_pod.run_label(run_name(run_id))
        self._cache_dir = cache_dir
        self.namespace = namespace
        self._credentials = (context, config_file)
        self.start_timeout_s = start_timeout_s
        self._ids = itertools.count()
        self._sandboxes: set[KubernetesSandbox] = set()

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return len(self._sandboxes)

    @property
    def program_uid(self) -> int | None:
        """``None``: an agent's own program needs a directory shared with this machine."""
        return None

    async def __aenter__(self) -> Self:
        """Bring the supervisor and the network policy into the namespace; remove ended pods.

        Raises:
            ConfigError: the package or the credentials are missing.
            InfraError: the API server refuses.
        """
        native = await asyncio.to_thread(build_native, self._cache_dir)
        self.api = await asyncio.to_thread(KubernetesApi, *self._credentials)
        api, space = self.api, self.namespace
        carried = kubernetes_pod.config_map(native.supervisor, space)
        self._supervisor = carried["metadata"]["name"]
        await api.call(api.core.create_namespaced_config_map, space, carried, known=_CONFLICT)
        policy = kubernetes_pod.network_policy(space)
        await api.call(api.network.create_namespaced_network_policy, space, policy, known=_CONFLICT)
        await self._reap()
        return self

    async def _reap(self) -> None:
        """Delete pods of any run that have ended: their owners are gone, or about to do it."""
        found = await self.api.call(
            self.api.core.list_namespaced_pod,
            self.namespace,
            label_selector=kubernetes_pod.LABEL_RUN,
        )
        for item in self.api.plain(found)["items"]:
            if (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                await self.delete(item["metadata"]["name"])

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Delete every pod; the first failure is raised at the end."""
        outcomes = await asyncio.gather(
            *(box.destroy() for box in list(self._sandboxes)), return_exceptions=True
        )
        await self.api.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def create(self, spec: SandboxSpec) -> KubernetesSandbox:
        """Start a sandbox.

        Raises:
            CapacityError: no node has room, or a quota is used up.
            ImageError: the image cannot be pulled.
            InfraError: the API server or the pod failed, or the spec needs ``best_effort``.
        """
        if spec.shared:
            raise InfraError("a pod cannot share a directory of this machine", cause="shared")
        if spec.user not in (1, 2):
            raise InfraError(f"no uid {spec.user} in a sandbox: user must be 1 or 2", cause="user")
        if not spec.best_effort:
            raise InfraError(
                "kubernetes limits neither a pod's processes nor, on every cluster, its network: "
                "accept this with sandbox.best_effort=True",
                cause="limits",
            )
        name = f"skyrl-{self._run[-12:]}-{os.getpid()}-{next(self._ids)}"
        box = KubernetesSandbox(self, name, spec, self._sandboxes.discard)
        self._sandboxes.add(box)
        try:
            await box.open()
        except BaseException:
            await box.destroy()
            raise
        return box

    def manifest(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        """Return the pod of a sandbox."""
        tops = {layer: _tops(Path(layer)) for layer in spec.layers}
        return kubernetes_pod.pod(
            name,
            spec,
            namespace=self.namespace,
            run=self._run,
            supervisor=self._supervisor,
            mounts=kubernetes_pod.mount_points(spec, tops),
        )

    async def status(self, name: str) -> dict[str, Any]:
        """Return a pod's status; {} where there is no such pod."""
        api = self.api
        found = await api.call(api.core.read_namespaced_pod, name, self.namespace, known=_MISSING)
        return (api.plain(found).get("status") or {}) if found is not None else {}

    async def delete(self, name: str) -> None:
        """Delete a pod; one that is gone is fine."""
        api = self.api
        await api.call(
            api.core.delete_namespaced_pod,
            name,
            self.namespace,
            grace_period_seconds=0,
            known=_MISSING,
        )


class KubernetesSandbox:
    """One pod. Made by ``KubernetesProvider.create``."""

    def __init__(
        self,
        provider: KubernetesProvider,
        name: str,
        spec: SandboxSpec,
        forget: Callable[[KubernetesSandbox], None],
    ) -> None:
        """Keep the spec; ``open`` does the work."""
        self._provider = provider
        self._name = name
        self._spec = spec
        self._forget = forget
        self._env = {**BASE_ENV, **spec.env}
        self._channel: SupervisorChannel | None = None
        self._stream: WebsocketStream | None = None
        self._ends = 0.0
        self._destroyed: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Create the pod, wait for it, attach, and bring the layers in."""
        provider, api = self._provider, self._provider.api
        body = await asyncio.to_thread(provider.manifest, self._name, self._spec)
        await api.call(api.core.create_namespaced_pod, provider.namespace, body)
        await self._running()
        self._ends = time.monotonic() + self._spec.lifetime_s
        self._channel = SupervisorChannel()
        self._stream = await api.attach(provider.namespace, self._name, self._channel)
        await self._channel.ping(30.0)  # its first word may have come before the attachment
        for layer in reversed(self._spec.layers):
            try:
                await self._channel.put("/", await asyncio.to_thread(layer_tar, layer))
            except AgentCausedError as error:
                raise ImageError(f"sandbox layer {layer}: {error}") from error

    async def _running(self) -> None:
        provider = self._provider
        deadline = time.monotonic() + provider.start_timeout_s
        pause, most = _POLL_S
        while True:
            status = await provider.status(self._name)
            if status.get("phase") == "Running":
                return
            kind, why = kubernetes_pod.why_not_running(status)
            text = f"pod {self._name}: {why}"
            if kind == "image":
                raise ImageError(f"image {self._spec.image}: {why}")
            if kind == "ended":
                raise InfraError(text, cause="start")
            if time.monotonic() > deadline:
                late = f"{text} (not running after {provider.start_timeout_s:g} s)"
                raise CapacityError(late) if kind == "capacity" else InfraError(late, cause="start")
            await asyncio.sleep(pause)
            pause = min(most, 2 * pause)

    async def _open_channel(self) -> SupervisorChannel:
        if self._channel is None or self._destroyed is not None:
            raise SandboxGone("the sandbox is destroyed")
        if self._channel.closed.done():
            raise await self._end_cause()
        return self._channel

    async def _end_cause(self) -> Exception:
        if self._destroyed is not None:
            return SandboxGone("the sandbox was destroyed while a command ran")
        if time.monotonic() >= self._ends:
            return SandboxTimeout(f"the sandbox ended after its {self._spec.lifetime_s:.0f} s")
        try:
            status = await self._provider.status(self._name)
        except HostError as error:
            return error
        if not status or status.get("phase") == "Running":  # deleted by others, or cut off
            return InfraError(f"the connection to pod {self._name} ended", cause="kubernetes")
        # commands cannot signal PID 1: only memory tells the agent's doing from the host's
        certain = kubernetes_pod.ended_for_memory(status)
        return SandboxGone(f"pod {self._name} ended", certain=certain)

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
            return await channel.run(
                command,
                timeout_s=timeout_s,
                cwd=cwd or self._spec.workdir,
                env={**self._env, **(env or {})},
                max_output_bytes=max_output_bytes,
                stdin=stdin,
            )
        except SandboxGone as error:
            raise await self._end_cause() from error

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
        """Delete the pod. Idempotent."""
        if self._destroyed is None:
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        try:
            if self._stream is not None:
                self._stream.abort()
            await self._provider.delete(self._name)
            deadline = time.monotonic() + _GONE_S
            while await self._provider.status(self._name):
                if time.monotonic() > deadline:
                    raise InfraError(f"pod {self._name} is not deleted", cause="destroy")
                await asyncio.sleep(_POLL_S[0])
            if self._stream is not None:
                await self._stream.wait_closed()
        finally:
            self._forget(self)


def _tops(layer: Path) -> list[str]:
    """Return the directories of a layer's second level, /opt/swe; of the first where it has none.

    Raises:
        ImageError: the layer is no directory, or has files beside its directories.
    """
    if not layer.is_dir():
        raise ImageError(f"sandbox layer {layer} is not a directory")
    found: list[str] = []
    for top in sorted(layer.iterdir()):
        if not top.is_dir():
            raise ImageError(f"sandbox layer {layer}: a pod has no place for its file /{top.name}")
        below = sorted(item.name for item in top.iterdir() if item.is_dir())
        found += [f"/{top.name}/{name}" for name in below] or [f"/{top.name}"]
    return found
