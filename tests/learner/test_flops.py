"""FLOPs of a packed batch, by hand on a model small enough to count."""

from dataclasses import replace

import pytest

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.learner.flops import layer_matmul_params, mfu, peak_flops, step_flops

CFG = ModelConfig(
    family="qwen3", vocab_size=10, hidden_size=2, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=4, intermediate_size=5, rope_theta=1e4, rms_norm_eps=1e-6, tie_embeddings=True,
    max_position=64, checkpoint="",
)  # fmt: skip


def test_by_hand():
    # A layer: q 2 x 8, k 2 x 4, v 2 x 4, o 8 x 2, three times 2 x 5: 16 + 8 + 8 + 16 + 30 = 78.
    assert layer_matmul_params(CFG) == 3 * 78
    # Segments of 4 and 6 tokens: 10 tokens, (16 + 36) / 2 = 26 pairs of query and key.
    # Scores: 2 x 4 FLOPs per pair and head forward, as much for the mix, x 3 with backward.
    attention = 3 * 2 * 26 * (2 * 4 + 2 * 4) * 3
    head = 6 * 2 * 10 * 10
    model = 6 * 234 * 10 + head + attention
    assert step_flops(CFG, [4, 6]) == model == 12 * 3 * 2 * 4 * 26 + 6 * (234 + 20) * 10
    # The logits are computed twice in any case: one more forward pass of the head.
    assert step_flops(CFG, [4, 6], hardware=True) == model + 2 * 2 * 10 * 10
    # Remat computes the layers' forward pass twice: 8 N instead of 6 N, 16 instead of 12.
    again = 8 * 234 * 10 + 8 * 2 * 10 * 10 + 16 * 3 * 2 * 4 * 26
    assert step_flops(CFG, [4, 6], hardware=True, remat=True) == pytest.approx(again, rel=1e-12)
    # The model needs as much, however it is computed.
    assert step_flops(CFG, [4, 6], remat=True) == model


def test_packing_matters():
    """One segment of 10 tokens sees more pairs than segments of 4 and 6."""
    assert step_flops(CFG, [10]) - step_flops(CFG, [4, 6]) == 12 * 3 * 2 * 4 * (50 - 26)
    assert step_flops(CFG, []) == 0


def test_a_mixture_counts_the_experts_a_token_uses():
    sparse = replace(CFG, num_experts=8, experts_per_token=2, moe_intermediate_size=7)
    # 48 for attention as above, the router 2 x 8, two experts of 3 x 2 x 7.
    assert layer_matmul_params(sparse) == 3 * (48 + 16 + 84)


def test_mfu():
    assert mfu(3e12, 2.0, 10e12) == pytest.approx(0.15)
    for seconds, peak in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="seconds > 0 and peak_flops > 0"):
            mfu(1.0, seconds, peak)


def test_a_peak_is_known_or_not_told():
    assert peak_flops("TPU v5 lite", "bfloat16") == 197e12
    assert peak_flops("TPU v5 lite", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None
