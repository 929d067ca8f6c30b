"""Our side of the learner benchmark: the train step of the job, on one packed batch."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from turns import Prepared, resident_peak, serve

from configs.swe import get_config
from skyrl_jax.core.config import RunConfig, parse_config
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.flops import step_flops
from skyrl_jax.learner.state import init_state
from skyrl_jax.learner.step import make_train_step


def prepare(job: Mapping[str, Any]) -> Prepared:
    """Make the state, the step and the batch of a shape."""
    config = run_config(job)
    batch = make_batch(job)
    train_step = make_train_step(config.model, config.learner, config.objective)
    state = init_state(config.model, config.learner, jax.random.key(0))
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    rows, length = batch.tokens.shape
    about = {
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")},
        "device": jax.devices()[0].device_kind,
        "params": params,
        "step_flops": step_flops(config.model, [length] * rows),
    }
    return Prepared(
        step=step, about=about, roof=lambda: matmul_roof(job["dtype"], job["roof_size"]), peak=peak
    )


def run_config(job: Mapping[str, Any]) -> RunConfig:
    """Return the quick start's configuration with the benchmark's shape and recipe."""
    base = parse_config(get_config("quickstart").to_dict())
    model = dataclasses.replace(
        base.model,
        vocab_size=job["vocab"],
        hidden_size=job["dim"],
        num_layers=job["layers"],
        num_heads=job["heads"],
        num_kv_heads=job["kv_heads"],
        head_dim=job["head_dim"],
        intermediate_size=job["ffn"],
        tie_embeddings=True,
        max_position=job["prompt"] + job["completion"],
    )
    learner = dataclasses.replace(
        base.learner,
        lr=1e-5,
        weight_decay=0.01,
        max_grad_norm=1.0,
        compute_dtype=job["dtype"],
        row_length=job["prompt"] + job["completion"],
        micro_rows=job["micro_rows"],
        logprob_chunk=job["logprob_chunk"],
        remat=job["remat"],
    )
    objective = dataclasses.replace(
        base.objective, clip_low=0.2, clip_high=0.2, dual_clip=0.0, kl_coef=0.0, entropy_coef=0.0
    )
    return dataclasses.replace(base, model=model, learner=learner, objective=objective)


def make_batch(job: Mapping[str, Any]) -> Batch:
    """Return rows of one sequence each: random ids, a prompt, then a trained completion.

    The behaviour policy is uniform, one advantage a row, mean over trained tokens.
    """
    rng = np.random.default_rng(0)
    rows, length = job["rows"], job["prompt"] + job["completion"]
    shape = (rows, length)
    trained = np.broadcast_to(np.arange(length) >= job["prompt"], shape).astype(np.float32)
    advantages = rng.normal(size=(rows, 1)).astype(np.float32)
    return Batch(
        tokens=rng.integers(2, job["vocab"], shape).astype(np.int32),
        segment_ids=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
        behavior_logprobs=(-math.log(job["vocab"]) * trained).astype(np.float32),
        advantages=advantages * trained,
        loss_weights=trained / (rows * job["completion"]),
        temperature=np.ones(shape, np.float32),
    )


def matmul_roof(dtype: str, size: int) -> float:
    """Return the FLOP/s of a square matmul, the better of two sizes; each the best of 5."""
    kind = jnp.dtype(dtype)
    exact = kind == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    best = 0.0
    for n in (size, size // 2):
        a = jax.random.normal(jax.random.key(1), (n, n), kind)
        jax.block_until_ready(product(a, a))
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(product(a, a))
            best = max(best, 2 * n**3 / (time.perf_counter() - began))
    return best


def peak() -> dict[str, Any]:
    """Return the device's own peak where it counts one (accelerators), else the resident set."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return {"peak_bytes": stats["peak_bytes_in_use"], "peak_of": "memory of the device"}
    return resident_peak()


if __name__ == "__main__":
    serve(prepare)
