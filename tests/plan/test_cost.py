"""Step time and recomputed FLOPs, by hand."""

import dataclasses

import pytest

from skyrl_jax.learner.flops import step_flops
from skyrl_jax.plan.chips import parse_topology
from skyrl_jax.plan.cost import hardware_flops, model_flops, step_time


def test_the_longer_of_compute_and_links_is_the_step():
    topology = parse_topology("v5e:2x4")  # 8 x 197e12 FLOP/s, 200e9 bytes/s each
    flops = 8 * 197e12 * 0.4  # one second at 40 % of the peak
    times = step_time(flops, 0.9 * 200e9, topology)
    assert times.compute_s == pytest.approx({0.4: 1.0, 0.5: 0.8, 0.6: 2 / 3})
    assert times.link_s == pytest.approx(0.9)
    assert times.step_s == pytest.approx({0.4: 1.0, 0.5: 0.9, 0.6: 0.9})
    assert [times.binds(mfu) for mfu in (0.4, 0.5, 0.6)] == ["compute", "links", "links"]


def test_gpus_of_several_boards_share_the_network():
    assert parse_topology("gpu:8xH100-80GB").link_bytes_per_s == 450e9
    assert parse_topology("gpu:16xH100-80GB").link_bytes_per_s == 50e9
    assert parse_topology("v5p:2x2x4").link_bytes_per_s == 600e9


def test_recomputed_flops_by_hand(make_plan):
    # Layer of two: q 2x8, k 2x4, v 2x4, o 8x2, mlp 3 x 2x5: 78. Two rows of four tokens: 8 tokens
    # and 2 x 16 / 2 = 16 pairs.
    model = dataclasses.replace(
        make_plan("v5e:2x2").model,
        vocab_size=10, hidden_size=2, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4,
        intermediate_size=5,
    )  # fmt: skip
    layers, head = 2 * 3 * 78 * 8, 2 * 2 * 10 * 8  # forward alone
    attention = 4 * 3 * 2 * 4 * 16
    assert model_flops(model, 2, 4) == 3 * (layers + head + attention)
    done = {remat: hardware_flops(model, 2, 4, remat) for remat in ("none", "dots", "attn_out")}
    assert done["none"] == 3 * (layers + attention) + 4 * head  # the logits are computed twice
    assert done["dots"] == pytest.approx(3 * layers + 4 * attention + 4 * head)
    assert done["attn_out"] == pytest.approx(4 * layers + 3.5 * attention + 4 * head)
    full = hardware_flops(model, 2, 4, "full")
    assert full == pytest.approx(4 * (layers + attention + head), rel=1e-12)
    # The learner's own counts.
    assert full == pytest.approx(step_flops(model, [4, 4], hardware=True, remat=True), rel=1e-12)
    assert done["none"] == pytest.approx(step_flops(model, [4, 4], hardware=True), rel=1e-12)
