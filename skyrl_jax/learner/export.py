"""How a leaf is named and summed wherever params are written and checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


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


def bit_sums(tree: Any) -> dict[str, int]:
    """Return {leaf name: bit sum} of a tree, computed on the device.

    Leaves in a host's memory (offloaded moments) visit the device one after the other.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    hosted = {leaf_name(path): x for path, x in leaves if _on_host(x)}
    if not hosted:
        sums = jax.device_get(_tree_sums(tree))
        return {leaf_name(path): int(s) for path, s in jax.tree_util.tree_leaves_with_path(sums)}
    near = {leaf_name(path): x for path, x in leaves if not _on_host(x)}
    named = jax.device_get(_tree_sums(near))
    for name, x in hosted.items():
        named[name] = jax.device_get(_tree_sums(jax.device_put(x, jax.memory.Space.Device)))
    return {name: int(s) for name, s in named.items()}


def _on_host(x: Any) -> bool:
    return bool(getattr(getattr(x, "sharding", None), "memory_kind", None) == "pinned_host")


@jax.jit
def _tree_sums(tree: Any) -> Any:
    return jax.tree.map(bit_sum, tree)
