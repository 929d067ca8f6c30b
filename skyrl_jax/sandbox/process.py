"""The process backend: commands run on this host with no isolation. Only by explicit choice.

A sandbox is a temporary directory with copies of its layers; commands run as the current user with
the sandbox's environment, and a path such as ``/testbed`` means ``<directory>/testbed``. Only the
working directory and the paths of put and get are translated, not paths inside a command. Memory
and process limits are rlimits of each process; CPU, disk and network limits do not exist.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from skyrl_jax.core.errors import ImageError, InfraError, SandboxGone
from skyrl_jax.core.protocols import ExecResult, SandboxSpec
from skyrl_jax.sandbox.cgroup import run_name
from skyrl_jax.sandbox.channel import (
    BASE_ENV,
    DESTROY_TIMEOUT_S,
    START_TIMEOUT_S,
    SupervisorChannel,
    spawn,
)
from skyrl_jax.sandbox.native_build import NativePrograms, build_native
from skyrl_jax.sandbox.reaper import PROCESS_PREFIX, reap, reap_folders
from skyrl_jax.sandbox.registry import Book

NO_PROGRAMS = (
    "sandbox.backend={backend} has neither another uid for an agent's program nor a folder to "
    "share with it: choose bwrap or docker"
)


class ProcessProvider:
    """Makes unisolated sandboxes; same contract as the others.

    Args:
        run_id: part of the temporary directories' names.
        cache_dir: the compiled supervisor lives here.
    """

    def __init__(self, *, run_id: str, cache_dir: Path) -> None:
        """Warn: there is no isolation."""
        warnings.warn(
            "sandbox.backend=process gives no isolation: commands of the agent run on this host "
            "as the current user",
            stacklevel=3,
        )
        self._run = run_name(run_id)
        self._cache_dir = cache_dir
        self._sandboxes: Book[ProcessSandbox] = Book("process")

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return len(self._sandboxes)

    @property
    def program_uid(self) -> int | None:
        """``None``: everything runs with the current user's uid."""
        return None

    async def __aenter__(self) -> Self:
        """Compile the supervisor; remove what dead owners left."""
        await asyncio.to_thread(reap)
        await asyncio.to_thread(reap_folders)
        self._sandboxes.open(self._run)
        self._native: NativePrograms = await asyncio.to_thread(build_native, self._cache_dir)
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
        self._sandboxes.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def create(self, spec: SandboxSpec) -> ProcessSandbox:
        """Copy the layers and start a supervisor.

        Raises:
            InfraError: the spec shares a directory or asks for another uid: there is none here.
        """
        if spec.shared or spec.user != 1:
            raise InfraError(NO_PROGRAMS.format(backend="process"), cause="user")
        root = tempfile.mkdtemp(prefix=PROCESS_PREFIX, suffix=f".{self._run}")
        box = ProcessSandbox(spec, Path(root), self._sandboxes.forget)
        self._sandboxes.add(box, [root])
        try:
            await box.start(self._native.supervisor)
        except BaseException:
            await box.destroy()
            raise
        return box


class ProcessSandbox:
    """A directory and a supervisor. Made by ``ProcessProvider.create``."""

    def __init__(
        self, spec: SandboxSpec, root: Path, forget: Callable[[ProcessSandbox, bool], None]
    ) -> None:
        """Keep the spec; ``start`` does the work."""
        self._spec = spec
        self._root = root
        self._forget = forget
        self._pid = 0
        self._reaped = False
        self._channel: SupervisorChannel | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._destroyed: asyncio.Task[None] | None = None
        self._env = {**BASE_ENV, "HOME": str(root), **spec.env}

    async def start(self, supervisor: Path) -> None:
        """Copy the layers (the first one last: it is on top) and spawn the supervisor."""
        for layer in reversed(self._spec.layers):
            if not os.path.isdir(layer):
                raise ImageError(f"sandbox layer {layer} is not a directory")
            shutil.copytree(layer, self._root, symlinks=True, dirs_exist_ok=True)
        self._host_path(self._spec.workdir).mkdir(parents=True, exist_ok=True)
        arguments = ["--mode", "subreaper"]
        self._pid, ours = spawn(str(supervisor), arguments, new_session=True)
        self._channel = channel = SupervisorChannel()
        await channel.attach(ours, START_TIMEOUT_S)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._spec.lifetime_s, channel.write_eof)

    def _host_path(self, path: str) -> Path:
        return self._root / os.path.normpath("/" + path).lstrip("/")

    def _open_channel(self) -> SupervisorChannel:
        if self._channel is None or self._destroyed is not None:
            raise SandboxGone("the sandbox is destroyed")
        return self._channel

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
        return await self._open_channel().run(
            command,
            timeout_s=timeout_s,
            cwd=str(self._host_path(cwd or self._spec.workdir)),
            env={**self._env, **(env or {})},
            max_output_bytes=max_output_bytes,
            stdin=stdin,
        )

    async def ping(self) -> None:
        """Return when the supervisor has answered an empty request; ``core.protocols.Pinged``."""
        await self._open_channel().ping()

    async def put(self, path: str, tar: bytes) -> None:
        """Unpack a tar stream under ``path``."""
        await self._open_channel().put(str(self._host_path(path)), tar)

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Return a file or directory as a tar stream."""
        return await self._open_channel().get(str(self._host_path(path)), max_bytes)

    async def destroy(self) -> None:
        """End the supervisor and remove the directory. Idempotent."""
        if self._destroyed is None:
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        left = True
        try:
            if self._timer is not None:
                self._timer.cancel()
            async with asyncio.timeout(DESTROY_TIMEOUT_S):
                if self._channel is not None:
                    self._channel.write_eof()
                    await self._channel.closed
                while self._pid and not os.waitpid(self._pid, os.WNOHANG)[0]:
                    await asyncio.sleep(0.001)
            left = False
        except TimeoutError as error:
            raise InfraError("a supervisor did not end in time", cause="destroy") from error
        finally:
            shutil.rmtree(self._root, ignore_errors=True)
            self._forget(self, left or self._root.exists())
