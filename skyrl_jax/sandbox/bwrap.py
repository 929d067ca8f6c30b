"""Bubblewrap sandboxes: overlay of image and layers, no network, limits, gone with their owner.

One sandbox is one chain of processes: ``launcher`` (host; the watcher that removes every trace) ->
``bwrap`` -> ``supervisor`` (PID 1 inside) -> one command at a time. The owner's only handle is a
socket whose other end is the supervisor's channel; the launcher holds a copy, so end of file on the
owner's side means that the sandbox, its mounts and its cgroups are gone.

As root, a user namespace maps uid 0 -> 100000 (supervisor: SETUID, SETGID, KILL and nothing else)
1 -> 100001 (commands: no capability) and 2 -> 100002 (the program of an agent, in a sandbox of its
own: no capability): no process inside is host uid 0. The agent's files must belong to host uid
100001: see ``prepare_layer``. As a plain user only the own uid can be mapped, so
each command runs in a pid namespace of its own (it cannot see the supervisor), and without a
writable cgroup the limits are per-process rlimits, accepted only with ``best_effort``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from skyrl_jax.core.errors import ImageError, InfraError, SandboxGone, SandboxTimeout
from skyrl_jax.core.protocols import SHARED, ExecResult, SandboxSpec
from skyrl_jax.sandbox.cgroup import CgroupPlan, OomCounter, open_cgroups, remove_tree, run_name
from skyrl_jax.sandbox.channel import (
    BASE_ENV,
    DESTROY_TIMEOUT_S,
    START_TIMEOUT_S,
    SupervisorChannel,
    spawn,
)
from skyrl_jax.sandbox.native_build import NativePrograms, build_native
from skyrl_jax.sandbox.reaper import reap
from skyrl_jax.sandbox.registry import Book

UID_BASE = 100_000  # uid 0 of the sandbox on the host; the commands' uid is the next one
AGENT_UID = UID_BASE + 1
PROGRAM_UID = UID_BASE + 2  # SandboxSpec.user = 2: an agent's own program
_CAPS_TWO_UIDS = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
_CAPS_ONE_UID = ("CAP_SYS_ADMIN", "CAP_SETPCAP", "CAP_KILL")
_ENDED_INSIDE, _LIFETIME = 3, 4
_VERDICT_TIMEOUT_S = 2.0  # for the launcher's exit code, once the sandbox's channel is closed


def prepare_layer(path: Path) -> None:
    """Give a layer's content to the commands' uid, so that they can write it and git trusts it.

    The directories above the first level stay what the image has: only ``path`` itself keeps root's
    ownership inside. Needs root; as a plain user nothing has to be done and nothing is.
    """
    if os.geteuid() != 0:
        return
    os.chown(path, UID_BASE, UID_BASE)
    os.chmod(path, 0o755)
    for directory, names, files in os.walk(path):
        for name in itertools.chain(names, files):
            os.chown(os.path.join(directory, name), AGENT_UID, AGENT_UID, follow_symlinks=False)


class BwrapProvider:
    """Makes bwrap sandboxes. Use as an async context manager; leaving it destroys all.

    Args:
        run_id: names the run's cgroup directories.
        cache_dir: compiled helpers and the mount point live here.
    """

    def __init__(self, *, run_id: str, cache_dir: Path) -> None:
        """Keep the settings; nothing is started."""
        self._run_id = run_id
        self._cache_dir = cache_dir
        self._root = os.geteuid() == 0
        self._sandboxes: Book[BwrapSandbox] = Book("bwrap")
        self._ids = itertools.count()
        self._stage = ""
        self._warned = False

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return len(self._sandboxes)

    @property
    def program_uid(self) -> int | None:
        """Host uid of processes in sandboxes with ``user=2``; ``None``: no second uid here."""
        return PROGRAM_UID if self._root else None

    async def __aenter__(self) -> Self:
        """Compile the helpers, remove leftovers of dead runs, make the run's cgroup.

        Raises:
            InfraError: bubblewrap or a compiler is missing.
        """
        found = shutil.which("bwrap")
        if found is None:
            raise InfraError(
                "bwrap not found in PATH: install the Debian package bubblewrap, or choose "
                "sandbox.backend=docker",
                cause="bwrap",
            )
        self._bwrap = os.path.realpath(found)
        self._native: NativePrograms = await asyncio.to_thread(build_native, self._cache_dir)
        await asyncio.to_thread(reap)
        self._cgroups, self._no_cgroups = await asyncio.to_thread(open_cgroups, self._run_id)
        self._stage = _stage_directory()
        self._sandboxes.open(self._cgroups.run if self._cgroups else run_name(self._run_id))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Destroy every sandbox and the run's cgroup; the first failure is raised at the end."""
        outcomes = await asyncio.gather(
            *(box.destroy() for box in list(self._sandboxes)), return_exceptions=True
        )
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close_run)
        self._sandboxes.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def create(self, spec: SandboxSpec) -> BwrapSandbox:
        """Start a sandbox.

        Raises:
            ImageError: the image or a layer is not a directory, or the image is no root filesystem.
            InfraError: bwrap, the kernel or a limit that cannot be enforced; text of the cause.
            CapacityError: no process could be started.
        """
        self._check_user(spec.user)
        plan = self._limits(spec)
        arguments = self._arguments(spec, plan)
        box = BwrapSandbox(spec, plan, self._sandboxes.forget)
        self._sandboxes.add(box, plan.directories if plan else ())
        try:
            await box.start(str(self._native.launcher), arguments)
        except BaseException:
            await box.destroy()
            raise
        return box

    def _check_user(self, user: int) -> None:
        if user not in (1, 2):
            raise InfraError(f"no uid {user} in a sandbox: user must be 1 or 2", cause="user")
        if user == 2 and not self._root:
            raise InfraError(
                "the program of an agent needs another uid than its commands, and a plain user can "
                "map one alone: start as root, or choose sandbox.backend=docker",
                cause="user",
            )

    def _limits(self, spec: SandboxSpec) -> CgroupPlan | None:
        if spec.network:
            raise InfraError(
                "the bwrap backend gives no network: set network=False", cause="network"
            )
        if self._cgroups is not None:
            return self._cgroups.plan(str(next(self._ids)), spec)
        text = (
            "no writable cgroup for memory, pids and cpu: limits would be rlimits per process and "
            "the CPU share would not be enforced"
        )
        if self._no_cgroups:
            text += f" ({self._no_cgroups})"
        if not spec.best_effort:
            raise InfraError(
                f"{text}; run as root, or accept this with sandbox.best_effort=True", cause="limits"
            )
        if not self._warned:
            warnings.warn(f"sandbox: {text} (best_effort)", stacklevel=3)
            self._warned = True
        return None

    def _arguments(self, spec: SandboxSpec, plan: CgroupPlan | None) -> list[str]:
        lowers = [*spec.layers, str(self._native.layer), spec.image]
        for path in (*spec.layers, spec.image, *([spec.shared] if spec.shared else ())):
            _check_directory(path)
        if not os.path.lexists(os.path.join(spec.image, "bin")):
            raise ImageError(f"image {spec.image} has no /bin: it is not a root filesystem")
        launcher = ["-s", self._stage, "-z", str(spec.disk_mb << 20), "-p", str(os.getpid())]
        launcher += ["-t", str(int(spec.lifetime_s * 1000))]
        for lower in lowers:
            launcher += ["-l", os.path.abspath(lower)]
        if spec.shared:
            launcher += ["-b", os.path.abspath(spec.shared)]
        for directory in plan.directories if plan else ():
            launcher += ["-c", directory]
        for write in plan.writes if plan else ():
            launcher += ["-w", write]
        if self._root:
            launcher += ["-m", str(UID_BASE)]
        return [*launcher, "--", *self._bwrap_command(spec), *self._supervisor(spec, plan)]

    def _bwrap_command(self, spec: SandboxSpec) -> list[str]:
        command = [self._bwrap, "--bind", "m", "/"]
        if spec.shared:
            command += ["--ro-bind", "b", SHARED]
        command += ["--proc", "/proc", "--dev", "/dev"]
        command += ["--size", str(64 << 20), "--tmpfs", "/dev/shm", "--chmod", "1777", "/dev/shm"]
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent"]
        command += ["--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
        for capability in _CAPS_TWO_UIDS if self._root else _CAPS_ONE_UID:
            command += ["--cap-add", capability]
        return [*command, "--chdir", "/"]

    def _supervisor(self, spec: SandboxSpec, plan: CgroupPlan | None) -> list[str]:
        command = ["/.skyrl/supervisor"]
        command += (
            ["--mode", "pid1", "--uid", str(spec.user)] if self._root else ["--mode", "pidns"]
        )
        if plan is None:
            command += ["--nproc", str(spec.pids), "--as", str(spec.memory_mb << 20)]
        return command


def _check_directory(path: str) -> None:
    try:
        info = os.stat(path)
    except OSError as error:
        raise ImageError(f"sandbox layer or image {path}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise ImageError(f"sandbox layer or image {path} is not a directory")


class BwrapSandbox:
    """One sandbox. Made by ``BwrapProvider.create``."""

    def __init__(
        self,
        spec: SandboxSpec,
        plan: CgroupPlan | None,
        forget: Callable[[BwrapSandbox, bool], None],
    ) -> None:
        """Keep the spec; ``start`` does the work."""
        self._spec = spec
        self._env = {**BASE_ENV, **spec.env}
        self._plan = plan
        self._oom = OomCounter(())
        self._forget = forget
        self._pid = 0
        self._code: int | None = None
        self._channel: SupervisorChannel | None = None
        self._destroyed: asyncio.Task[None] | None = None

    async def start(self, launcher: str, arguments: Sequence[str]) -> None:
        """Spawn the chain of processes and wait for the supervisor's first word."""
        self._pid, ours = spawn(launcher, arguments, new_session=False)  # it does so itself
        self._channel = SupervisorChannel()
        await self._channel.attach(ours, START_TIMEOUT_S)
        self._oom = OomCounter((self._plan.oom_file,) if self._plan else ())

    async def _open_channel(self) -> SupervisorChannel:
        if self._channel is None or self._destroyed is not None:
            raise SandboxGone("the sandbox is destroyed")
        if self._channel.closed.done():
            raise await self._end_cause()
        return self._channel

    async def _end_cause(self) -> Exception:
        if self._destroyed is not None:
            return SandboxGone("the sandbox was destroyed while a command ran")
        killed = self._oom.rose()
        with contextlib.suppress(TimeoutError):  # it closes the channel just before it ends
            await self._wait_launcher(_VERDICT_TIMEOUT_S)
        words = self._channel.last_words if self._channel else ""
        if self._code == _LIFETIME:
            return SandboxTimeout(f"the sandbox ended after its {self._spec.lifetime_s:.0f} s")
        if self._code is None:  # nothing says why
            return SandboxGone(f"the sandbox ended {words}".rstrip(), certain=killed)
        if self._code == _ENDED_INSIDE:
            return SandboxGone(f"the sandbox ended from inside {words}".rstrip())
        return InfraError(f"the sandbox's launcher ended with {self._code} {words}".rstrip())

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
                env={**self._env, **env} if env else self._env,
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
        """End the sandbox; returns when nothing of it is left on the host. Idempotent."""
        if self._destroyed is None:
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        left = True
        try:
            if self._channel is not None:
                self._channel.write_eof()
                async with asyncio.timeout(DESTROY_TIMEOUT_S):
                    await self._channel.closed
            await self._wait_launcher(DESTROY_TIMEOUT_S)
            if self._code not in (0, _ENDED_INSIDE, _LIFETIME, None):
                await self._clean_up_for_the_launcher()
            left = False
        except TimeoutError as error:
            raise InfraError(
                f"a sandbox did not end within {DESTROY_TIMEOUT_S:.0f} s", cause="destroy"
            ) from error
        finally:
            self._oom.close()
            if self._channel is not None:
                self._channel.abort()
            self._forget(self, left)

    async def _clean_up_for_the_launcher(self) -> None:
        """The watcher itself was killed, or gave up: do its work."""
        for directory in self._plan.directories if self._plan else ():
            if not await asyncio.to_thread(remove_tree, Path(directory)):
                raise InfraError(f"a sandbox left processes in {directory}", cause="destroy")

    def _reap(self) -> bool:
        if self._pid and self._code is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # somebody else collected it: the exit code is lost
                pid, status = self._pid, 0
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None or not self._pid

    async def _wait_launcher(self, timeout_s: float) -> None:
        pause = 0.0002
        async with asyncio.timeout(timeout_s):
            while not self._reap():
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.05)


def _stage_directory() -> str:
    """Return the mount point for sandbox roots: empty on the host for ever, shared by all runs.

    It must be reachable for every uid, so it cannot lie in a private home or cache.
    """
    path = os.path.join(tempfile.gettempdir(), f"skyrl-stage-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise InfraError(f"{path} is not a directory of this user: remove it", cause="stage")
    os.chmod(path, 0o755)
    return path
