"""Attention in plain XLA that never holds T x T scores: block by block, forward and backward.

With s_ij = q_i . k_j / sqrt(K) where token i sees token j, and -1e30 elsewhere:

    m_i = max_j s_ij      l_i = sum_j exp(s_ij - m_i)      o_i = sum_j exp(s_ij - m_i) v_j / l_i

A block of queries walks over the blocks of keys that it may see and brings m, l and the sum up to
date. The backward pass needs L_i = m_i + log l_i alone to compute the weights again:

    p_ij = exp(s_ij - L_i)                     dv_j = sum_i p_ij do_i
    ds_ij = p_ij (do_i . v_j - do_i . o_i)     dq_i = sum_j ds_ij k_j      dk_j = sum_i ds_ij q_i

(q holds 1 / sqrt(K) already). Sums are fp32, whatever the dtype of q, k, v.

Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2; blocks outside the segments of a
block of queries are left out too.

Shapes: B rows, Q queries, S keys, H query heads, G key/value heads, K head dim; in blocks: I blocks
of M = H / G x (queries of a block) queries, J blocks of W keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

BLOCK = 512  # tokens: scores of H x 512 x 512 fp32 are held at once


class Tokens(NamedTuple):
    """What decides who sees whom.

    positions [B, T]: in the token's own segment. segment_ids [B, T]: 0 = padding. index [T]: the
    token's place in its row in natural order (rows of a context-parallel mesh lie in another one).
    """

    positions: Any
    segment_ids: Any
    index: Any


class _Blocks(NamedTuple):
    """Queries' [I, B, .] and keys' [J, B, W] positions and segments; key blocks lo to hi [I]."""

    q_positions: Array
    q_segments: Array
    k_positions: Array
    k_segments: Array
    lo: Array
    hi: Array


def blockwise_attention(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    ours: Tokens,
    theirs: Tokens,
    *,
    block: int = BLOCK,
) -> Float[Array, "B Q H K"]:
    """Return causal grouped-query attention inside segments.

    Args:
        q: queries, rope applied; not yet divided by sqrt(K).
        k: keys of whole rows in natural order.
        v: values, likewise.
        ours: of the queries, any part of the rows in any order; each query's own key is among
            ``theirs``. Segments are contiguous and their positions ascend.
        theirs: of the keys.
        block: queries and keys per block.
    """
    b, n, h, d = q.shape
    s, g = k.shape[1:3]
    size_q, size_k = min(block, n), min(block, s)
    pad_q, pad_k = -n % size_q, -s % size_k
    q = (q.astype(jnp.float32) / math.sqrt(d)).astype(q.dtype)
    q = _pad(q, pad_q).reshape(b, -1, size_q, g, h // g, d).transpose(1, 0, 3, 4, 2, 5)
    q = q.reshape(-1, b, g, h // g * size_q, d)  # [I B G M K]
    k, v = (
        _pad(x, pad_k).reshape(b, -1, size_k, g, d).transpose(1, 0, 3, 2, 4) for x in (k, v)
    )  # [J B G W K]
    out = _flash(q, k, v, _cut(ours, theirs, size_q, size_k))
    out = out.reshape(-1, b, g, h // g, size_q, d).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(b, -1, h, d)[:, :n]


def _cut(ours: Tokens, theirs: Tokens, size_q: int, size_k: int) -> _Blocks:
    """Cut what decides visibility into blocks, and find the blocks of keys of each of queries."""

    def split(x: Array, size: int, **how: Any) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), **how)
        return x.reshape(x.shape[0], -1, size).swapaxes(0, 1)

    # A query that pads the last block stands where the last real one does: it sees something.
    first = split(jnp.maximum(ours.index - ours.positions, 0), size_q, mode="edge")
    last = split(ours.index[None], size_q, mode="edge")
    return _Blocks(
        q_positions=split(ours.positions, size_q, mode="edge"),
        q_segments=split(ours.segment_ids, size_q, mode="edge"),
        k_positions=split(theirs.positions, size_k),
        k_segments=split(theirs.segment_ids, size_k, constant_values=-1),  # seen by none
        lo=jnp.min(first, axis=(1, 2)) // size_k,
        hi=jnp.max(last, axis=(1, 2)) // size_k + 1,
    )


def _pad(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, 0)))


@jax.custom_vjp
def _flash(q: Array, k: Array, v: Array, blocks: _Blocks) -> Array:
    """Return [I B G M K] attention of q [I B G M K] over k, v [J B G W K]."""
    return _flash_forward(q, k, v, blocks)[0]


def _flash_forward(q: Array, k: Array, v: Array, blocks: _Blocks) -> tuple[Array, Any]:
    def one(xs: Any) -> tuple[Array, Array]:
        q_i, positions, segments, lo, hi = xs

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = carry
            scores = _scores(q_i, k[j], positions, segments, blocks, j)
            new = jnp.maximum(top, jnp.max(scores, axis=-1))
            shrink, p = jnp.exp(top - new), jnp.exp(scores - new[..., None])
            acc = acc * shrink[..., None] + _dot("bgmw,bgwk->bgmk", p.astype(v.dtype), v[j])
            return new, total * shrink + jnp.sum(p, axis=-1), acc

        zero = jnp.zeros(q_i.shape, jnp.float32)
        start = (jnp.full(q_i.shape[:-1], -jnp.inf, jnp.float32), zero[..., 0], zero)
        top, total, acc = jax.lax.fori_loop(lo, hi, step, start)
        return (acc / total[..., None]).astype(q.dtype), top + jnp.log(total)

    ours = (q, blocks.q_positions, blocks.q_segments, blocks.lo, blocks.hi)
    # Named for the remat policy "attn_out": with both kept the backward pass starts at once.
    out, logsumexp = checkpoint_name(jax.lax.map(one, ours), "attn_out")
    return out, (q, k, v, blocks, out, logsumexp)


def _flash_backward(kept: Any, grad: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, blocks, out, logsumexp = kept
    shared = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1)  # do_i . o_i

    def one(sums: tuple[Array, Array], xs: Any) -> tuple[tuple[Array, Array], Array]:
        q_i, do, total, inner, positions, segments, lo, hi = xs

        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = carry
            p = jnp.exp(_scores(q_i, k[j], positions, segments, blocks, j) - total[..., None])
            ds = p * (_dot("bgmk,bgwk->bgmw", do, v[j]) - inner[..., None])
            ds = ds.astype(q.dtype)
            dv = dv.at[j].add(_dot("bgmw,bgmk->bgwk", p.astype(do.dtype), do))
            dk = dk.at[j].add(_dot("bgmw,bgmk->bgwk", ds, q_i))
            return dq + _dot("bgmw,bgwk->bgmk", ds, k[j]), dk, dv

        zero = jnp.zeros(q_i.shape, jnp.float32)
        dq, *done = jax.lax.fori_loop(lo, hi, step, (zero, *sums))
        return (done[0], done[1]), dq.astype(q.dtype)

    ours = (q, grad, logsumexp, shared, blocks.q_positions, blocks.q_segments)
    zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (dk, dv), dq = jax.lax.scan(one, zeros, (*ours, blocks.lo, blocks.hi))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_flash.defvjp(_flash_forward, _flash_backward)


def _scores(
    q: Float[Array, "B G M K"],
    k: Float[Array, "B G W K"],
    positions: Int[Array, "B N"],
    segments: Int[Array, "B N"],
    blocks: _Blocks,
    j: Array,
) -> Float[Array, "B G M W"]:
    """Return the masked fp32 scores of a block of queries and key block j."""
    mask = (segments[:, :, None] == blocks.k_segments[j][:, None]) & (
        positions[:, :, None] >= blocks.k_positions[j][:, None]
    )
    mask = jnp.tile(mask, (1, q.shape[2] // mask.shape[1], 1))[:, None]
    return jnp.where(mask, _dot("bgmk,bgwk->bgmw", q, k), -1e30)


def _dot(equation: str, x: Array, y: Array) -> Array:
    """Multiply in the operands' dtype with fp32 sums; exact fp32 when that is float32."""
    exact = x.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)
