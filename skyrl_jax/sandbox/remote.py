"""Sandboxes on another machine: the client of one sandbox host (launchers/sandbox_host.py).

The same contract as a local backend. Layers are directories of this machine and travel once by
content; the image is the host's ("" = its own). A host that is gone, restarted or silent is blamed
on the host side (InfraError), never on the agent.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skyrl_jax.core.errors import DataError, HostError, InfraError, SandboxGone
from skyrl_jax.core.protocols import ExecResult, SandboxSpec
from skyrl_jax.sandbox import host_wire, wire
from skyrl_jax.sandbox.host_client import UNREACHABLE, HostLink, LayerDigests, message_of

NO_SHARED = (
    "a sandbox on another machine cannot share a directory of this one (the socket of an agent's "
    "own program): use agent.kind=codeact, or sandbox.backend=bwrap or docker"
)
_CREATE_TIMEOUT_S = 120.0  # above the host's own: waiting for a turn, and making
_EXEC_GRACE_S = 30.0  # above the host's own grace
_TREE_TIMEOUT_S = 120.0
_DESTROY_TIMEOUT_S = 45.0
_CANCEL_TIMEOUT_S = 30.0
_PING_TIMEOUT_S = 30.0


class RemoteProvider:
    """Makes sandboxes on one host. Use as an async context manager; leaving it destroys all.

    Args:
        url: e.g. ``http://10.0.0.7:7070``.
        token: what the host was started with.
        token_name: where the token is from (a file), for messages.
        must_answer: entering fails when the host does not answer; False: it may come later.
        digests: shared by the providers of a fleet, so that a layer is read once.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        token_name: str = "sandbox.token_file",
        must_answer: bool = True,
        digests: LayerDigests | None = None,
    ) -> None:
        """Keep the settings; nothing is sent."""
        self.link = HostLink(url, token=token, token_name=token_name, owner=uuid.uuid4().hex)
        self._must_answer = must_answer
        self._digests = digests or LayerDigests()
        self._sandboxes: set[RemoteSandbox] = set()
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return len(self._sandboxes)

    @property
    def program_uid(self) -> int | None:
        """``None``: an agent's own program needs a directory shared with this machine."""
        return None

    @property
    def load(self) -> float:
        """Share of the host's capacity in use, as far as it is known here (above 1: more asked)."""
        status = self.link.status
        others = max(0, status.get("live", 0) - status.get("mine", 0))
        return float((others + self.live) / max(1, status.get("capacity", 1)))

    async def __aenter__(self) -> Self:
        """Say hello to the host.

        Raises:
            InfraError: nobody answers there, or the token is refused.
        """
        await self.link.open(must_answer=self._must_answer)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Destroy every sandbox; those on a host that is down end with their lease."""
        if self._background:
            await asyncio.wait(self._background, timeout=5.0)
        await asyncio.gather(
            *(box.destroy() for box in list(self._sandboxes)), return_exceptions=True
        )
        await self.link.close()

    async def create(self, spec: SandboxSpec) -> RemoteSandbox:
        """Start a sandbox on the host.

        Raises:
            CapacityError: the host is full.
            ImageError: the host has no such image, or a layer is no directory here.
            InfraError: the host, its network or its kernel; or a directory is shared.
        """
        if spec.shared:
            raise InfraError(NO_SHARED, cause="shared")
        layers = [await self._digests.of(layer) for layer in spec.layers]
        box = RemoteSandbox(self.link, spec, self._sandboxes.discard, self._later)
        self._sandboxes.add(box)
        try:
            await self._create(box, spec, layers)
        except BaseException as error:
            self._sandboxes.discard(box)
            if not isinstance(error, HostError) or error.cause == UNREACHABLE:
                self._later(self._forget(box))  # it may have been made
            raise
        return box

    async def _create(self, box: RemoteSandbox, spec: SandboxSpec, layers: Sequence[str]) -> None:
        path = f"/sandboxes/{box.key}"
        message = host_wire.pack({"spec": host_wire.spec_to_json(spec, tuple(layers))})
        for _ in range(3):  # a layer that was there may be dropped before we ask again
            header, _rest = await self.link.call("POST", path, message, timeout_s=_CREATE_TIMEOUT_S)
            missing = set(header.get("missing", ()))
            if not missing:
                return
            for digest, layer in zip(layers, spec.layers, strict=True):
                if digest in missing:
                    await self.link.send_layer(digest, Path(layer))
        raise InfraError(f"sandbox host {self.link.url} drops layers as they arrive", cause="disk")

    async def _forget(self, box: RemoteSandbox) -> None:
        await self.link.call("DELETE", f"/sandboxes/{box.key}", timeout_s=_DESTROY_TIMEOUT_S)

    def _later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do something whose end nobody has to wait for; its errors are of no use to anybody."""
        task = asyncio.create_task(work)
        self._background.add(task)

        def ended(done: asyncio.Task[Any]) -> None:
            self._background.discard(done)
            if not done.cancelled():
                done.exception()

        task.add_done_callback(ended)
        return task


