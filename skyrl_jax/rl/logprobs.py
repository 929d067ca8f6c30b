"""Token log-probs and entropies from hidden states, in chunks: logits are never [B, T, V].

``token_logprobs`` is for a head that lies whole on a device. ``vocab_parallel_logprobs`` is for one
that is spread over the vocabulary: hidden chunks travel, the head does not.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from skyrl_jax.rl.softmax import logprob_and_entropy, matmul_fp32


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

    def body(_: None, xs: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
        part, wanted, degrees = xs
        return None, logprob_and_entropy(part, head, wanted, degrees, entropy_gradient)

    parts = (
        _chunks(hidden, chunk, 0),
        _chunks(targets, chunk, 0),
        _chunks(temperature, chunk, 1),
    )
    _, (logprobs, entropy) = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), None, parts)
    return logprobs.reshape(-1)[:n], entropy.reshape(-1)[:n]


def vocab_parallel_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    temperature: Float[Array, "B T"],
    *,
    mesh: Mesh,
    rows: PartitionSpec,
    vocab: PartitionSpec,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return what ``token_logprobs`` returns, for a head sharded over its vocabulary.

    Each device computes the logits of a chunk of tokens for its own part of the vocabulary:

        m = max_v l_v      z = sum_v exp(l_v - m)      h = l_target
        log p = h - m - log z      entropy = log z - sum_v exp(l_v - m) (l_v - m) / z

    where max and sums run over the devices' parts (one pmax and one psum of [3, chunk] a chunk).
    Tokens that are spread over an axis of the vocabulary are gathered over it chunk by chunk; the
    other axes of ``rows`` work side by side. The head's gradient is summed over those once, after
    the loop: no collective of the head's size runs inside it, and none gathers the head.

    Args:
        hidden: normed hidden states, in the compute dtype.
        head: output projection, fp32 master.
        targets: the token whose log-prob is wanted.
        temperature: divides the logits of each token, > 0.
        mesh: the devices.
        rows: how [B, T] is spread over mesh axes.
        vocab: how the head [D, V] is spread: only V, over axes whose product divides it.
        chunk: tokens per chunk, gathered ones included.
        entropy_gradient: whether the entropy takes part in the loss.

    Returns:
        (log-probs, entropies), both [B, T] fp32 nats, sharded like ``targets``.

    Source: Megatron-LM (arXiv 1909.08053, section 3: fused vocab-parallel cross entropy).
    """
    tokens, pieces = _axes(rows), _axes(vocab)
    shared = tuple(a for a in pieces if a in tokens)
    share = math.prod(mesh.shape[a] for a in shared)

    def local(
        hidden: Array, head: Array, targets: Array, temperature: Array
    ) -> tuple[Array, Array]:
        n = targets.size
        size = min(max(1, chunk // share), n)  # own tokens per chunk
        # Said here, once, that these values differ between devices: said inside the loop (as JAX
        # would), their gradients were summed over the devices in every step of it.
        head = _vary(head, tuple(a for a in tokens if a not in pieces))
        hidden = _vary(hidden, tuple(a for a in pieces if a not in tokens))
        first = jax.lax.axis_index(pieces) * head.shape[1]
        parts = (
            _chunks(hidden.reshape(n, -1), size, 0),
            _gathered(_chunks(targets.reshape(n), size, 0), shared),
            _gathered(_chunks(temperature.reshape(n), size, 1), shared),
        )

        def body(_: None, xs: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
            ours, wanted, degrees = xs
            if shared:
                ours = jax.lax.all_gather(ours, shared, axis=0, tiled=True)
            both = _shard_logprobs(ours, wanted - first, degrees, head, pieces, entropy_gradient)
            if shared:
                at = jax.lax.axis_index(shared) * size
                both = jax.lax.dynamic_slice_in_dim(both, at, size, axis=1)
            return None, (both[0], both[1])

        _, (logprobs, entropy) = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), None, parts)
        shape = targets.shape
        return logprobs.reshape(-1)[:n].reshape(shape), entropy.reshape(-1)[:n].reshape(shape)

    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, vocab, rows, rows),
        out_specs=(rows, rows),
    )
    both: tuple[Array, Array] = sharded(hidden, head, targets, temperature)
    return both


def _shard_logprobs(
    hidden: Array,
    targets: Array,
    temperature: Array,
    head: Array,
    vocab: tuple[str, ...],
    entropy_gradient: bool,
) -> Array:
    """Return [2, N] (log-probs, entropies) from one part of the vocabulary per device.

    ``targets`` count from the start of the own part: those outside it hit nothing here.
    """
    pmax: Any = jax.lax.pmax  # both ship no types
    psum: Any = jax.lax.psum
    logits = matmul_fp32(hidden, head) / temperature[:, None]
    top = pmax(jnp.max(jax.lax.stop_gradient(logits), axis=-1), vocab)
    below = logits - top[:, None]
    exps = jnp.exp(below)
    hit = targets[:, None] == jnp.arange(logits.shape[-1])
    weighted = exps * below if entropy_gradient else jax.lax.stop_gradient(exps * below)
    sums = (jnp.sum(exps, -1), jnp.sum(jnp.where(hit, logits, 0.0), -1), jnp.sum(weighted, -1))
    z, target, mean = psum(jnp.stack(sums), vocab)
    logprobs = target - (top + jnp.log(z))
    if not entropy_gradient:
        z = jax.lax.stop_gradient(z)
    return jnp.stack([logprobs, jnp.log(z) - mean / z])


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Return the mesh axes that a partition uses, in order."""
    dims = (d if isinstance(d, tuple) else (d,) for d in spec if d is not None)
    return tuple(axis for dim in dims for axis in dim)


def _vary(x: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _chunks(x: Array, size: int, fill: int) -> Array:
    """Pad [N, ...] and return it as [chunks, size, ...]."""
    widths = ((0, -x.shape[0] % size),) + ((0, 0),) * (x.ndim - 1)
    return jnp.pad(x, widths, constant_values=fill).reshape(-1, size, *x.shape[1:])


def _gathered(x: Array, axes: tuple[str, ...]) -> Array:
    """Return [chunks, size of all devices] of [chunks, size], in the devices' order."""
    return jax.lax.all_gather(x, axes, axis=1, tiled=True) if axes else x


def shift_right(x: Array) -> Array:
    """Return y with y[:, t] = x[:, t - 1]: lines hidden states up with the tokens they predict."""
    return jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)
