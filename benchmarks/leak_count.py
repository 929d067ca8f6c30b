"""Counts what a leak test's sandboxes left on the host, by looking at the kernel and the daemon."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

from skyrl_jax.sandbox.registry import read_run
from tests.sandbox.dockerd import PrivateDaemon

_CGROUPS = Path("/sys/fs/cgroup")


def processes() -> Iterator[tuple[int, list[str]]]:
    """Yield (pid, words of the command line) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                yield int(entry.name), words


def launchers_of(owner: int) -> list[int]:
    """Return the pids of the launchers of an owner's bwrap sandboxes."""
    return [
        pid
        for pid, words in processes()
        if words[0] == "launcher" and "-p" in words and words[words.index("-p") + 1] == str(owner)
    ]


def supervisors_of(launchers: Collection[int]) -> list[int]:
    """Return the pids of the supervisors below launchers."""
    parents = {}
    for pid, words in processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            parents[pid] = (int(stat[1]), words[0])
    found = []
    for pid, (_, name) in parents.items():
        above = pid
        while above in parents and above not in launchers:
            above = parents[above][0]
        if name == "/.skyrl/supervisor" and above in launchers:
            found.append(pid)
    return found


def find_left(
    temporary: Path,
    daemon: PrivateDaemon,
    owners: Collection[int],
    containers: Collection[str],
    *,
    listed_too: bool = True,
) -> dict[str, list[str]]:
    """Name what is left of the sandboxes of dead owners.

    Args:
        temporary: the owners' temporary folder.
        daemon: the docker daemon, which is this test's own.
        owners: pids.
        containers: ids of every container that a sandbox had.
        listed_too: also what only stands in the runs' files, which a reaper alone clears.
    """
    names = [f"leak{os.getpid()}.{owner}." for owner in owners]
    listed = subprocess.run(
        ["docker", "-H", daemon.host, "ps", "-aq"], capture_output=True, timeout=60, check=True
    )
    registry = temporary / f"skyrl-sandboxes-{os.geteuid()}"
    files = registry.glob("*.jsonl") if listed_too else ()
    told = [run for path in files if (run := read_run(path)) is not None]
    kept = {registry, temporary / f"skyrl-stage-{os.geteuid()}"}
    open_ones = [f"{run.run} {number}" for run in told for number in run.open]
    return {
        "sandboxes": listed.stdout.decode().split() + open_ones,
        "mounts": sorted(_mounts(temporary, daemon)),
        "cgroups": _cgroups(names, containers),
        "processes": _processes(temporary, daemon, names, containers),
        "folders": [str(path) for path in temporary.iterdir() if path not in kept]
        + [str(run.path) for run in told],
        "sockets": _sockets(temporary),
    }


def _mounts(temporary: Path, daemon: PrivateDaemon) -> set[str]:
    """Return mounts of sandboxes, over every mount namespace that a process holds."""
    found: set[str] = set()
    seen = set()
    for pid, _ in processes():
        with contextlib.suppress(OSError):
            space = os.readlink(f"/proc/{pid}/ns/mnt")
            if space not in seen:
                seen.add(space)
                for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
                    point = line.split()[4]
                    stage = point.startswith(str(temporary))
                    merged = point.startswith(f"{daemon.home}/root/overlay2/")
                    # a namespace that was copied while another sandbox lived holds no more than
                    # a name; what is mounted on this host is what counts for a container
                    if stage or (merged and space == os.readlink("/proc/self/ns/mnt")):
                        found.add(f"{space} {point}")
    return found


def _cgroups(names: Collection[str], containers: Collection[str]) -> list[str]:
    roots = [root for root in (_CGROUPS, *_CGROUPS.glob("*/")) if root.is_dir()]
    found = []
    for root in roots:
        ours = (root / "skyrl").glob("leak*")
        found += [str(path) for path in ours if path.name.startswith(tuple(names))]
        found += [str(path) for path in (root / "docker").glob("*/") if path.name in containers]
    return found


def _processes(
    temporary: Path, daemon: PrivateDaemon, names: Collection[str], containers: Collection[str]
) -> list[str]:
    found = []
    for pid, words in processes():
        line = " ".join(words)
        with contextlib.suppress(OSError):
            groups = Path(f"/proc/{pid}/cgroup").read_text()
            ours = any(f"/skyrl/{name}" in groups for name in names)
            held = any(container in groups for container in containers)
            shim = "containerd-shim" in words[0] and f"{daemon.home}/" in line
            launcher = words[0] == "launcher" and str(temporary) in line
            if ours or held or shim or launcher:
                found.append(line)
    return found


def _sockets(temporary: Path) -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    bound = [line.split()[7] for line in lines if len(line.split()) > 7]
    files = [str(path) for path in temporary.rglob("*") if path.is_socket()]
    return [path for path in bound if path.startswith(str(temporary))] + files
