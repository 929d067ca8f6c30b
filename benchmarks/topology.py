"""Compile for a TPU that is not here: a benchmark runs itself again as a child with libtpu.

In a process of its own, for libtpu hangs at exit and must not look for chips.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHILD = "--child"


def run_child(script: str, argv: Sequence[str], timeout_s: float = 600.0) -> dict[str, Any]:
    """Run ``script --child argv`` and return the JSON object of its last line.

    Raises:
        RuntimeError: libtpu is not installed, or the child failed; says how.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError("needs the TPU compiler: pip install libtpu==0.0.42.1 (jax 0.10.2)")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, script, CHILD, *argv],
        env=env,
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
    from jax.experimental import topologies

    from skyrl_jax.core.config import MeshConfig
    from skyrl_jax.models.sharding import make_mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    axes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1} | sizes
    return make_mesh(MeshConfig(**axes), devices)


def leave(result: dict[str, Any]) -> None:
    """Print the result and end the child at once."""
    print(json.dumps(result), flush=True)
    os._exit(0)
