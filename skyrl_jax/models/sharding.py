"""Logical axis names beside each parameter, and one table from them to mesh axes.

Mesh axes: ``data`` (replicas), ``fsdp`` (parameters and rows), ``tensor`` (heads, ffn, vocabulary),
``context`` (tokens of a row), ``expert`` (routed experts; for everything else a second ``fsdp``).
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
from skyrl_jax.core.validate import check_expert_axis, check_tensor_axis
from skyrl_jax.models.families import check_config, param_shapes
from skyrl_jax.models.slices import unmapped

AXES = ("data", "fsdp", "tensor", "context", "expert")

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

# The one table from logical axes to mesh axes. The rows are spread over ``expert`` too: with the
# same rows on all its devices, attention would be computed once per device of the axis for
# nothing. For the same reason it shards the dense parameters like ``fsdp``: left whole, the 1.5 of
# 30 billion parameters of Qwen3-30B-A3B that are no experts would cost 18 GB on each of 16 devices.
RULES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "embed": (),
    "head_dim": (),
    "model": ("fsdp", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "experts": ("expert",),
    "vocab": ("fsdp", "expert", "tensor"),
    "rows": ("data", "fsdp", "expert"),
    "tokens": ("context",),
    "flat": ("data", "fsdp", "expert", "context"),  # the tokens of all rows as one axis
}


# The largest leaf that may lie whole on every device of a mesh that could shard it.
REPLICATED_BYTES = 64 * 2**20


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh over ``devices`` (default: all of jax); one axis may be -1 = all that remain.

    Raises:
        ConfigError: the axes do not fit the number of devices, or do not map onto the links between
            them (models/slices.py).
    """
    sizes = [getattr(cfg, axis) for axis in AXES]
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
    used = list(devices[: math.prod(sizes)])
    try:
        return jax.make_mesh(
            tuple(sizes),
            AXES,
            axis_types=(AxisType.Auto,) * len(AXES),
            devices=np.asarray(used),
        )
    except (NotImplementedError, AssertionError):  # what jax has for axes that do not map
        raise ConfigError(unmapped(dict(zip(AXES, sizes, strict=True)), used, num)) from None


def check_micro_rows(micro_rows: int, mesh: Mesh | AbstractMesh) -> None:
    """Refuse micro-batches whose rows the mesh cannot share out evenly.

    They would run, but a device without rows of its own computes those of another one again.

    Raises:
        ConfigError: names the key, the axes and what would be right.
    """
    axes = RULES["rows"]
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if micro_rows % shards:
        sizes = " x ".join(str(mesh.shape[axis]) for axis in axes)
        raise ConfigError(
            f"learner.micro_rows = {micro_rows}: rows of a micro-batch are spread over the mesh "
            f"axes {' x '.join(axes)} = {sizes} = {shards} devices, which must divide them; set "
            f"learner.micro_rows to {math.ceil(micro_rows / shards) * shards} (or another multiple "
            f"of {shards}), or make these axes smaller: mesh.tensor and mesh.context share the "
            "work within a row, and a mesh of all 1 uses one device"
        )


def check_mesh(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuse a mesh that would cut a head or an expert in two, or has experts of none.

    Raises:
        ConfigError: names the axis, the tensor that it does not divide, and what would.
    """
    check_tensor_axis(cfg.num_heads, cfg.num_kv_heads, mesh.shape["tensor"])
    check_expert_axis(cfg.family, cfg.num_experts, mesh.shape["expert"])


def mesh_axes(
    mesh: Mesh | AbstractMesh, logical: tuple[str | None, ...], shape: tuple[int, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return, per dimension, the mesh axes of more than one device that share it out.

    An axis is used once: the first dimension that it divides has it.
    """
    dims: list[tuple[str, ...]] = []
    for name, size in zip(logical, shape, strict=True):
        free = [a for a in (RULES[name] if name else ()) if not any(a in dim for dim in dims)]
        axes = tuple(a for a in free if mesh.shape[a] > 1)
        while axes and size % math.prod(mesh.shape[a] for a in axes):
            axes = axes[:-1]
        dims.append(axes)
    return tuple(dims)


def spec(
    mesh: Mesh | AbstractMesh, logical: tuple[str | None, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    """Return the partition of one array: mesh axes that divide its dimensions, else replicated."""
    return PartitionSpec(*(axes or None for axes in mesh_axes(mesh, logical, shape)))


def param_shardings(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> Any:
    """Return a NamedSharding for each parameter (the tree of ``init_params``).

    Raises:
        ConfigError: a model that is not computed, a mesh that does not fit its heads or experts
            (``check_mesh``), or a large leaf that would lie whole on every device although the
            mesh has axes to shard it over (``data`` is none: its devices are replicas on purpose).
    """
    check_config(cfg)
    check_mesh(cfg, mesh)
    spread = math.prod(n for axis, n in mesh.shape.items() if axis in ("fsdp", "tensor", "expert"))

    def one(group: str, name: str, shape: tuple[int, ...]) -> NamedSharding:
        partition = spec(mesh, LOGICAL[group][name], shape)
        size = math.prod(shape) * 4  # fp32 masters
        if spread > 1 and size > REPLICATED_BYTES and not any(partition):
            raise ConfigError(
                f"no axis of the mesh {dict(mesh.shape)} divides leaf {group}.{name} "
                f"{list(shape)} (axes {', '.join(LOGICAL[group][name])}): {size / 2**20:.0f} "
                f"MB would lie on every device (at most {REPLICATED_BYTES / 2**20:.0f} may); "
                "choose mesh.fsdp and mesh.tensor that divide one of its dimensions"
            )
        return NamedSharding(mesh, partition)

    return {
        group: {name: one(group, name, shape) for name, shape in leaves.items()}
        for group, leaves in param_shapes(cfg).items()
    }


def row_sharding(mesh: Mesh, shape: tuple[int, ...], lead: int = 0) -> NamedSharding:
    """Return the sharding of a batch array [..., B, T, ...] with ``lead`` leading unsharded axes.

    Axes behind the tokens (of a channel such as ``routed_experts``) are not sharded.
    """
    behind = (None,) * (len(shape) - lead - 2)
    return NamedSharding(mesh, spec(mesh, (None,) * lead + ("rows", "tokens") + behind, shape))
