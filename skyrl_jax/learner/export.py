"""What leaves the learner for the servers: cast params, their bit sums, an Orbax folder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Params = Any


def leaf_name(path: Any) -> str:
    """Return a leaf's dotted name, e.g. ``layers.q`` or ``opt_state.inner.1``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def bit_sum(x: Array) -> Array:
    """Return the sum of the bit patterns of an array as a uint32 (modulo 2^32); traceable.

    Any single changed bit changes it, on whatever device and in whatever order it is summed.
    """
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = x if x.dtype == unsigned else jax.lax.bitcast_convert_type(x, unsigned)
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def host_bit_sum(x: np.ndarray) -> int:
    """Return ``bit_sum`` of a host array, without a device."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return int(flat.view(f"u{flat.dtype.itemsize}").sum(dtype=np.uint64) % (1 << 32))


def bit_sums(tree: Any) -> dict[str, int]:
    """Return {leaf name: bit sum} of a tree, computed on the device."""
    sums = jax.device_get(_tree_sums(tree))
    return {leaf_name(path): int(s) for path, s in jax.tree_util.tree_leaves_with_path(sums)}


def params_to_host(params: Params, dtype: str) -> tuple[Params, dict[str, int]]:
    """Cast params to the servers' dtype on the device and bring them to the host.

    Args:
        params: the fp32 masters.
        dtype: "float32" or "bfloat16".

    Returns:
        (numpy params in ``dtype``, {leaf name: bit sum of the cast leaf}). The sums are made in
        the same program as the cast, so they also cover the way to the host and to the disk.
    """
    cast, sums = _cast(params, dtype)
    host = jax.tree.map(np.asarray, jax.device_get(cast))
    named = jax.tree_util.tree_leaves_with_path(jax.device_get(sums))
    return host, {leaf_name(path): int(s) for path, s in named}


def write_params(path: str | Path, params: Params) -> None:
    """Write params as an Orbax checkpoint folder (complete when this returns)."""
    from orbax import checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(Path(path).absolute(), args=ocp.args.StandardSave(params))


def read_params(path: str | Path, template: Params | None = None) -> Params:
    """Read params back from ``write_params``; without a template they come as numpy arrays."""
    from orbax import checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            Path(path).absolute(), args=ocp.args.StandardRestore(template)
        )
    return restored if template is not None else jax.tree.map(np.asarray, restored)


@jax.jit
def _tree_sums(tree: Any) -> Any:
    return jax.tree.map(bit_sum, tree)


@functools.partial(jax.jit, static_argnums=1)
def _cast(params: Params, dtype: str) -> tuple[Params, Any]:
    cast = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
    return cast, jax.tree.map(bit_sum, cast)
