"""Log-prob of one token of each row, and the entropy, with a gradient that makes few passes.

Logits are the widest arrays of a step: [tokens, vocabulary]. JAX's own gradient of the formulas
below keeps four such arrays; this one keeps exp(l - max l) (and l - max l, if the entropy is
trained) and makes the gradient of l in one pass. A step of a small model on a CPU is 6 % faster.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def logprob_and_entropy(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " N"],
    temperature: Float[Array, " N"],
    entropy_gradient: bool,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Return log p(target) and entropy of softmax(hidden @ head / temperature).

        l = hidden @ head / temperature     b = l - max_v l_v     z = sum_v exp(b_v)
        log p = b_target - log z            H = log z - sum_v p_v b_v

        d log p / d l_v = [v = target] - p_v        d H / d l_v = -p_v (b_v - log z + H)

    Everything is said by b: the differences of large logits that share an offset would be lost in
    the rounding of l.

    Args:
        hidden: normed hidden states, in the compute dtype.
        head: output projection, fp32 master.
        targets: the token whose log-prob is wanted.
        temperature: divides the logits of each token, > 0; gets no gradient.
        entropy_gradient: whether the entropy takes part in the loss; without it its gradient is 0.

    Returns:
        (log-probs, entropies), both [N] fp32 nats.
    """
    return _forward(hidden, head, targets, temperature, entropy_gradient)[0]


def matmul_fp32(hidden: Float[Array, "N D"], head: Float[Array, "D V"]) -> Float[Array, "N V"]:
    """Return fp32 hidden @ head: exact for fp32 hidden states, else summed in fp32."""
    return jnp.matmul(
        hidden,
        head.astype(hidden.dtype),
        precision=_precision(hidden),
        preferred_element_type=jnp.float32,
    )


def _forward(
    hidden: Array, head: Array, targets: Array, temperature: Array, entropy_gradient: bool
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    raw = matmul_fp32(hidden, head)
    # Division by a positive number keeps the order: the largest l without an array of all l.
    top = jnp.max(raw, axis=-1) / temperature
    below = raw / temperature[:, None] - top[:, None]
    exps = jnp.exp(below)
    z = jnp.sum(exps, axis=-1)
    log_z = jnp.log(z)
    target = jnp.take_along_axis(raw, targets[:, None], axis=1)[:, 0] / temperature - top
    entropy = log_z - jnp.sum(exps * below, axis=-1) / z
    kept = (below, log_z, entropy) if entropy_gradient else None
    return (target - log_z, entropy), (hidden, head, targets, temperature, exps, z, kept)


def _backward(
    entropy_gradient: bool, residuals: tuple[Any, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    hidden, head, targets, temperature, exps, z, kept = residuals
    of_logprob, of_entropy = (c / temperature for c in cotangents)
    hit = targets[:, None] == jnp.arange(exps.shape[-1])
    of_logits = jnp.where(hit, of_logprob[:, None], 0.0) - exps * (of_logprob / z)[:, None]
    if entropy_gradient:
        below, log_z, entropy = kept
        of_logits -= exps * (of_entropy / z)[:, None] * (below + (entropy - log_z)[:, None])
    precision = _precision(hidden)
    of_hidden = jnp.matmul(of_logits, head.astype(hidden.dtype).T, precision=precision)
    of_head = jnp.matmul(_apart(hidden.T), of_logits, precision=precision)
    return of_hidden.astype(hidden.dtype), _apart(of_head).astype(head.dtype), None, None


logprob_and_entropy.defvjp(_forward, _backward)


def _precision(hidden: Array) -> jax.lax.Precision:
    exact = hidden.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def _apart(x: Array) -> Array:
    """On a CPU, keep XLA from folding a transpose into the product that reads or makes ``x``.

    Folded (as the gradient of a tied head would be), its product runs at half the rate there.
    """
    y: Array = jax.lax.platform_dependent(
        x, cpu=jax.lax.optimization_barrier, default=lambda same: same
    )
    return y