class RemoteSandbox:
    """One sandbox. Made by ``RemoteProvider.create``."""

    def __init__(
        self,
        link: HostLink,
        spec: SandboxSpec,
        forget: Callable[[RemoteSandbox], None],
        later: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        """Take a new id; the provider asks the host."""
        self.key = uuid.uuid4().hex
        self.host = link.url
        self._spec = spec
        self._link = link
        self._forget = forget
        self._later = later
        self._number = 0
        self._turn = asyncio.Lock()
        self._ending: asyncio.Task[Any] | None = None  # of an operation that was cancelled
        self._destroyed: asyncio.Task[None] | None = None

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
        wire.command_args(command, timeout_s)
        if len(stdin) > wire.MAX_STDIN:
            raise DataError(f"stdin of {len(stdin)} bytes is over the limit of {wire.MAX_STDIN}")
        fields = {
            "command": command if isinstance(command, str) else list(command),
            "timeout_s": timeout_s,
            "cwd": cwd,
            "env": None if env is None else dict(env),
            "max_output_bytes": max_output_bytes,
        }
        message = message_of("exec", fields, stdin)
        return host_wire.result_from_message(
            *await self._operate(message, timeout_s + _EXEC_GRACE_S)
        )

    async def ping(self) -> None:
        """Return when the sandbox has answered: it lives, and so does its host."""
        await self._operate(message_of("ping", {}), _PING_TIMEOUT_S)

    async def put(self, path: str, tar: bytes) -> None:
        """Unpack a tar stream under ``path``."""
        if len(tar) > wire.MAX_STDIN:
            raise DataError(f"a tar of {len(tar)} bytes is over the limit of {wire.MAX_STDIN}")
        await self._operate(message_of("put", {"path": path}, tar), _TREE_TIMEOUT_S)

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Return a file or directory as a tar stream."""
        message = message_of("get", {"path": path, "max_bytes": max_bytes})
        return (await self._operate(message, _TREE_TIMEOUT_S))[1]

    async def _operate(self, message: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        self._check()
        async with self._turn:  # here, so that waiting for it is no part of the deadline
            if self._ending is not None:
                await asyncio.wait({self._ending})
                self._ending = None
            self._check()
            self._number += 1
            path = f"/sandboxes/{self.key}/ops/{self._number}"
            try:
                return await self._link.call("POST", path, message, timeout_s=timeout_s)
            except asyncio.CancelledError:
                cancel = self._link.call("DELETE", path, timeout_s=_CANCEL_TIMEOUT_S)
                self._ending = self._later(cancel)
                raise
            except InfraError as error:
                if self._destroyed is not None and error.cause == host_wire.UNKNOWN_SANDBOX:
                    text = "the sandbox was destroyed while a command ran"
                    raise SandboxGone(text) from error
                raise

    def _check(self) -> None:
        if self._destroyed is not None:
            raise SandboxGone("the sandbox is destroyed")

    async def destroy(self) -> None:
        """End the sandbox; returns when nothing of it is left on its host. Idempotent.

        Raises:
            InfraError: the host is down: the sandbox ends with it, or with the lease.
        """
        if self._destroyed is None:
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        try:
            path = f"/sandboxes/{self.key}"
            await self._link.call("DELETE", path, timeout_s=_DESTROY_TIMEOUT_S)
        except InfraError as error:
            if error.cause != UNREACHABLE:
                raise
            raise InfraError(
                f"a sandbox could not be destroyed, its host's lease will end it: {error}",
                cause="destroy",
            ) from error
        finally:
            self._forget(self)
