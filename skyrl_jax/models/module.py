"""The policy as a Flax NNX module: it names, shapes and initialises the parameters.

``nnx.split`` happens once, in ``pure_params``; from there on everything is a plain nested dict and
pure functions (models/decoder.py).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from skyrl_jax.core.config import ModelConfig


class Embed(nnx.Module):
    """Token embeddings: ``embedding`` [V, D]."""

    def __init__(self, cfg: ModelConfig, key: jax.Array) -> None:
        """Draw the table with standard deviation 1/sqrt(D): tied logits start at unit scale.

        With the usual 0.02 a small tied model learns to copy from its prompt much later.
        """
        shape = (cfg.vocab_size, cfg.hidden_size)
        scale = 1.0 / math.sqrt(cfg.hidden_size)
        self.embedding = nnx.Param(scale * jax.random.normal(key, shape, jnp.float32))


class Layers(nnx.Module):
    """All transformer blocks, stacked on a leading L axis (they run in one scan)."""

    def __init__(self, cfg: ModelConfig, key: jax.Array) -> None:
        """Draw projections with deviation 1/sqrt(fan in).

        Those that write to the residual stream are smaller by sqrt(2 L), so that its size does not
        grow with depth.
        """
        n, d, f = cfg.num_layers, cfg.hidden_size, cfg.intermediate_size
        heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        keys = iter(jax.random.split(key, 7))

        def dense(fan_in: int, fan_out: int, gain: float = 1.0) -> nnx.Param[jax.Array]:
            scale = gain / math.sqrt(fan_in)
            return nnx.Param(scale * jax.random.normal(next(keys), (n, fan_in, fan_out)))

        residual = 1.0 / math.sqrt(2 * n)
        self.attn_norm = nnx.Param(jnp.ones((n, d)))
        self.q = dense(d, heads)
        self.k = dense(d, kv)
        self.v = dense(d, kv)
        self.o = dense(heads, d, residual)
        self.q_norm = nnx.Param(jnp.ones((n, cfg.head_dim)))
        self.k_norm = nnx.Param(jnp.ones((n, cfg.head_dim)))
        self.mlp_norm = nnx.Param(jnp.ones((n, d)))
        self.gate = dense(d, f)
        self.up = dense(d, f)
        self.down = dense(f, d, residual)


class FinalNorm(nnx.Module):
    """The last RMSNorm: ``scale`` [D]."""

    def __init__(self, cfg: ModelConfig) -> None:
        """Start at one."""
        self.scale = nnx.Param(jnp.ones((cfg.hidden_size,)))


class LmHead(nnx.Module):
    """The output projection of an untied model: ``kernel`` [D, V]."""

    def __init__(self, cfg: ModelConfig, key: jax.Array) -> None:
        """Draw the kernel with standard deviation 0.02."""
        shape = (cfg.hidden_size, cfg.vocab_size)
        self.kernel = nnx.Param(0.02 * jax.random.normal(key, shape, jnp.float32))


class Decoder(nnx.Module):
    """A decoder-only language model's parameters."""

    def __init__(self, cfg: ModelConfig, key: jax.Array) -> None:
        """Make every leaf from one key."""
        embed, layers, lm_head = jax.random.split(key, 3)
        self.embed = Embed(cfg, embed)
        self.layers = Layers(cfg, layers)
        self.final_norm = FinalNorm(cfg)
        if not cfg.tie_embeddings:
            self.lm_head = LmHead(cfg, lm_head)


def pure_params(cfg: ModelConfig, key: jax.Array) -> dict[str, Any]:
    """Split the module once and return its Param leaves as a plain nested dict (traceable)."""
    _, state = nnx.split(Decoder(cfg, key), nnx.Param)
    return nnx.to_pure_dict(state)
