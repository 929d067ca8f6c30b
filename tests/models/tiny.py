"""Tiny models of every family, with weights none of which is zero or one."""

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.models import decoder, families

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
EXPERTS = dict(num_experts=5, experts_per_token=2, moe_intermediate_size=12, norm_topk_prob=True)
# Of 4 frequencies at theta 1e4 two stay, one is mixed and one is divided by 8.
SCALING = dict(
    rope_factor=8.0,
    rope_low_freq_factor=1.0,
    rope_high_freq_factor=4.0,
    rope_original_position=1500,
)


def config(family, **changes):
    values = dict(
        family=family,
        vocab_size=37,
        hidden_size=20,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=28,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        max_position=64,
        checkpoint="",
    )
    if family == "qwen3_moe":
        values |= EXPERTS
    return ModelConfig(**(values | changes))


def params(cfg, seed=0):
    """Return params whose norms are not one and whose biases are not zero (numpy draws them)."""
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        if name.endswith("norm") or name == "scale":
            return rng.uniform(0.5, 1.5, shape)
        if name.endswith("bias"):
            return rng.normal(size=shape)
        if name == "embedding":
            return rng.normal(size=shape)
        return rng.normal(size=shape) * (4.0 if name == "router" else 1.0) / np.sqrt(shape[-2])

    return {
        group: {n: jnp.asarray(draw(n, shape), jnp.float32) for n, shape in leaves.items()}
        for group, leaves in families.param_shapes(cfg).items()
    }


hidden = jax.jit(decoder.hidden_fn, static_argnums=0)


def rows(cfg, parts, width, seed=1):
    """Return (tokens, positions, segment_ids) [rows, width]; parts = lengths of each row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, cfg.vocab_size, (len(parts), width)).astype(np.int32)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, lengths in enumerate(parts):
        at = 0
        for number, n in enumerate(lengths):
            positions[row, at : at + n] = np.arange(n)
            segments[row, at : at + n] = number + 1
            at += n
    return jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments)


def bit_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
