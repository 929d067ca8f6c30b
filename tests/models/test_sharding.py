"""The mesh and the rules table."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from skyrl_jax.core.config import MeshConfig, ModelConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models import decoder, sharding


def test_every_leaf_has_logical_axes_of_its_rank():
    cfg = ModelConfig(
        family="qwen3",
        vocab_size=31,
        hidden_size=20,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=28,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        max_position=64,
        checkpoint="",
    )
    params = decoder.abstract_params(cfg)
    assert {k: set(v) for k, v in params.items()} == {
        k: set(v) for k, v in sharding.LOGICAL.items()
    }
    for group, leaves in params.items():
        for name, leaf in leaves.items():
            axes = sharding.LOGICAL[group][name]
            assert len(axes) == leaf.ndim
            assert set(axes) <= set(sharding.RULES)


def test_rules_and_fallback_where_an_axis_does_not_divide():
    mesh = AbstractMesh((2, 4, 2, 1), sharding.AXES)
    assert sharding.spec(mesh, ("layers", "model", "heads"), (3, 64, 8)) == PartitionSpec(
        None, ("fsdp",), ("tensor",)
    )
    assert sharding.spec(mesh, ("layers", "model", "kv_heads"), (3, 64, 1)) == PartitionSpec(
        None, ("fsdp",), None
    )
    assert sharding.spec(mesh, ("vocab", "embed"), (512, 64)) == PartitionSpec(
        ("fsdp", "tensor"), None
    )
    assert sharding.spec(mesh, ("vocab", "embed"), (12, 64)) == PartitionSpec(("fsdp",), None)
    assert sharding.spec(mesh, ("rows", "tokens"), (8, 128)) == PartitionSpec(
        ("data", "fsdp"), None
    )


def test_make_mesh():
    num = jax.device_count()
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    assert dict(mesh.shape) == {"data": 1, "fsdp": num, "tensor": 1, "context": 1}
    assert all(kind == AxisType.Auto for kind in mesh.axis_types)
    with pytest.raises(ConfigError, match="does not fit the"):
        sharding.make_mesh(MeshConfig(data=num + 1, fsdp=1, tensor=1, context=1))
    with pytest.raises(ConfigError, match="at most one of them -1"):
        sharding.make_mesh(MeshConfig(data=-1, fsdp=-1, tensor=1, context=1))
