"""Rotary position embedding, and Llama 3's way to stretch it over longer contexts.

Shapes: N tokens, K head dim, K/2 frequencies.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from skyrl_jax.core.config import ModelConfig


def rope_frequencies(cfg: ModelConfig) -> Float[np.ndarray, " half"]:
    """Return the angle per position of each pair of channels, in radians, float64.

        f_i = rope_theta ^ (-2 i / K),                        i = 0 .. K/2 - 1
        turns_i = rope_original_position * f_i / (2 pi)       full turns in the trained context
        kept_i = clip((turns_i - low) / (high - low), 0, 1)
        scaled_i = f_i * (kept_i + (1 - kept_i) / rope_factor)

    Fast channels (``high`` turns or more) stay, slow ones (``low`` turns or fewer) are divided by
    ``rope_factor``, and those between are mixed. With ``rope_factor`` 1 the result is f_i.

    Source: the scaling of the Llama 3.1 release (``rope_type`` "llama3" in config.json), there
    written over wavelengths 2 pi / f_i: the same numbers.
    """
    half = cfg.head_dim // 2
    frequency: np.ndarray = cfg.rope_theta ** -(np.arange(half) / half)
    if cfg.rope_factor == 1.0:
        return frequency
    low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
    turns = cfg.rope_original_position * frequency / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / cfg.rope_factor)


def rope(
    x: Float[Array, "N heads K"], positions: Int[Array, " N"], frequency: Float[np.ndarray, " half"]
) -> Float[Array, "N heads K"]:
    """Rotate the two halves of each head by the token's position (half-split form).

    Args:
        x: queries or keys.
        positions: position of each token in its own sequence.
        frequency: radians per position of each channel pair (``rope_frequencies``).
    """
    angle = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(frequency, jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
