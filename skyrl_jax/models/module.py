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
from skyrl_jax.models.families import layer_shapes


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
    """All transformer blocks, stacked on a leading L axis (they run in one scan).

    Which leaves there are is the family's matter (models/families.py).
    """

    def __init__(self, cfg: ModelConfig, key: jax.Array) -> None:
        """Draw matrices with deviation 1/sqrt(fan in); norms start at one and biases at zero.

        Matrices that write to the residual stream are smaller by sqrt(2 L), so that its size does
        not grow with depth.
        """
        n, shapes = cfg.num_layers, layer_shapes(cfg)
        drawn = [name for name, shape in shapes.items() if len(shape) > 1]
        keys = dict(zip(drawn, jax.random.split(key, len(drawn)), strict=True))
        for name, shape in shapes.items():
            if name in keys:
                gain = 1.0 / math.sqrt(2 * n) if name in ("o", "down", "expert_down") else 1.0
                scale = gain / math.sqrt(shape[-2])
                leaf = scale * jax.random.normal(keys[name], (n, *shape))
            else:
                leaf = jnp.zeros((n, *shape)) if name.endswith("bias") else jnp.ones((n, *shape))
            setattr(self, name, nnx.Param(leaf))


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
