"""Compile a plan in a process of its own: libtpu hangs at exit and must not see a real chip."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import ConfigError, SkyrlError
from skyrl_jax.plan.chips import Topology
from skyrl_jax.plan.job import Compiled, PlanJob

# Last line of a child's output: "<mark> config|error|result <text>".
MARK = "skyrl-plan"
_ROOT = Path(__file__).resolve().parents[2]


def compile_job(job: PlanJob, timeout_s: float = 1800.0) -> Compiled:
    """Lower and compile a step in a child process.

    Raises:
        ConfigError: libtpu is not installed, or the mesh does not suit the model or topology.
        SkyrlError: the compiler failed for another reason than memory, or took too long.
    """
    if job.topology.is_tpu:
        require_libtpu()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "skyrl_jax.plan.compile"],
            input=pickle.dumps(job),
            env=child_env(job.topology),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SkyrlError(
            f"the compile for {job.topology.text} did not end within {timeout_s:.0f} s"
        ) from None
    lines = done.stdout.decode(errors="replace").splitlines()
    last = lines[-1] if lines else ""
    mark, kind, text = (*last.split(" ", 2), "", "")[:3]
    if mark != MARK:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-5:]
        raise SkyrlError(
            f"the compile for {job.topology.text} ended with code {done.returncode}: "
            + " | ".join(tail)
        )
    if kind == "config":
        raise ConfigError(text)
    if kind == "error":
        raise SkyrlError(f"the compiler refused the program for {job.topology.text}: {text}")
    return Compiled.from_json(text)


def require_libtpu(find: Callable[[str], Any] = importlib.util.find_spec) -> None:
    """Say what to install where the TPU compiler is missing.

    Raises:
        ConfigError: no package ``libtpu``.
    """
    if find("libtpu") is None:
        raise ConfigError(
            "TPU topologies need the TPU compiler, the package libtpu, which is not installed: "
            "pip install -e '.[plan]'"
        )


def libtpu_env() -> dict[str, str]:
    """Return the environment of a process that compiles for TPUs that are not here.

    jax itself runs on the CPU; a TPU's compiler is asked by name, and must neither look for chips
    here nor mind another process that uses it. Programs of a machine that is not here are not
    worth caching.
    """
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
    return dict(os.environ) | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def child_env(topology: Topology) -> dict[str, str]:
    """Return the environment of a child that compiles for a topology."""
    env = libtpu_env()
    if not topology.is_tpu:
        # The estimate needs no fast code.
        env["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={topology.num_devices} "
            "--xla_backend_optimization_level=0"
        )
    return env
