"""Who is there, before JAX asks: it ends a process that waited in vain, without naming anybody.

Each process keeps FOLDER/roll-I.json = {"nonce": its own, "seen": {J: nonce of process J}}. Process
J is there when its file has this process's nonce: a file of an earlier start cannot.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import PeerError
from skyrl_jax.learner.agreement import processes
from skyrl_jax.learner.waiting import Tell, say, waiting


def call_roll(folder: Path, index: int, count: int, *, timeout_s: float, tell: Tell = say) -> None:
    """Return when all processes are there.

    Args:
        folder: one that all see; made if absent.
        index: which process this is, 0 .. count - 1.
        count: how many there are.
        timeout_s: how long to wait for the others.
        tell: gets lines that say who is missing (``waiting.waiting``).

    Raises:
        PeerError: names the missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    nonce = secrets.token_hex(8)
    others = [other for other in range(count) if other != index]
    absent = others
    until = time.monotonic() + timeout_s
    written: Any = None

    def missing() -> str:
        return f"{processes(absent)} not come to {folder}"

    with waiting(missing, timeout_s, tell=tell):
        while True:
            files = {other: _read(folder / f"roll-{other}.json") for other in others}
            mine = {
                "nonce": nonce,
                "seen": {str(other): files[other].get("nonce", "") for other in others},
            }
            if mine != written:  # also before leaving: another may still wait for its nonce
                _write(folder / f"roll-{index}.json", mine)
                written = mine
            absent = [o for o in others if files[o].get("seen", {}).get(str(index)) != nonce]
            if not absent:
                return
            if time.monotonic() > until:
                raise PeerError(
                    f"{missing()} within {timeout_s:g} s; start all {count} processes, each with "
                    "its own --process_id and all with one --workdir on a file system that they "
                    "share"
                )
            time.sleep(0.1)


def _read(path: Path) -> dict[str, Any]:
    """Return what another process has written; nothing where there is no whole file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)
