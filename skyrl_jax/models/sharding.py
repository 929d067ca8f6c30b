"""Logical axis names beside each parameter, and one table from them to mesh axes.

Mesh axes: ``data`` (replicas), ``fsdp`` (parameters and rows), ``tensor`` (heads, ffn, vocabulary),
``context`` (tokens of a row).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from skyrl_jax.core.config import MeshConfig, ModelConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models.decoder import abstract_params

AXES = ("data", "fsdp", "tensor", "context")

# Logical axes of every leaf of any family (models/families.py).
LOGICAL: dict[str, dict[str, tuple[str, ...]]] = {
    "embed": {"embedding": ("vocab", "embed")},
    "layers": {
        "attn_norm": ("layers", "embed"),
        "q": ("layers", "model", "heads"),
        "k": ("layers", "model", "kv_heads"),
        "v": ("layers", "model", "kv_heads"),
        "q_bias": ("layers", "heads"),
        "k_bias": ("layers", "kv_heads"),
        "v_bias": ("layers", "kv_heads"),
        "o": ("layers", "heads", "model"),
        "q_norm": ("layers", "head_dim"),
        "k_norm": ("layers", "head_dim"),
        "mlp_norm": ("layers", "embed"),
        "gate": ("layers", "model", "ffn"),
        "up": ("layers", "model", "ffn"),
        "down": ("layers", "ffn", "model"),
        "router": ("layers", "model", "experts"),
        "expert_gate": ("layers", "experts", "model", "ffn"),
        "expert_up": ("layers", "experts", "model", "ffn"),
        "expert_down": ("layers", "experts", "ffn", "model"),
    },
    "final_norm": {"scale": ("embed",)},
    "lm_head": {"kernel": ("embed", "vocab")},
}

# The one table from logical axes to mesh axes.
RULES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "embed": (),
    "head_dim": (),
    "model": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "experts": (),  # every device has a part of every expert; a mesh axis of their own may follow
    "vocab": ("fsdp", "tensor"),
    "rows": ("data", "fsdp"),
    "tokens": ("context",),
}


# The largest leaf that may lie whole on every device of a mesh that could shard it.
REPLICATED_BYTES = 64 * 2**20


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh over ``devices`` (default: all of jax); one axis may be -1 = all that remain.

    Raises:
        ConfigError: the axes do not fit the number of devices.
    """
    sizes = [cfg.data, cfg.fsdp, cfg.tensor, cfg.context]
    devices = jax.devices() if devices is None else devices
    num = len(devices)
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise ConfigError(
            f"config section 'mesh' is {dict(zip(AXES, sizes, strict=True))}: each axis must be "
            "positive, at most one of them -1 (= all devices that remain)"
        )
    known = math.prod(s for s in sizes if s > 0)
    if num % known if -1 in sizes else num < known:
        raise ConfigError(
            f"config section 'mesh' is {dict(zip(AXES, sizes, strict=True))}, which does not fit "
            f"the {num} devices that jax sees; make their product a divisor of {num}"
        )
    sizes = [num // known if s == -1 else s for s in sizes]
    return jax.make_mesh(
        tuple(sizes),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=np.asarray(devices[: math.prod(sizes)]),
    )


def spec(
    mesh: Mesh | AbstractMesh, logical: tuple[str | None, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    """Return the partition of one array: mesh axes that divide its dimensions, else replicated."""
    dims = []
    for name, size in zip(logical, shape, strict=True):
        axes = tuple(a for a in (RULES[name] if name else ()) if mesh.shape[a] > 1)
        while axes and size % math.prod(mesh.shape[a] for a in axes):
            axes = axes[:-1]
        dims.append(axes or None)
    return PartitionSpec(*dims)


def param_shardings(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> Any:
    """Return a NamedSharding for each parameter (the tree of ``init_params``).

    Raises:
        ConfigError: a large leaf would lie whole on every device although the mesh has axes to
            shard it over (``data`` is none: its devices are replicas on purpose).
    """
    spread = math.prod(n for axis, n in mesh.shape.items() if axis in ("fsdp", "tensor"))

    def one(path: Any, leaf: Any) -> NamedSharding:
        group, name = (p.key for p in path)
        partition = spec(mesh, LOGICAL[group][name], leaf.shape)
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if spread > 1 and size > REPLICATED_BYTES and not any(partition):
            raise ConfigError(
                f"no axis of the mesh {dict(mesh.shape)} divides leaf {group}.{name} "
                f"{list(leaf.shape)} (axes {', '.join(LOGICAL[group][name])}): {size / 2**20:.0f} "
                f"MB would lie on every device (at most {REPLICATED_BYTES / 2**20:.0f} may); "
                "choose mesh.fsdp and mesh.tensor that divide one of its dimensions"
            )
        return NamedSharding(mesh, partition)

    return jax.tree_util.tree_map_with_path(one, abstract_params(cfg))


def row_sharding(mesh: Mesh, shape: tuple[int, ...], lead: int = 0) -> NamedSharding:
    """Return the sharding of a [..., B, T] batch array with ``lead`` leading unsharded axes."""
    return NamedSharding(mesh, spec(mesh, (None,) * lead + ("rows", "tokens"), shape))
