"""Per-token estimates of KL(p || q) from tokens drawn from p.

With x = log p - log q of the drawn token:  k1 = x,  k2 = x^2 / 2,  k3 = exp(-x) - 1 + x.

k1 is unbiased and noisy, k3 unbiased, never negative and calm; as a loss, the gradient of k2 is the
gradient of KL, that of k3 is not quite (it is the gradient of the reverse direction near p = q).
Source: J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def kl_estimate(log_ratio: Float[Array, "*S"], kind: str) -> Float[Array, "*S"]:
    """Return the estimate of each token.

    Args:
        log_ratio: log p - log q in nats, clamped (``losses.masked_log_ratio``).
        kind: "k1", "k2" or "k3".

    Raises:
        ValueError: another kind.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * jnp.square(log_ratio)
    if kind == "k3":
        return jnp.exp(-log_ratio) - 1.0 + log_ratio
    raise ValueError(f"unknown KL estimate {kind!r}; known: k1, k2, k3")
