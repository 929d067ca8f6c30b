"""A routed feed-forward layer: each token runs through its k best of E experts; none is dropped.

    p = softmax(x W_router)                                          [N E], fp32
    C = the k largest of p, or the experts that the engine chose     [N k]
    w = p at C, divided by their sum where ``norm_topk_prob``
    y = sum_j w_j * down_Cj(silu(x gate_Cj) * (x up_Cj))

Tokens are sorted by expert, so each expert's part is one slice of a grouped matmul: the work does
not depend on how even the routing is, and there is no capacity that tokens could overflow. On CPU
``jax.lax.ragged_dot`` computes every expert for every token and masks, which is right and slow.

Shapes: N tokens, D model, E experts, F ffn of one expert, k experts per token, M = N k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skyrl_jax.core.config import ModelConfig


class MoeStats(NamedTuple):
    """What a router did; padding is left out. Stacked over layers each leads with L.

    load [E]: f_e, the share of the N k assignments that went to expert e (sums to 1).
    prob [E]: p_e, the mean router probability of expert e (sums to 1).
    balance_loss: E sum_e f_e p_e: 1 when even, at most E. Its gradient flows through p alone.
        Source: Switch Transformer (arXiv 2101.03961), eq. 4 without alpha, 5 and 6. There k = 1;
        for k > 1 f counts assignments, not tokens, so that 1 stays the even value (transformers'
        ``load_balancing_loss_func`` is k times this).
    max_load: max_e f_e over the mean 1 / E: 1 when even, E / k or less (one expert cannot take
        a token twice).
    chosen [N k]: the experts of each token, padding included.
    """

    load: Any
    prob: Any
    balance_loss: Any
    max_load: Any
    chosen: Any


def moe_mlp(
    cfg: ModelConfig,
    p: Any,
    x: Float[Array, "N D"],
    *,
    valid: Bool[Array, " N"] | None = None,
    experts: Int[Array, "N k"] | None = None,
) -> tuple[Float[Array, "N D"], MoeStats]:
    """Run one layer's experts.

    Args:
        cfg: the model's shape.
        p: one layer's params: router [D E], expert_gate and expert_up [E D F], expert_down [E F D].
        x: normed residual stream.
        valid: tokens that count in the statistics; ``None`` = all.
        experts: replay: experts chosen elsewhere (by the engine that sampled) take the place of
            this router's own choice; their weights are still this router's. A row that begins
            with a negative id (a token that the engine never fed) keeps its own choice.
    """
    probs = router_probs(x, p["router"])
    chosen = jax.lax.top_k(probs, cfg.experts_per_token)[1]
    if experts is not None:
        chosen = jnp.where(experts[:, :1] < 0, chosen, experts)
    weights = jnp.take_along_axis(probs, chosen, axis=1)
    if cfg.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    outputs = _run_experts(p, x, chosen)
    y = jnp.sum(weights[:, :, None] * outputs.astype(jnp.float32), axis=1).astype(x.dtype)
    return y, router_stats(probs, chosen, valid)


def router_probs(x: Float[Array, "N D"], router: Float[Array, "D E"]) -> Float[Array, "N E"]:
    """Return each token's distribution over experts, fp32.

    Products are of the compute dtype, as in the engine; sums and softmax are fp32, for a logit
    rounded to bf16 would tie experts that are not equal.
    """
    logits = jnp.matmul(
        x, router.astype(x.dtype), precision=_precision(x), preferred_element_type=jnp.float32
    )
    return jax.nn.softmax(logits, axis=-1)


def router_stats(
    probs: Float[Array, "N E"], chosen: Int[Array, "N k"], valid: Bool[Array, " N"] | None = None
) -> MoeStats:
    """Return the load of the experts over the valid tokens (all zeros where there are none)."""
    n, num = probs.shape
    counted = jnp.ones((n,), jnp.float32) if valid is None else valid.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(counted), 1.0)
    per_token = jnp.sum(jax.nn.one_hot(chosen, num, dtype=jnp.float32), axis=1)
    load = jnp.sum(per_token * counted[:, None], axis=0) / (total * chosen.shape[1])
    load = jax.lax.stop_gradient(load)
    prob = jnp.sum(probs * counted[:, None], axis=0) / total
    return MoeStats(
        load=load,
        prob=prob,
        balance_loss=num * jnp.sum(load * prob),
        max_load=num * jnp.max(load),
        chosen=chosen,
    )


def _run_experts(
    p: Any, x: Float[Array, "N D"], chosen: Int[Array, "N k"]
) -> Float[Array, "N k D"]:
    """Return the output of each chosen expert for each token."""
    n, k = chosen.shape
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=p["router"].shape[-1]).astype(jnp.int32)
    rows = x[order // k]
    gated = jax.nn.silu(_grouped(rows, p["expert_gate"], sizes))
    gated = gated * _grouped(rows, p["expert_up"], sizes)
    out = _grouped(gated, p["expert_down"], sizes)
    # back from expert order to token order
    return out[jnp.argsort(order)].reshape(n, k, -1)


def _grouped(
    x: Float[Array, "M A"], w: Float[Array, "E A C"], sizes: Int[Array, " E"]
) -> Float[Array, "M C"]:
    """Multiply the first sizes[0] rows by w[0], the next sizes[1] by w[1], and so on."""
    return jax.lax.ragged_dot(
        x, w.astype(x.dtype), sizes, precision=_precision(x), preferred_element_type=x.dtype
    )


def _precision(x: Array) -> Any:
    exact = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
