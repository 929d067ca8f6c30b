"""Limits by cgroup: which files to write for a sandbox, and how to read its own OOM counter."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from skyrl_jax.core.protocols import ExecResult, SandboxSpec

_PARENT = "skyrl"
_V1 = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_REMOVE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupPlan:
    """What the launcher makes, writes and removes for one sandbox, and the file that counts OOM."""

    directories: tuple[str, ...]
    writes: tuple[str, ...]
    oom_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupTree:
    """The writable cgroup hierarchy of this host.

    Args:
        roots: one directory (v2) or one per controller (v1, in the order memory, pids, cpu).
        version: 1 or 2.
        run: name of this process's share of a run; see ``run_name``.

    A sandbox's directory is ``skyrl/<run>.<sandbox id>``. There is none for the run itself: with no
    sandbox alive nobody would be left to remove it when the owner is killed.
    """

    roots: tuple[Path, ...]
    version: int
    run: str

    def plan(self, sandbox_id: str, spec: SandboxSpec) -> CgroupPlan:
        """Return the directories and values that enforce ``spec``."""
        paths = [root / _PARENT / f"{self.run}.{sandbox_id}" for root in self.roots]
        memory = spec.memory_mb << 20
        quota = max(1000, int(spec.cpus * _PERIOD_US))
        if self.version == 2:
            (path,) = paths
            writes = [
                (path / "memory.max", str(memory)),
                (path / "pids.max", str(spec.pids)),
                (path / "cpu.max", f"{quota} {_PERIOD_US}"),
            ]
            oom = path / "memory.events"
        else:
            writes = [
                (paths[0] / "memory.limit_in_bytes", str(memory)),
                (paths[1] / "pids.max", str(spec.pids)),
                (paths[2] / "cpu.cfs_quota_us", str(quota)),
            ]
            oom = paths[0] / "memory.oom_control"
        return CgroupPlan(
            directories=tuple(map(str, paths)),
            writes=tuple(f"{path}={value}" for path, value in writes),
            oom_file=str(oom),
        )

    def open_run(self) -> None:
        """Make the directory that all runs share (v2: hand the controllers down)."""
        for root in self.roots:
            (root / _PARENT).mkdir(exist_ok=True)
            if self.version == 2:
                for level in (root, root / _PARENT):
                    (level / "cgroup.subtree_control").write_text("+memory +pids +cpu")

    def close_run(self) -> None:
        """Remove what the run's sandboxes left (nothing when every one was destroyed)."""
        for root in self.roots:
            for left in (root / _PARENT).glob(f"{self.run}.*"):
                remove_tree(left)

    def reap(self) -> int:
        """Remove what dead runs left here; returns how many directories went."""
        removed = 0
        for root in self.roots:
            parent = root / _PARENT
            for run in parent.iterdir() if parent.is_dir() else ():
                if run.is_dir() and not owner_alive(run.name):
                    removed += remove_tree(run)
        return removed


def find_cgroups(run_id: str, root: Path = Path("/sys/fs/cgroup")) -> CgroupTree | None:
    """Return the hierarchy this process may write to, or ``None``."""
    run = run_name(run_id)
    if (root / "cgroup.controllers").exists():
        have = set((root / "cgroup.controllers").read_text().split())
        usable = {"memory", "pids", "cpu"} <= have and os.access(root, os.W_OK)
        return CgroupTree(roots=(root,), version=2, run=run) if usable else None
    roots = tuple(root / controller for controller in _V1)
    if all(path.is_dir() and os.access(path, os.W_OK) for path in roots):
        return CgroupTree(roots=roots, version=1, run=run)
    return None


def open_cgroups(run_id: str, root: Path = Path("/sys/fs/cgroup")) -> tuple[CgroupTree | None, str]:
    """Return this run's hierarchy, made and ready; or ``None`` and what the kernel refused.

    A hierarchy that looks writable need not be: v2 refuses subtree_control (EBUSY) where processes
    lie beside the run's directory, and containers mount it read-only or without the right.
    """
    tree: CgroupTree | None = None
    try:
        tree = find_cgroups(run_id, root)
        if tree is not None:
            tree.reap()
            tree.open_run()
        return tree, ""
    except OSError as error:
        if tree is not None:
            with contextlib.suppress(OSError):
                tree.close_run()
        return None, f"{error.filename or root}: {error.strerror}"


def run_name(run_id: str) -> str:
    """Return a new name for this process's share of a run.

    ``<run id>.<owner pid>.<owner start>.<random>-<pid namespace>``: a pid means something within
    its namespace alone, and a folder or daemon may be shared with another container's runs.
    """
    clean = "".join(char if char.isalnum() or char in "-_" else "-" for char in run_id)[:80]
    mark = f"{secrets.token_hex(3)}-{pid_namespace()}"
    return f"{clean}.{os.getpid()}.{_start_time(os.getpid())}.{mark}"


def pid_namespace() -> str:
    """Return the number of this process's pid namespace."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def owner_alive(name: str) -> bool:
    """Say whether the process in a run or sandbox name still lives (pid and start time agree)."""
    parts = name.split(".")
    if len(parts) not in (4, 5) or not parts[1].isdigit():
        return True  # not ours: leave it alone
    if parts[3].partition("-")[2] not in ("", pid_namespace()):
        return True  # another container's: nobody here can tell
    return _start_time(int(parts[1])) == parts[2]


def sweep_folders(prefix: str) -> list[Path]:
    """Remove temporary folders of dead owners, named ``<prefix><random>.<run name>``."""
    dead = [
        path
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*.*")
        if not owner_alive(path.name.partition(".")[2])
    ]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return dead


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def remove_tree(directory: Path) -> bool:
    """Kill every member of a cgroup directory tree and remove it; False when something is left.

    Blocks for up to ``_REMOVE_TIMEOUT_S`` while killed processes end: call it in a thread.
    """
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while directory.is_dir():
        for child in directory.iterdir():
            if child.is_dir():
                remove_tree(child)
        for pid in _members(directory):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            directory.rmdir()
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _members(directory: Path) -> list[int]:
    try:
        return [int(pid) for pid in (directory / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def oom_kills(data: bytes) -> int:
    """Read ``oom_kill`` out of memory.oom_control (v1) or memory.events (v2)."""
    for line in data.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill":
            return int(value)
    return 0


class OomCounter:
    """The OOM-kill counter of one sandbox's own cgroup; without a readable file it stays silent.

    Args:
        candidates: where the counter may lie; the first file that opens is used.
    """

    def __init__(self, candidates: Iterable[str]) -> None:
        """Open the counter and keep it open: it is read after every command."""
        self._fd = -1
        self._seen = 0
        for path in candidates:
            with contextlib.suppress(OSError):
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                break

    def mark(self, result: ExecResult) -> ExecResult:
        """Return the result with ``oom_killed`` set when the counter rose since the last call."""
        return dataclasses.replace(result, oom_killed=True) if self.rose() else result

    def rose(self) -> bool:
        """Say whether the kernel killed something here for memory since the last call."""
        if self._fd < 0:
            return False
        try:
            count = oom_kills(os.pread(self._fd, 4096, 0))
        except OSError:  # the cgroup went away with its sandbox
            return False
        rose, self._seen = count > self._seen, max(count, self._seen)
        return rose

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
