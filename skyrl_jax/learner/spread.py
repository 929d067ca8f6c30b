"""Batches onto a mesh that spans processes, and small results back to every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Batch
from skyrl_jax.models.sharding import row_sharding


def spread_batch(mesh: jax.sharding.Mesh, batch: Batch) -> Batch:
    """Return ``batch`` as arrays over ``mesh``; each process gives the rows of its own devices.

    Only those rows (and with context parallelism those tokens) of [B, T] arrays are read, so that
    a process may pass memory-mapped files, or anything at all in the other rows.

    Args:
        mesh: devices of all processes.
        batch: host arrays of the whole batch; the same shapes in all processes. Arrays that are
            on devices already stay as they are.
    """

    def one(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return x
        sharding = row_sharding(mesh, x.shape)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x[index]))

    placed: Batch = jax.tree.map(one, batch)
    return placed


def feeding(step: Callable[..., Any], mesh: jax.sharding.Mesh | None) -> Callable[..., Any]:
    """Return ``step(state, batch)`` that spreads its batch first, where processes share a mesh.

    Raises:
        ConfigError: a process would have no device in the mesh.
    """
    if mesh is None or jax.process_count() == 1:
        return step
    if mesh.devices.size != jax.device_count():
        raise ConfigError(
            f"config section 'mesh' uses {mesh.devices.size} of {jax.device_count()} devices; with "
            "several processes it must use all of them: set one axis to -1"
        )

    def fed(state: Any, batch: Batch, *more: Any) -> Any:
        return step(state, spread_batch(mesh, batch), *more)

    return fed


def whole(x: Any) -> np.ndarray:
    """Return the value of a small array in every process; a device program where it is spread.

    All processes call it together. Joining the shards that one process has would repeat or lose
    rows (tpu-inference PR 3579).
    """
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    gathered: np.ndarray = multihost_utils.process_allgather(x, tiled=True)
    return gathered
