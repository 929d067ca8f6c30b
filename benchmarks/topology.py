"""Compile for a TPU that is not here: a benchmark runs itself again as a child with libtpu.

In a process of its own, for libtpu hangs at exit and must not look for chips.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from skyrl_jax.plan.child import libtpu_env, require_libtpu
from skyrl_jax.plan.chips import parse_topology

CHILD = "--child"


def run_child(script: str, argv: Sequence[str], timeout_s: float = 600.0) -> dict[str, Any]:
    """Run ``script --child argv`` and return the JSON object of its last line.

    Raises:
        ConfigError: libtpu is not installed.
        RuntimeError: the child failed; says how.
    """
    require_libtpu()
    done = subprocess.run(
        [sys.executable, script, CHILD, *argv],
        env=libtpu_env(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{script} ended with {done.returncode}: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def open_mesh(topology: str, **sizes: int) -> Any:
    """Return a mesh over (some of) the devices of a topology, in the child alone."""
    from skyrl_jax.core.config import MeshConfig
    from skyrl_jax.models.sharding import make_mesh
    from skyrl_jax.plan.topology import open_devices

    devices = open_devices(parse_topology(topology))
    axes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1} | sizes
    return make_mesh(MeshConfig(**axes), devices)


def leave(result: dict[str, Any]) -> None:
    """Print the result and end the child at once."""
    print(json.dumps(result), flush=True)
    os._exit(0)
