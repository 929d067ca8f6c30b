"""Removes what dead owners left of their sandboxes, of every backend, and nothing of the living.

Most of it is never needed: a bwrap sandbox is ended by its launcher, a container by the end of its
input. It is for what they cannot do: the launcher itself was killed, the daemon was away, the
supervisor of the process backend was killed before its commands.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import InfraError
from skyrl_jax.sandbox.cgroup import CgroupTree, find_cgroups, owner_alive, remove_tree
from skyrl_jax.sandbox.docker_daemon import find_daemon
from skyrl_jax.sandbox.orphans import end_orphan
from skyrl_jax.sandbox.registry import Run, registry_folder, runs

LABEL_RUN = "skyrl.run"
LABEL_HOST = "skyrl.boot"
LABEL_UID = "skyrl.uid"
PROCESS_PREFIX = "skyrl-process-"
_DAEMON_TIMEOUT_S = 5.0
_FORGET_S = 24 * 3600.0  # how long a run of a daemon that is not there any more is kept
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What a dead owner left.

    Args:
        backend: "bwrap", "docker" or "process".
        run: the dead run's name.
        what: the cgroup directory, container or folder.
        problem: why it could not be removed ("" = it is gone, or nobody has tried).
    """

    backend: str
    run: str
    what: str
    problem: str = ""


