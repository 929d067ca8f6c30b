"""The losses of a train step: what a policy's scores and a batch make, with their figures.

Every reduction is baked into ``loss_weights``; a loss is sum(weights x per-token loss).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from skyrl_jax.batching.packing import ROUTED
from skyrl_jax.core.config import ObjectiveConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Batch
from skyrl_jax.models.moe import MoeStats
from skyrl_jax.rl import diagnostics
from skyrl_jax.rl.diagnostics import Tally
from skyrl_jax.rl.kl import kl_estimate
from skyrl_jax.rl.logprobs import TokenStats
from skyrl_jax.rl.losses import cross_entropy_loss, masked_log_ratio, ppo_clip_loss

LossFn = Callable[[TokenStats, Batch], tuple[Float[Array, ""], Tally]]


def policy_loss(objective: ObjectiveConfig) -> LossFn:
    """Return the RL loss: sum over tokens of w times a sum of terms.

        clipped policy loss + kl_coef KL to the reference - entropy_coef entropy + balance_coef B

    The ratio is taken against channel ``proximal_logprobs`` where the batch has it (several
    updates over one batch whose engine log-probs differ from the learner's), else against
    ``behavior_logprobs``. With ``on_policy`` it is taken against the log-probs themselves, held
    constant: 1 in value, the policy gradient in its derivative, whatever the engine's arithmetic
    was; right for the one update on what the policy itself sampled. With ``kl_coef`` the batch
    must have channel ``ref_logprobs``.

    B is the load-balance loss of routed experts (models/moe.py): E sum_e f_e p_e of a layer, f and
    p over the real tokens of the whole micro-batch, on all devices; averaged over the layers, so
    that it is 1 when even in a model of any depth. Source: Switch Transformer (arXiv 2101.03961,
    eq. 4), which sums it over layers, and Qwen3-MoE in transformers (``router_aux_loss_coef``),
    which multiplies f and p averaged over all layers, and is k times as large. Being weighted like
    every term, its micro-batches count by their trained tokens.
    """

    def loss(stats: TokenStats, batch: Batch) -> tuple[Array, Tally]:
        weights = jnp.asarray(batch.loss_weights)
        mask = weights != 0
        channels = batch.channels
        behavior = jnp.asarray(batch.behavior_logprobs)
        anchor = jnp.asarray(channels.get("proximal_logprobs", behavior))
        if objective.on_policy:
            anchor = jax.lax.stop_gradient(stats.logprobs)
        log_ratio = masked_log_ratio(stats.logprobs, anchor, mask)
        clip = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
        advantages = jnp.where(mask, jnp.asarray(batch.advantages), 0.0)
        per_token = ppo_clip_loss(log_ratio, advantages, dual_clip=objective.dual_clip, **clip)
        tally = diagnostics.policy_tally(
            stats.logprobs, behavior, log_ratio, advantages, stats.entropy, mask, **clip
        )
        tally = diagnostics.beside(tally, _router_tally(stats, batch, mask))
        if objective.kl_coef:
            if "ref_logprobs" not in channels:
                raise ConfigError("'objective.kl_coef' is not 0 but the batch has no ref_logprobs")
            from_ref = masked_log_ratio(stats.logprobs, jnp.asarray(channels["ref_logprobs"]), mask)
            kl = jnp.where(mask, kl_estimate(from_ref, objective.kl_kind), 0.0)
            per_token = per_token + objective.kl_coef * kl
            tally.sums["ref_kl"] = jnp.sum(kl)
        if objective.entropy_coef:
            per_token = per_token - objective.entropy_coef * stats.entropy
        if objective.balance_coef:
            per_token = per_token + objective.balance_coef * _balance(stats)
        return jnp.sum(weights * jnp.where(mask, per_token, 0.0)), tally

    return loss


def _balance(stats: TokenStats) -> Array:
    """Return the load-balance loss of a micro-batch, averaged over layers."""
    if not isinstance(stats.aux, MoeStats):
        raise ConfigError(
            "'objective.balance_coef' is not 0 but the policy has no routed experts; use 0"
        )
    balance: Array = jnp.mean(stats.aux.balance_loss)
    return balance


def _router_tally(stats: TokenStats, batch: Batch, mask: Array) -> Tally:
    """Return the figures of routed experts, empty where the policy has none."""
    if not isinstance(stats.aux, MoeStats):
        return Tally({}, {})
    routed = batch.channels.get(ROUTED)
    replayed = None if routed is None else jnp.all(jnp.asarray(routed) >= 0, axis=(2, 3))
    routers = stats.aux
    return diagnostics.router_tally(
        routers.load, routers.balance_loss, routers.entropy, routers.dropped, mask, replayed
    )


def supervised_loss() -> LossFn:
    """Return sum(w * -log p(token)); the weights hold mask, reduction and prompt weight."""

    def loss(stats: TokenStats, batch: Batch) -> tuple[Array, Tally]:
        weights = jnp.asarray(batch.loss_weights)
        mask = weights != 0
        tally = diagnostics.supervised_tally(stats.logprobs, stats.entropy, mask)
        tally = diagnostics.beside(tally, _router_tally(stats, batch, mask))
        return jnp.sum(weights * cross_entropy_loss(stats.logprobs, mask)), tally

    return loss
