"""Token log-probs and entropies from hidden states, in chunks: logits are never [B, T, V]."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class TokenStats(NamedTuple):
    """What a policy says about the tokens of a batch; entry t describes tokens[t].

    ``logprobs`` and ``entropy`` are [B, T] fp32 nats, 0 where a token has no predecessor in its
    segment. ``values`` (critics) and ``aux`` (extra losses) belong to user score functions.
    """

    logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    values: Any = None
    aux: Any = None


def token_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " N"],
    temperature: Float[Array, " N"],
    *,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Return log p(target) and entropy of softmax(hidden @ head / temperature).

    Each chunk of tokens recomputes its logits in the backward pass, so that memory is
    chunk x V, whatever N is. Logits, softmax and the gradient of ``head`` are fp32.

    Args:
        hidden: normed hidden states, in the compute dtype.
        head: output projection, fp32 master.
        targets: the token whose log-prob is wanted.
        temperature: divides the logits of each token, > 0.
        chunk: tokens per chunk.
        entropy_gradient: whether the entropy takes part in the loss.

    Returns:
        (log-probs, entropies), both [N] fp32 nats.
    """
    n = hidden.shape[0]
    chunk = min(chunk, n)
    pad = -n % chunk

    def split(x: Array, fill: int) -> Array:
        widths = ((0, pad),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=fill).reshape(-1, chunk, *x.shape[1:])

    def body(_: None, xs: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
        return None, _chunk_logprobs(*xs, head, entropy_gradient)

    parts = (split(hidden, 0), split(targets, 0), split(temperature, 1))
    _, (logprobs, entropy) = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), None, parts)
    return logprobs.reshape(-1)[:n], entropy.reshape(-1)[:n]


def _chunk_logprobs(
    hidden: Array, targets: Array, temperature: Array, head: Array, entropy_gradient: bool
) -> tuple[Array, Array]:
    exact = hidden.dtype == jnp.float32
    logits = jnp.matmul(
        hidden,
        head.astype(hidden.dtype),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    logits = logits / temperature[:, None]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of a gather: it stays local when the vocabulary is sharded.
    hit = targets[:, None] == jnp.arange(logits.shape[-1])
    logprobs = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1) - logsumexp
    if not entropy_gradient:
        logits, logsumexp = jax.lax.stop_gradient((logits, logsumexp))
    probs = jnp.exp(logits - logsumexp[:, None])
    return logprobs, logsumexp - jnp.sum(probs * logits, axis=-1)


def shift_right(x: Array) -> Array:
    """Return y with y[:, t] = x[:, t - 1]: lines hidden states up with the tokens they predict."""
    return jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)
