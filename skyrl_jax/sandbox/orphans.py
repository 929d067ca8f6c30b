"""Containers that their own daemon has forgotten.

A docker daemon that is killed (SIGKILL, out of memory) while it starts a container may come back
without it, while containerd still runs it: no call to the daemon reaches it any more. Its
lifetime would end it (``--life``), but not the process that containerd holds for it. Both are ended
here, found by the container's id; only root can, and only on the daemon's own host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_SHIM = "containerd-shim"
_LAG_S = 1.0  # from a container's removal to the end of its shim, where all is well


def end_orphan(container: str) -> bool:
    """End what still runs of a container that its daemon does not know; say if there was any.

    Blocks for up to a second or two: call it in a thread.

    Args:
        container: the full id.
    """
    deadline = time.monotonic() + _LAG_S
    while shims := list(_shims(container)):
        if time.monotonic() > deadline:
            for shim in shims:
                root = _root_of(shim)
                for pid in (*_children(shim), shim):
                    with contextlib.suppress(OSError):  # ended, or not ours to end
                        os.kill(pid, signal.SIGKILL)
                if root:
                    subprocess.run(["umount", "-l", root], capture_output=True, timeout=10)
            return True
        time.sleep(0.1)
    return False


def _shims(container: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                if _SHIM in words[0] and container in words:
                    yield int(entry.name)


def _root_of(shim: int) -> str:
    """Return the mount point of a container's root, from the bundle that its shim works in."""
    try:
        bundle = json.loads(Path(f"/proc/{shim}/cwd/config.json").read_text())
        root = bundle["root"]["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return root if isinstance(root, str) and root.endswith("/merged") else ""


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == parent:
                    found.append(int(entry.name))
    return found
