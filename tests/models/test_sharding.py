"""The mesh and the rules table."""

import itertools
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from skyrl_jax.core.config import MeshConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models import decoder, sharding, slices
from tests.models import tiny


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_leaf_has_logical_axes_of_its_rank(family):
    params = decoder.abstract_params(tiny.config(family))
    for group, leaves in params.items():
        for name, leaf in leaves.items():
            axes = sharding.LOGICAL[group][name]
            assert len(axes) == leaf.ndim
            assert set(axes) <= set(sharding.RULES)


def test_every_logical_leaf_belongs_to_a_family():
    made = [decoder.abstract_params(tiny.config(family)) for family in tiny.FAMILIES]
    for group, leaves in sharding.LOGICAL.items():
        assert set(leaves) == set().union(*(params[group] for params in made))


def test_experts_and_biases_are_spread():
    mesh = AbstractMesh((1, 2, 4, 1, 1), sharding.AXES)
    made = sharding.param_shardings(tiny.config("qwen3_moe", num_kv_heads=4), mesh)["layers"]
    assert made["expert_up"].spec == PartitionSpec(None, None, ("fsdp",), ("tensor",))
    assert made["expert_down"].spec == PartitionSpec(None, None, ("tensor",), ("fsdp",))
    assert made["router"].spec == PartitionSpec(None, ("fsdp",), None)
    biases = sharding.param_shardings(tiny.config("qwen2", num_kv_heads=4), mesh)["layers"]
    assert biases["q_bias"].spec == PartitionSpec(None, ("tensor",))


def test_a_large_leaf_that_would_lie_whole_on_every_device_is_named():
    # 3 divides neither the vocabulary nor the width: 2**24 x 2 fp32 = 128 MB on every device
    odd = tiny.config("qwen3", vocab_size=2**24, hidden_size=2)
    mesh = AbstractMesh((1, 3, 1, 1, 1), sharding.AXES)
    with pytest.raises(ConfigError, match=r"embed\.embedding \[16777216, 2\].*128 MB.*mesh\.fsdp"):
        sharding.param_shardings(odd, mesh)
    # replicas on purpose, one device, an axis that divides, and a leaf that is small enough
    for shape in ((3, 1, 1, 1, 1), (1, 1, 1, 1, 1), (1, 2, 1, 1, 1)):
        sharding.param_shardings(odd, AbstractMesh(shape, sharding.AXES))
    sharding.param_shardings(tiny.config("qwen3", vocab_size=2**22, hidden_size=4), mesh)


def test_rules_and_fallback_where_an_axis_does_not_divide():
    mesh = AbstractMesh((2, 4, 2, 1, 1), sharding.AXES)
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
    assert dict(mesh.shape) == {"data": 1, "fsdp": num, "tensor": 1, "context": 1, "expert": 1}
    assert all(kind == AxisType.Auto for kind in mesh.axis_types)
    with pytest.raises(ConfigError, match="does not fit the"):
        sharding.make_mesh(MeshConfig(data=num + 1, fsdp=1, tensor=1, context=1))
    with pytest.raises(ConfigError, match="at most one of them -1"):
        sharding.make_mesh(MeshConfig(data=-1, fsdp=-1, tensor=1, context=1))


def test_experts_have_their_own_axis_and_the_rest_is_sharded_over_it_like_fsdp():
    mesh = AbstractMesh((2, 2, 2, 1, 4), sharding.AXES)
    cfg = tiny.config("qwen3_moe", num_experts=8, vocab_size=32, hidden_size=32)
    made = sharding.param_shardings(cfg, mesh)
    layers = made["layers"]
    assert layers["expert_up"].spec == PartitionSpec(None, ("expert",), ("fsdp",), ("tensor",))
    assert layers["expert_down"].spec == PartitionSpec(None, ("expert",), ("tensor",), ("fsdp",))
    assert layers["q"].spec == PartitionSpec(None, ("fsdp", "expert"), ("tensor",))
    assert layers["router"].spec == PartitionSpec(None, ("fsdp", "expert"), None)
    assert made["embed"]["embedding"].spec == PartitionSpec(("fsdp", "expert", "tensor"), None)
    rows = sharding.spec(mesh, ("rows", "tokens"), (16, 8))
    assert rows == PartitionSpec(("data", "fsdp", "expert"), None)
    # 4 rows do not divide by 16 devices: the last axis is left out, not the whole spread
    assert sharding.spec(mesh, ("rows", "tokens"), (4, 8)) == PartitionSpec(("data", "fsdp"), None)


@pytest.mark.parametrize(
    ("family", "changes", "shape", "text"),
    [
        ("llama", {"num_heads": 8}, (1, 1, 4, 1, 1), r"mesh\.tensor = 4.*num_kv_heads = 2.*r of 2"),
        ("qwen3", {}, (1, 1, 3, 1, 1), r"mesh\.tensor = 3.*num_heads = 4 \(leaf layers\.q\).*of 2"),
        (
            "qwen3",
            {},
            (1, 1, 1, 1, 2),
            r"mesh\.expert = 2, but family 'qwen3' has no experts.*fsdp",
        ),
        ("qwen3_moe", {}, (1, 1, 1, 1, 2), r"mesh\.expert = 2 .*num_experts = 5.*divisor of 5"),
    ],
)
def test_a_mesh_that_cuts_heads_or_experts_is_named(family, changes, shape, text):
    with pytest.raises(ConfigError, match=text):
        sharding.param_shardings(tiny.config(family, **changes), AbstractMesh(shape, sharding.AXES))


def test_what_a_slice_can_be_cut_into():
    assert slices.whole_splits((2, 4, 1)) == [(8,), (4, 2)]
    assert slices.whole_splits((4, 4, 4)) == [(64,), (16, 4), (4, 4, 4)]
    assert slices.whole_splits((2, 2, 4)) == [(16,), (4, 4), (8, 2), (4, 2, 2)]


def chips(*spans, cores=1):
    return [
        SimpleNamespace(coords=list(at), device_kind="TPU v5")
        for at in itertools.product(*map(range, spans))
        for _ in range(cores)
    ]


def test_a_mesh_that_does_not_map_is_told_with_those_that_do():
    sizes = {"data": 1, "fsdp": 32, "tensor": 2, "context": 1, "expert": 1}
    text = slices.unmapped(sizes, chips(4, 4, 4), 64)
    assert text.startswith("the mesh fsdp = 32, tensor = 2 does not map onto the links of its 64")
    assert "(TPU v5, wired as 4x4x4)" in text and "may be 64; 16 x 4; 4 x 4 x 4, in any" in text
    assert slices.slice_shape(chips(2, 2, 1, cores=2)) == (2, 2, 1, 2)
    part = slices.unmapped(sizes | {"fsdp": 3, "tensor": 1}, chips(2, 2, 1)[:3], 4)
    assert "they are a part of 4 and no whole block of chips (they reach over 2x2x1)" in part


def test_rows_that_a_mesh_cannot_share_out_are_named():
    mesh = AbstractMesh((2, 4, 2, 2, 3), sharding.AXES)
    for rows in (24, 48):
        sharding.check_micro_rows(rows, mesh)
    with pytest.raises(
        ConfigError,
        match=r"learner\.micro_rows = 26: .*data x fsdp x expert = 2 x 4 x 3 = 24 devices.*to 48 ",
    ):
        sharding.check_micro_rows(26, mesh)
