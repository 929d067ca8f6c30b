"""Per-token losses: pure functions, nats in, loss out. Reductions live in ``loss_weights``."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# exp(20) = 4.9e8: far beyond any ratio that clipping lets through, and finite in fp32.
MAX_LOG_RATIO = 20.0


def masked_log_ratio(
    logprobs: Float[Array, "*S"], anchor: Float[Array, "*S"], mask: Bool[Array, "*S"]
) -> Float[Array, "*S"]:
    """Return clamp(logprobs - anchor, +-20) where ``mask``, else 0.

    Both sides are replaced before the subtraction, so whatever a masked entry holds (fillers such
    as -9999, inf, NaN) reaches neither the value nor the gradient: selecting only after ``exp``
    would still give 0 * inf = NaN in the gradient.

    Args:
        logprobs: of the policy that is trained, nats.
        anchor: of the policy the ratio is taken against, nats.
        mask: which tokens are trained.
    """
    ratio = jnp.where(mask, logprobs, 0.0) - jnp.where(mask, anchor, 0.0)
    return jnp.clip(ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip_loss(
    log_ratio: Float[Array, "*S"],
    advantages: Float[Array, "*S"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Float[Array, "*S"]:
    """Return the clipped policy-gradient loss of each token.

    r = exp(log_ratio);  l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    with dual clip c > 1, where A < 0:  l = min(l, -c A)

    Args:
        log_ratio: log of pi / pi_anchor per token (``masked_log_ratio``).
        advantages: advantage per token.
        clip_low: lower clip width.
        clip_high: upper clip width (clip-higher: larger than the lower).
        dual_clip: bound on the loss of negative advantages; 0 = off.

    Source: PPO (arXiv 1707.06347, eq. 7); clip-higher: DAPO (arXiv 2503.14476, eq. 10); dual clip:
    arXiv 1912.09729, eq. 5.
    """
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    if dual_clip:
        gain = jnp.where(advantages < 0, jnp.maximum(gain, dual_clip * advantages), gain)
    return -gain


def cross_entropy_loss(logprobs: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> Float[Array, "*S"]:
    """Return -log p(token) where ``mask``, else 0 (supervised fine-tuning)."""
    return -jnp.where(mask, logprobs, 0.0)
