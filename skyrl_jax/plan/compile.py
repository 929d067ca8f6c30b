"""The child's side: the job's own train step, lowered for a topology and compiled.

Run by plan/child.py as ``python -m skyrl_jax.plan.compile`` with a pickled PlanJob on its input.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import signal
import sys
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.state import HOST_MEMORY, TrainState, abstract_state, placed, state_shardings
from skyrl_jax.learner.step import make_train_step
from skyrl_jax.models.sharding import make_mesh, row_sharding
from skyrl_jax.plan.child import MARK
from skyrl_jax.plan.chips import GIB
from skyrl_jax.plan.hlo import read_collectives
from skyrl_jax.plan.job import Compiled, PlanJob, reference_bytes
from skyrl_jax.plan.memory import read_oom
from skyrl_jax.plan.topology import devices_per_chip, open_devices

_PR_SET_PDEATHSIG = 1


def compile_here(job: PlanJob) -> Compiled:
    """Compile a job's step in this process.

    Raises:
        ConfigError: the mesh does not suit the model or the topology.
        jax.errors.JaxRuntimeError: the compiler failed for another reason than memory.
    """
    devices = open_devices(job.topology)
    mesh = make_mesh(job.mesh, devices)
    state, batch = abstract_arguments(job, mesh)
    step: Any = make_train_step(job.model, job.learner, job.objective, mesh)
    lowered = step.lower(state, batch)
    params, optimizer = _bytes(state.params), _bytes(state.opt_state)
    reference = reference_bytes(job.learner, job.objective, params)
    known: dict[str, Any] = {
        "mesh": dict(mesh.shape),
        "devices_per_chip": devices_per_chip(devices),
        "params": params,
        "optimizer": optimizer,
        "reference": reference,
    }
    began = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        oom = read_oom(str(error))
        if oom is None:
            raise
        arguments = params + optimizer + _bytes((state.step, batch))
        return Compiled(
            fits=False,
            message=oom.words,
            arguments=arguments,
            temporaries=max(0, oom.total - arguments),
            peak=oom.total,
            hbm=oom.available,
            collectives=(),
            seconds=time.monotonic() - began,
            **known,
        )
    stats = compiled.memory_analysis()
    # What is not donated is returned beside the arguments.
    beside = stats.output_size_in_bytes - stats.alias_size_in_bytes
    whole = stats.argument_size_in_bytes + beside + stats.temp_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0) if job.topology.is_tpu else 0
    usable = int(job.topology.chip.usable_gib * GIB) // job.topology.chip.devices
    peak = int(peak or whole)
    return Compiled(
        # The compiler's word is the last one, unless it does not know of the reference.
        fits=(job.topology.is_tpu and not reference) or peak + reference <= usable,
        message="",
        arguments=int(stats.argument_size_in_bytes),
        # Not the compiler's own sum, which counts buffers that are never alive at once.
        temporaries=max(0, peak - int(stats.argument_size_in_bytes)),
        peak=peak,
        hbm=0,
        collectives=tuple(read_collectives(compiled.as_text())),
        seconds=time.monotonic() - began,
        **known,
    )


def abstract_arguments(job: PlanJob, mesh: jax.sharding.Mesh) -> tuple[TrainState, Batch]:
    """Return the step's arguments as shapes, dtypes and places: a state and one micro-batch.

    The batch has the channels that a run's own batches have (train/policy.py adds the log-probs
    of the params before the first update; a KL term needs those of the reference).
    """
    shardings = state_shardings(job.model, job.learner, mesh)
    state: TrainState = placed(abstract_state(job.model, job.learner), shardings)
    shape = (job.learner.micro_rows, job.learner.row_length)
    where = row_sharding(mesh, shape)

    def array(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    channels = ["proximal_logprobs"] + ["ref_logprobs"] * bool(job.objective.kl_coef)
    batch = Batch(
        tokens=array(jnp.int32),
        segment_ids=array(jnp.int32),
        positions=array(jnp.int32),
        behavior_logprobs=array(jnp.float32),
        advantages=array(jnp.float32),
        loss_weights=array(jnp.float32),
        temperature=array(jnp.float32),
        channels={name: array(jnp.float32) for name in channels},
    )
    return state, batch


def _bytes(tree: Any) -> int:
    """Return the bytes of one device's part of placed shapes, without what lies on its host."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )


def main() -> None:
    """Compile the job on stdin, print the answer as the last line, and end."""
    if sys.platform == "linux":  # a compile of minutes must not outlive whoever waits for it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    job = pickle.load(sys.stdin.buffer)
    try:
        answer = f"result {compile_here(job).to_json()}"
    except ConfigError as error:
        answer = f"config {_one_line(error)}"
    except jax.errors.JaxRuntimeError as error:
        answer = f"error {_one_line(error)}"
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print(f"{MARK} {answer}", flush=True)
    os._exit(0)  # libtpu hangs when a process ends as usual


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:2000]


if __name__ == "__main__":
    main()
