"""Looking tokens up in an embedding table that is spread over its vocabulary.

Left to itself XLA gathers the table, or adds up partial results of the size of all tokens, and does
the same with gradients. Here the table turns for a moment from parts of the vocabulary into parts
of the features (an all-to-all of one part), each device looks up its features of the tokens of all
devices that share the table, and the results turn back (an all-to-all of the own tokens):

    [V / P, D] -> [V, D / P]      [N S] ids -> [N S, D / P]      -> [N, D]

Shapes: V vocabulary, D model, N tokens of a device; P devices share the table, S of them (or groups
of them) have different tokens.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from skyrl_jax.models.layout import Layout
from skyrl_jax.models.sharding import spec


def embed_rows(
    table: Float[Array, "V D"], tokens: Int[Array, " N"], layout: Layout, dtype: Any
) -> Float[Array, "N D"]:
    """Return the embeddings of tokens in the compute dtype; the table's gradient is summed in fp32.

    Args:
        table: fp32 master.
        tokens: ids, spread as ``layout`` says.
        layout: of the tokens.
        dtype: compute dtype.
    """
    pieces = _vocab_axes(layout, table.shape)
    shared = tuple(a for a in pieces if a in layout.token_axes)
    rest = tuple(a for a in pieces if a not in layout.token_axes)
    mesh = layout.mesh
    if mesh is None or not pieces or pieces != shared + rest:
        return layout.pin(table[tokens].astype(dtype))

    def local(table: Any, tokens: Any) -> Any:
        n, d = tokens.shape[0], table.shape[1]
        features = jax.lax.all_to_all(table, pieces, split_axis=1, concat_axis=0, tiled=True)
        if shared:
            tokens = jax.lax.all_gather(tokens, shared, tiled=True)
        x = features[tokens].astype(dtype)
        if shared:
            x = jax.lax.all_to_all(x, shared, split_axis=0, concat_axis=1, tiled=True)
        if rest:
            groups = math.prod(mesh.shape[a] for a in shared)
            x = jax.lax.all_gather(x.reshape(n, groups, -1), rest, axis=2, tiled=True)
        return x.reshape(n, d)

    where = PartitionSpec(layout.token_axes or None)
    # All devices of ``rest`` end with the same values, which check_vma cannot see.
    spread: Any = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(pieces), where),
        out_specs=where,
        check_vma=False,
    )
    embedded: Array = spread(table, tokens)
    return embedded


def _vocab_axes(layout: Layout, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the mesh axes over which a table [V, D] is spread, if they divide D too."""
    if layout.mesh is None:
        return ()
    axes = spec(layout.mesh, ("vocab", "embed"), shape)[0] or ()
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    return axes if shape[1] % math.prod(layout.mesh.shape[a] for a in axes) == 0 else ()
