"""Where the tokens of packed rows lie while the layers run.

The layers see one axis of N = B T tokens (models/decoder.py). On a mesh whose ``context`` axis has
C > 1 devices, the tokens of a row are spread over these. Causal attention gives the end of a row
more work than its start, so a row is cut into 2 C chunks; device i gets chunks i and 2 C - 1 - i:

    C = 2, chunks 0 1 2 3:    device 0 has 0 3, device 1 has 1 2

This order of a row is called zigzag here. Which tokens see each other depends on positions and
segments alone, so the layers run in this order and their output is put back once.

On such a mesh N runs over (devices of rows, devices of tokens, rows, tokens): each device has one
piece of it, which is what XLA can express. Rows one after another have no such sharding, and XLA
would gather them before every matmul.

Shapes: B rows, T tokens of a row, N = B T, C devices of axis ``context``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models.sharding import spec

CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How [B, T] tokens lie in the N axis of the layers; make it by ``make_layout``."""

    shape: tuple[int, int]  # (B, T)
    mesh: Mesh | None = None  # None: one device
    row_axes: tuple[str, ...] = ()  # mesh axes that the rows are spread over
    row_shards: int = 1
    context: int = 1

    def arrange(self, x: Array) -> Array:
        """Return [B, T, ...] of small values with its rows in the order of the layers."""
        if self.context == 1:
            return x
        # Whole rows on every device of ``context`` first: then picking chunks is local.
        x = self._constrain(x, self.row_axes or None)
        return self._constrain(x[:, zigzag_order(self.shape[1], self.context)], *self._rows)

    def restore(self, x: Array) -> Array:
        """Return [B, T, ...] with its rows back in natural order (each half of a device moves)."""
        if self.context == 1:
            return x
        move = functools.partial(_restore_shard, num=self.context)
        part = PartitionSpec(*self._rows)
        restored: Array = jax.shard_map(move, mesh=self.mesh, in_specs=part, out_specs=part)(x)
        return restored

    def flat(self, x: Array) -> Array:
        """Return [N, ...] of arranged [B, T, ...]."""
        (b, t), rest = self.shape, x.shape[2:]
        if self.context > 1:
            r, c = self.row_shards, self.context
            x = x.reshape(r, b // r, c, t // c, *rest).swapaxes(1, 2)
        return x.reshape(b * t, *rest)

    def rows(self, x: Array) -> Array:
        """Return arranged [B, T, ...] of [N, ...]: the inverse of ``flat``."""
        (b, t), rest = self.shape, x.shape[1:]
        if self.context > 1:
            r, c = self.row_shards, self.context
            x = x.reshape(r, c, b // r, t // c, *rest).swapaxes(1, 2)
        return x.reshape(b, t, *rest)

    def pin(self, x: Array) -> Array:
        """Return [N, ...] told to be spread over the devices of rows and tokens alone."""
        if self.mesh is None:
            return x
        return self._constrain(x, self.token_axes or None)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that N is spread over."""
        return self.row_axes + ((CONTEXT,) if self.context > 1 else ())

    @property
    def _rows(self) -> tuple[Any, str]:
        return (self.row_axes or None, CONTEXT)

    def _constrain(self, x: Array, *dims: Any) -> Array:
        assert self.mesh is not None
        where = NamedSharding(self.mesh, PartitionSpec(*dims))
        constrained: Array = jax.lax.with_sharding_constraint(x, where)
        return constrained


def make_layout(mesh: Mesh | None, shape: tuple[int, int]) -> Layout:
    """Return the layout of [B, T] rows on a mesh (``None``: one device).

    Raises:
        ConfigError: T cannot be cut into chunks for the context axis.
    """
    if mesh is None or mesh.size == 1:
        return Layout(shape=shape)
    context = mesh.shape[CONTEXT]
    check_row_length(shape[1], context)
    axes = spec(mesh, ("rows", None), shape)[0] or ()
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    shards = int(np.prod([mesh.shape[a] for a in axes], dtype=int))
    return Layout(shape=shape, mesh=mesh, row_axes=axes, row_shards=shards, context=context)


def check_row_length(row_length: int, context: int, multiple: int = 1) -> None:
    """Refuse rows that do not split into chunks of a multiple of ``multiple`` tokens.

    Raises:
        ConfigError: names the key and what would be right.
    """
    needed = multiple * (2 * context if context > 1 else 1)
    if row_length % needed:
        why = [f"2 x 'mesh.context' ({context}) chunks a row"] if context > 1 else []
        why += [f"blocks of {multiple} tokens of the TPU kernel"] if multiple > 1 else []
        raise ConfigError(
            f"config key 'learner.row_length': rows of {row_length} tokens do not split evenly; "
            f"make it a multiple of {needed} ({', '.join(why)})"
        )


def zigzag_order(row_length: int, context: int) -> np.ndarray:
    """Return the natural index of each token of a zigzag row, [T]."""
    chunks = np.arange(row_length, dtype=np.int32).reshape(2 * context, -1)
    return np.stack([chunks[:context], chunks[context:][::-1]], axis=1).reshape(-1)


def zigzag_rows(index: Any, row_length: int, context: int) -> Array:
    """Return the natural indices of the tokens of device ``index`` (traced), [T / C]."""
    n = row_length // (2 * context)
    chunk = jnp.arange(n, dtype=jnp.int32)
    return jnp.concatenate([index * n + chunk, (2 * context - 1 - index) * n + chunk])


def natural_order(x: Array, context: int) -> Array:
    """Return a whole zigzag row [B, T, ...] in natural order; local."""
    b, t = x.shape[:2]
    halves = x.reshape(b, context, 2, t // (2 * context), *x.shape[2:])
    chunks = jnp.concatenate([halves[:, :, 0], halves[:, ::-1, 1]], axis=1)
    return chunks.reshape(b, t, *x.shape[2:])


def _restore_shard(x: Array, *, num: int) -> Array:
    """Trade chunks with the other devices of ``context``: device i gets chunks 2 i and 2 i + 1.

    A device has one chunk of even and one of odd number, so two permutations move all: the even
    chunks to the first halves of their devices, the odd ones to the second.
    """
    first, second = jnp.split(x, 2, axis=1)
    even_device = jax.lax.axis_index(CONTEXT) % 2 == 0
    moved = []
    for parity in (0, 1):
        chunk = [i if i % 2 == parity else 2 * num - 1 - i for i in range(num)]
        ours = jnp.where(even_device == (parity == 0), first, second)
        moved.append(jax.lax.ppermute(ours, CONTEXT, [(i, chunk[i] // 2) for i in range(num)]))
    return jnp.concatenate(moved, axis=1)
