"""Every family against a float64 reference written from its equations; and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models import decoder, families, rope
from tests.models import reference, tiny

ATTENTION = {"attn_norm", "q", "k", "v", "o", "mlp_norm"}
DENSE = {"gate", "up", "down"}
LEAVES = {
    "llama": ATTENTION | DENSE,
    "qwen2": ATTENTION | DENSE | {"q_bias", "k_bias", "v_bias"},
    "qwen3": ATTENTION | DENSE | {"q_norm", "k_norm"},
    "qwen3_moe": ATTENTION
    | {"q_norm", "k_norm", "router", "expert_gate", "expert_up", "expert_down"},
}
# family, changes: scaled rope in the two families that use it most, the rest as it comes
CASES = [
    ("llama", {}),
    ("llama", {"tie_embeddings": True, **tiny.SCALING}),
    ("qwen2", {"rope_theta": 1e6}),
    ("qwen3", {"rope_theta": 5e6}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "experts_per_token": 3, **tiny.SCALING}),
]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_leaves_and_shapes_are_those_of_the_family(family):
    cfg = tiny.config(family)
    made = decoder.abstract_params(cfg)
    assert set(made["layers"]) == LEAVES[family]
    assert jax.tree.map(lambda x: x.shape, made) == families.param_shapes(cfg)
    shapes = families.layer_shapes(cfg)
    assert shapes["q"] == (20, 32) and shapes["k"] == (20, 16) and shapes["o"] == (32, 20)
    if family == "qwen2":
        assert (shapes["q_bias"], shapes["v_bias"]) == ((32,), (16,))
    if family == "qwen3_moe":
        assert shapes["router"] == (20, 5)
        assert (shapes["expert_up"], shapes["expert_down"]) == ((5, 20, 12), (5, 12, 20))


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_packed_rows_equal_the_reference(family, changes):
    cfg = tiny.config(family, **changes)
    params = tiny.params(cfg)
    parts = [[11, 3], [6, 5]]
    tokens, positions, segments = tiny.rows(cfg, parts, 15)
    got = np.asarray(tiny.hidden(cfg, params, tokens, positions, segments))
    assert np.isfinite(got).all()
    for row, lengths in enumerate(parts):
        at = 0
        for n in lengths:
            want = reference.hidden(cfg, params, tokens[row, at : at + n])
            np.testing.assert_allclose(got[row, at : at + n], want, atol=2e-5)
            at += n


def test_each_bias_is_used_and_gets_a_gradient():
    cfg = tiny.config("qwen2")
    params = tiny.params(cfg)
    rows = tiny.rows(cfg, [[7]], 7)

    @jax.jit
    @jax.value_and_grad
    def total(layers):
        return jnp.sum(jnp.sin(decoder.hidden_fn(cfg, params | {"layers": layers}, *rows)))

    layers = params["layers"]
    value, gradient = total(layers)
    for bias in ("q_bias", "k_bias", "v_bias"):
        without = layers | {bias: jnp.zeros_like(layers[bias])}
        assert abs(float(value - total(without)[0])) > 1e-3
        assert (np.abs(np.asarray(gradient[bias])).max(axis=-1) > 1e-4).all()  # in every layer


def test_scaled_frequencies_equal_the_release_formula():
    """Llama 3.1's own numbers: 64 pairs, theta 500,000, factor 8, 8,192 positions."""
    cfg = tiny.config(
        "llama", head_dim=128, rope_theta=5e5, **(tiny.SCALING | {"rope_original_position": 8192})
    )
    got = rope.rope_frequencies(cfg)
    np.testing.assert_allclose(got, reference.frequencies(cfg), rtol=1e-13)
    plain = rope.rope_frequencies(
        dataclasses.replace(
            cfg,
            rope_factor=1.0,
            rope_low_freq_factor=1.0,
            rope_high_freq_factor=4.0,
            rope_original_position=0,
        )
    )
    ratio = plain / got
    # wavelength < 2048 stays: f > 2 pi / 2048 = 0.00307, i < 64 ln(326) / ln(500000) = 28.2
    assert (ratio[:29] == 1).all() and (ratio[29:35] > 1).all()
    # wavelength > 8192 is stretched eightfold: i > 64 ln(1304) / ln(500000) = 34.98
    np.testing.assert_allclose(ratio[35:], 8, rtol=1e-12)
    assert (np.diff(ratio) >= 0).all()


def test_long_positions_rotate_by_their_angle():
    """Position 30,000 under scaled rope, against float64 cos and sin of the same angle."""
    cfg = tiny.config("llama", **tiny.SCALING)
    x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    positions = np.array([0, 777, 30_000])
    frequency = rope.rope_frequencies(cfg)
    got = np.asarray(rope.rope(jnp.asarray(x), jnp.asarray(positions, jnp.int32), frequency))
    # fp32 angles: at 30,000 rad one ulp is 2e-3
    for row, position in enumerate(positions):
        angle = position * frequency.astype(np.float32).astype(np.float64)
        a, b = x[row, :, :4].astype(np.float64), x[row, :, 4:].astype(np.float64)
        want = np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
        )
        np.testing.assert_allclose(got[row], want, atol=1e-6 + position * 2e-7)


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("mamba", {}, r"'mamba'; known: llama, qwen2, qwen3, qwen3_moe"),
        ("llama", {"num_kv_heads": 3}, "multiple of"),
        ("llama", {"head_dim": 7}, "must be even"),
        ("qwen3", {"num_experts": 4}, r"model\.num_experts.*'qwen3' has no experts"),
        ("qwen2", {"norm_topk_prob": True}, r"model\.norm_topk_prob.*no experts"),
        ("qwen3_moe", {"num_experts": 0}, r"model\.num_experts.*at least 1"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, r"model\.moe_intermediate_size"),
        ("qwen3_moe", {"experts_per_token": 6}, r"from 1 to 'model\.num_experts' \(5\), got 6"),
        ("llama", {"rope_original_position": 8192}, r"rope_original_position.*no rope scaling"),
        ("llama", tiny.SCALING | {"rope_original_position": 0}, "rope_original_position.*8192"),
        ("llama", tiny.SCALING | {"rope_low_freq_factor": 4.0}, r"rope_low_freq_factor.*\(4\)"),
        ("llama", tiny.SCALING | {"rope_factor": 0.5}, r"rope_factor.*at least 1"),
    ],
)
def test_models_that_cannot_be_are_refused(family, changes, text):
    with pytest.raises(ConfigError, match=text):
        decoder.check_config(tiny.config(family, **changes))