def boot_id() -> str:
    """Return the identity of this boot of the host: pids mean something within it alone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def reap(*, remove: bool = True, strays: bool = False) -> list[Leftover]:
    """Find what dead owners left and remove it; block until it is gone.

    Args:
        remove: False only looks.
        strays: also look where no run's file leads: cgroups, folders and containers by their names
            and labels (of this user's dead owners, on this host).
    """
    found: list[Leftover] = []
    for run in runs():
        if not run.alive:
            found += _reap_run(run, remove)
    for draft in registry_folder().glob("*.new"):  # killed between two lines of Book.open
        if not owner_alive(draft.stem):
            draft.unlink(missing_ok=True)
    if strays:
        seen = {(item.backend, item.what) for item in found}
        found += [item for item in _strays(remove) if (item.backend, item.what) not in seen]
    return found


def _reap_run(run: Run, remove: bool) -> list[Leftover]:
    backend = _BACKENDS.get(run.backend)
    if backend is None:  # another program's, or damaged: nothing here knows how
        return []
    try:
        found = list(backend(run, remove))
    except Unreachable as error:
        if time.time() - run.since > _FORGET_S:
            run.path.unlink(missing_ok=True)
            return []
        what = f"{len(run.open)} containers at {run.where}"
        return [Leftover(backend="docker", run=run.run, what=what, problem=str(error))]
    if remove and not any(item.problem for item in found):
        run.path.unlink(missing_ok=True)
    return found


class Unreachable(Exception):
    """A docker daemon does not answer."""


def _bwrap(run: Run, remove: bool) -> Iterator[Leftover]:
    for traces in run.open.values():
        for trace in map(Path, traces):
            ours = trace.name.startswith(run.run + ".") and trace.is_relative_to(_CGROUPS)
            if ours and trace.is_dir():
                yield _removed("bwrap", run.run, trace, remove_tree, remove)


def _process(run: Run, remove: bool) -> Iterator[Leftover]:
    for traces in run.open.values():
        for trace in map(Path, traces):
            if trace.name.startswith(PROCESS_PREFIX) and _left_of_folder(trace):
                yield _removed("process", run.run, trace, _remove_folder, remove)


def _docker(run: Run, remove: bool) -> Iterator[Leftover]:
    if not run.open:
        return
    with _daemon(run.where) as client:
        yield from _containers(client, lambda labels: labels.get(LABEL_RUN) == run.run, remove)
    for container in {trace for traces in run.open.values() for trace in traces}:
        if remove and end_orphan(container):
            what = f"container {container[:12]}, which its daemon has forgotten"
            yield Leftover(backend="docker", run=run.run, what=what)


_BACKENDS: Mapping[str, Callable[[Run, bool], Iterator[Leftover]]] = {
    "bwrap": _bwrap,
    "docker": _docker,
    "process": _process,
}


def _removed(
    backend: str, run: str, path: Path, work: Callable[[Path], bool], remove: bool
) -> Leftover:
    problem = "" if not remove or work(path) else "processes in it do not end"
    return Leftover(backend=backend, run=run, what=str(path), problem=problem)


def _left_of_folder(folder: Path) -> bool:
    return folder.is_dir() or bool(_at_home_in(folder))


def _at_home_in(folder: Path) -> list[int]:
    """Return the pids whose HOME is a sandbox's folder: commands that lost their supervisor."""
    mark = f"HOME={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone meanwhile
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _remove_folder(folder: Path) -> bool:
    deadline = time.monotonic() + 3.0
    while pids := _at_home_in(folder):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@contextlib.contextmanager
def _daemon(address: str) -> Iterator[Any]:
    """Yield a client of a daemon that answers.

    Raises:
        Unreachable: it does not.
    """
    path = address.removeprefix("unix://")
    if path != address and not os.path.exists(path):
        raise Unreachable(f"no docker daemon at {address}")
    import docker
    import docker.errors
    import requests.exceptions

    try:
        client = docker.APIClient(base_url=address, timeout=_DAEMON_TIMEOUT_S, version="auto")
        try:
            yield client
        finally:
            client.close()
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise Unreachable(f"docker at {address}: {error}") from error


def _containers(
    client: Any, ours: Callable[[Mapping[str, str]], bool], remove: bool
) -> Iterator[Leftover]:
    for found in client.containers(all=True, filters={"label": LABEL_RUN}):
        if ours(found["Labels"]):
            problem = remove_container(client, found["Id"]) if remove else ""
            yield Leftover(
                backend="docker",
                run=found["Labels"][LABEL_RUN],
                what=f"container {found['Id'][:12]}",
                problem=problem,
            )


def remove_container(client: Any, container: str) -> str:
    """Remove a container; return what the daemon says against it ("": gone, or going already)."""
    import docker.errors

    try:
        client.remove_container(container, force=True, v=True)
    except docker.errors.NotFound:
        return ""
    except docker.errors.APIError as error:
        if error.status_code != 409:  # 409: auto-removal is on its way
            return str(error)
    return ""


def is_dead(labels: Mapping[str, str]) -> bool:
    """Say whether a container's labels name a dead owner: of this user, on this boot of the host.

    Containers of before there was a label of the user count as this user's.
    """
    return (
        labels.get(LABEL_HOST) == boot_id()
        and labels.get(LABEL_UID, str(os.geteuid())) == str(os.geteuid())
        and not owner_alive(labels.get(LABEL_RUN, ""))
    )


def _strays(remove: bool) -> Iterator[Leftover]:
    tree = find_cgroups("doctor")
    for directory in _dead_cgroups(tree) if tree else ():
        yield _removed("bwrap", directory.name, directory, remove_tree, remove)
    yield from _stray_folders(remove)
    with contextlib.suppress(Unreachable, InfraError), _daemon(find_daemon(os.environ)) as client:
        yield from _containers(client, is_dead, remove)


def reap_folders() -> None:
    """Remove the process backend's folders of dead owners, listed or not."""
    for _ in _stray_folders(remove=True):
        pass


def _stray_folders(remove: bool) -> Iterator[Leftover]:
    for folder in Path(tempfile.gettempdir()).glob(f"{PROCESS_PREFIX}*.*"):
        run = folder.name.partition(".")[2]
        if folder.lstat().st_uid == os.geteuid() and not owner_alive(run):
            yield _removed("process", run, folder, _remove_folder, remove)


def _dead_cgroups(tree: CgroupTree) -> Iterator[Path]:
    for root in tree.roots:
        for directory in (root / "skyrl").glob("*.*"):
            mine = directory.is_dir() and directory.stat().st_uid == os.geteuid()
            if mine and not owner_alive(directory.name):
                yield directory
