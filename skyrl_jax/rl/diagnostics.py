"""What to watch in a policy update, over trained tokens, as sums and maxima that add up.

Micro-batches each give a ``Tally``; ``merge`` joins them and ``finish`` makes the means, so the
figures do not depend on how a batch was split.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from skyrl_jax.rl.kl import kl_estimate
from skyrl_jax.rl.losses import masked_log_ratio


class Tally(NamedTuple):
    """Sums and maxima over trained tokens."""

    sums: dict[str, Array]
    maxima: dict[str, Array]


def merge(a: Tally, b: Tally) -> Tally:
    """Join the tallies of two micro-batches."""
    return Tally(
        jax.tree.map(jnp.add, a.sums, b.sums), jax.tree.map(jnp.maximum, a.maxima, b.maxima)
    )


def policy_tally(
    logprobs: Float[Array, "B T"],
    behavior_logprobs: Float[Array, "B T"],
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Tally:
    """Tally one micro-batch.

    Args:
        logprobs: of the learner, nats.
        behavior_logprobs: of the engine that sampled, nats; read where ``mask``.
        log_ratio: against the anchor of the loss.
        advantages: advantage per token.
        entropy: of the learner's distribution, nats.
        mask: trained tokens.
        clip_low: lower clip width.
        clip_high: upper clip width.

    Returns:
        sums: tokens, mismatch_abs, mismatch_kl (k3 of KL(behavior || learner)), ratio, entropy,
        clip_low_fraction (ratio below the band with A < 0), clip_high_fraction (above it with
        A > 0): the cases in which the clip stops the gradient. Maxima: mismatch_abs, ratio.
    """
    difference = masked_log_ratio(behavior_logprobs, logprobs, mask)
    ratio = jnp.where(mask, jnp.exp(log_ratio), 0.0)
    low = mask & (ratio < 1.0 - clip_low) & (advantages < 0)
    high = mask & (ratio > 1.0 + clip_high) & (advantages > 0)
    gap = jnp.abs(difference)
    sums = {
        "tokens": mask,
        "mismatch_abs": gap,
        "mismatch_kl": jnp.where(mask, kl_estimate(difference, "k3"), 0.0),
        "ratio": ratio,
        "entropy": jnp.where(mask, entropy, 0.0),
        "clip_low_fraction": low,
        "clip_high_fraction": high,
    }
    return Tally(
        {k: jnp.sum(v.astype(jnp.float32)) for k, v in sums.items()},
        {"mismatch_abs": jnp.max(gap), "ratio": jnp.max(ratio)},
    )


def supervised_tally(
    logprobs: Float[Array, "B T"], entropy: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Tally:
    """Tally one micro-batch of supervised fine-tuning: tokens, nll and entropy."""
    sums = {"tokens": mask.astype(jnp.float32), "nll": -logprobs, "entropy": entropy}
    return Tally({k: jnp.sum(jnp.where(mask, v, 0.0)) for k, v in sums.items()}, {})


def router_tally(
    load: Float[Array, "L E"],
    balance_loss: Float[Array, " L"],
    entropy: Float[Array, " L"],
    dropped: Float[Array, " L"],
    mask: Bool[Array, "B T"],
    replayed: Bool[Array, "B T"] | None = None,
) -> Tally:
    """Tally the routers of one micro-batch (models/moe.py); micro-batches count by trained tokens.

    Args:
        load: share of the assignments that went to each expert, per layer.
        balance_loss: per layer, 1 when even.
        entropy: of the router's distribution, mean over real tokens, nats, per layer.
        dropped: assignments that no expert ran, per layer.
        mask: trained tokens.
        replayed: tokens whose experts the engine chose, or ``None``.

    Returns:
        sums: balance_loss and router_entropy (mean over layers), busiest_expert_fraction (of the
        assignments of a layer, mean over layers; 1 / E when even), dropped_assignments, and with
        ``replayed`` replayed_fraction. Maximum: expert_load, the busiest expert of any layer as a
        multiple of the mean.
    """
    tokens = jnp.sum(mask.astype(jnp.float32))
    busiest = jax.lax.stop_gradient(jnp.max(load, axis=-1))
    sums = {
        "balance_loss": tokens * jnp.mean(jax.lax.stop_gradient(balance_loss)),
        "router_entropy": tokens * jnp.mean(entropy),
        "busiest_expert_fraction": tokens * jnp.mean(busiest),
        "dropped_assignments": jnp.sum(dropped),
    }
    if replayed is not None:
        sums["replayed_fraction"] = jnp.sum((replayed & mask).astype(jnp.float32))
    return Tally(sums, {"expert_load": load.shape[-1] * jnp.max(busiest)})


def beside(a: Tally, b: Tally) -> Tally:
    """Join two tallies of one micro-batch that have no figure in common."""
    return Tally(a.sums | b.sums, a.maxima | b.maxima)


def finish(tally: Tally) -> dict[str, Array]:
    """Turn a tally into metrics: ``num_trained_tokens``, ``<name>_mean`` and ``<name>_max``.

    Fractions keep their name; with no trained token every mean is 0.
    """
    tokens = tally.sums["tokens"]
    means = {k: v / jnp.maximum(tokens, 1.0) for k, v in tally.sums.items() if k != "tokens"}
    named = {k if k.endswith("_fraction") else f"{k}_mean": v for k, v in means.items()}
    return {"num_trained_tokens": tokens} | named | {f"{k}_max": v for k, v in tally.maxima.items()}
