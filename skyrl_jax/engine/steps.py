"""The engine's device programs: pure functions over a KV cache with one slot per live request.

Every program has fixed shapes, and no row reads another row's data, so a request's bits depend on
neither its slot nor its neighbours. The draw of a token depends on (seed, position, logits) alone.

The cache is cut into pages of W positions, each an array of its own, stored as the two matmuls of
attention read them. A program over the first n pages touches no more than these, without the copies
that slicing one long array costs on a CPU; and since pages are added up in order, a page that holds
nothing for a row adds exact zeros: bits do not depend on n (engine/block.py checks it at start).

Shapes: S slots, W positions a page, P chunk rows of C tokens, H query heads, G key/value heads,
K head dim, V vocabulary, E stop ids a row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.models import decoder

Params = Any
GREEDY_BELOW = 1e-6  # temperatures under this mean argmax, as in SGLang
PAGE = 64
_CDF_BLOCK = 32
_EXACT = jax.lax.Precision.HIGHEST
_MASKED = -1e30


class Cache(NamedTuple):
    """Keys [layer][page][S, G, K, W] and values [layer][page][S, G, W, K]."""

    k: tuple[tuple[Array, ...], ...]
    v: tuple[tuple[Array, ...], ...]


class Rows(NamedTuple):
    """What a decode dispatch knows about each slot.

    ``token`` is fed next at ``position``; ``budget`` tokens may still be sampled (0 = idle slot);
    ``stops`` is padded with -1; ``seed`` holds the two words of the request's 64-bit seed. Where
    ``forced`` is not -1 that token is taken instead of the draw, with the log-prob it really has.
    """

    token: Int[Array, " S"]
    position: Int[Array, " S"]
    budget: Int[Array, " S"]
    temperature: Float[Array, " S"]
    seed: UInt32[Array, "S 2"]
    stops: Int[Array, "S E"]
    forced: Int[Array, "n S"]


class Sampled(NamedTuple):
    """What a decode dispatch sampled; column n of a row is valid while n < ``count``."""

    ids: Int[Array, "n S"]
    logprobs: Float[Array, "n S"]
    count: Int[Array, " S"]
    stopped: Int[Array, " S"]


def serving_params(cfg: ModelConfig, params: Params) -> Params:
    """Unstack the layers and materialise the head: decoding reads each weight matrix whole."""
    layers = tuple(
        {name: leaf[i] for name, leaf in params["layers"].items()} for i in range(cfg.num_layers)
    )
    return {
        "embed": params["embed"],
        "layers": layers,
        "final_norm": params["final_norm"],
        "head": jnp.asarray(decoder.head(cfg, params)),
    }


def empty_cache(cfg: ModelConfig, slots: int, length: int) -> Cache:
    """Return a zero cache for ``length`` positions a slot."""
    g, d = cfg.num_kv_heads, cfg.head_dim
    layers, pages = range(cfg.num_layers), range(math.ceil(length / PAGE))
    return Cache(
        k=tuple(tuple(jnp.zeros((slots, g, d, PAGE)) for _ in pages) for _ in layers),
        v=tuple(tuple(jnp.zeros((slots, g, PAGE, d)) for _ in pages) for _ in layers),
    )


def prefill(
    cfg: ModelConfig,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "P C"],
    slots: Int[Array, " P"],
    starts: Int[Array, " P"],
    *,
    pages: int,
) -> tuple[Cache, Float[Array, "P C D"]]:
    """Write the keys and values of P chunks and return their final hidden states.

    A row is one chunk of one prompt: ``tokens[p]`` stand at ``starts[p]`` and after. Chunks of one
    prompt may share a call, because each layer stores all rows before any of them attends. A
    duplicated row is harmless padding; positions past a prompt's end are overwritten by decode.
    ``pages`` must cover every row's end.
    """
    rows, width = tokens.shape
    positions = starts[:, None] + jnp.arange(width)
    x = decoder.embed(params, tokens.reshape(-1))
    keys, values = list(cache.k), list(cache.v)
    for index, layer in enumerate(params["layers"]):

        def attend(q: Array, k: Array, v: Array, index: int = index) -> Array:
            k, v = (y.reshape(rows, width, *y.shape[1:]) for y in (k, v))
            keys[index] = _store(keys[index], k.transpose(0, 2, 3, 1), slots, starts, -1, pages)
            values[index] = _store(values[index], v.transpose(0, 2, 1, 3), slots, starts, -2, pages)
            k_read = [_rows(page, slots) for page in keys[index][:pages]]
            v_read = [_rows(page, slots) for page in values[index][:pages]]
            return _attend(q.reshape(rows, width, *q.shape[1:]), k_read, v_read, positions)

        x = decoder.layer(cfg, layer, x, positions.reshape(-1), attend)
    hidden = decoder.final_norm(cfg, params, x).reshape(rows, width, -1)
    return Cache(k=tuple(keys), v=tuple(values)), hidden


def score(
    params: Params, hidden: Float[Array, "P C D"], targets: Int[Array, "P C"]
) -> Float[Array, "P C"]:
    """Return log-probs (nats, temperature 1) of ``targets`` under the chunks' hidden states."""
    logits = jnp.matmul(hidden, params["head"], precision=_EXACT)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def decode(
    cfg: ModelConfig, params: Params, cache: Cache, rows: Rows, *, steps: int, pages: int
) -> tuple[Cache, Sampled]:
    """Sample up to ``steps`` tokens for every live slot in one dispatch.

    A row ends on a stop id (kept in its ids) or when its budget is used; the loop ends early when
    all rows have. ``pages`` must cover every row's position at the end of the dispatch.
    """
    slots = rows.token.shape[0]
    draws = _uniforms(rows.seed, rows.position, steps)
    first = Sampled(
        ids=jnp.zeros((steps, slots), jnp.int32),
        logprobs=jnp.zeros((steps, slots), jnp.float32),
        count=jnp.zeros((slots,), jnp.int32),
        stopped=jnp.zeros((slots,), jnp.int32),
    )

    def live(token_count: Array, stopped: Array) -> Array:
        return (token_count < rows.budget) & (stopped == 0)

    def more(carry: tuple[Any, ...]) -> Array:
        n, _, _, out = carry
        return (n < steps) & jnp.any(live(out.count, out.stopped))

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        n, token, cache, out = carry
        alive = live(out.count, out.stopped)
        cache, logits = _decode_one(cfg, params, cache, token, rows.position + n, pages)
        picked, logprob = sample(logits, rows.temperature, draws[n], rows.forced[n])
        hit = jnp.any(picked[:, None] == rows.stops, axis=1)
        out = Sampled(
            ids=out.ids.at[n].set(picked),
            logprobs=out.logprobs.at[n].set(logprob),
            count=out.count + alive,
            stopped=jnp.where(alive & hit, 1, out.stopped),
        )
        return n + 1, picked, cache, out

    start = (jnp.int32(0), rows.token, cache, first)
    _, _, cache, out = jax.lax.while_loop(more, body, start)
    return cache, out


def sample(
    logits: Float[Array, "S V"],
    temperature: Float[Array, " S"],
    draw: Float[Array, " S"],
    forced: Int[Array, " S"] | None = None,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draw one token a row by inverse CDF; return it and its log-prob (nats, at temperature).

    The token is the first whose cumulative probability exceeds ``draw`` in [0, 1). A temperature
    under 1e-6 takes the most likely token, with its log-prob at temperature 1 (SGLang's rule).
    The CDF has two levels: first a block of 32 tokens, then the token inside it. Where
    ``forced`` is not negative it is the row's token.
    """
    vocab = logits.shape[-1]
    greedy = temperature < GREEDY_BELOW
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    top = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled - top)
    pad = -vocab % _CDF_BLOCK
    blocks = jnp.pad(weights, ((0, 0), (0, pad))).reshape(len(logits), -1, _CDF_BLOCK)
    reached = _running_sum(jnp.sum(blocks, axis=-1))
    total = reached[:, -1]
    target = draw * total
    block = jnp.sum(reached <= target[:, None], axis=-1, dtype=jnp.int32)
    before = jnp.where(block > 0, _pick(reached, jnp.maximum(block - 1, 0)), 0.0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    passed = before[:, None] + _running_sum(inside) <= target[:, None]
    offset = jnp.sum(passed, axis=-1, dtype=jnp.int32)
    # rounding may leave the block's own sum a hair short of the target: stay on a possible token
    possible = jnp.max(jnp.where(inside > 0, jnp.arange(_CDF_BLOCK), 0), axis=-1)
    drawn = block * _CDF_BLOCK + jnp.minimum(offset, possible)
    # a plain argmax is a slow reduction on CPU
    best = jnp.min(jnp.where(scaled == top, jnp.arange(vocab), vocab - 1), axis=-1)
    token = jnp.where(greedy, best, drawn).astype(jnp.int32)
    if forced is not None:
        token = jnp.where(forced >= 0, forced, token)
    # rounding can leave a sure token a few ulp of its logit above log(1)
    return token, jnp.minimum(_pick(scaled, token) - top[:, 0] - jnp.log(total), 0.0)


def _decode_one(
    cfg: ModelConfig, params: Params, cache: Cache, token: Array, position: Array, pages: int
) -> tuple[Cache, Float[Array, "S V"]]:
    """Feed one token a slot; return the updated cache and fp32 logits."""
    index = jnp.arange(token.shape[0])
    x = decoder.embed(params, token)
    keys, values = list(cache.k), list(cache.v)

    def put(store: tuple[Array, ...], new: Array, axis: int) -> tuple[Array, ...]:
        written = list(store)
        for number in range(pages):
            at = position - number * PAGE
            at = jnp.where((at >= 0) & (at < PAGE), at, PAGE)  # past the end: dropped
            ref = written[number].at
            ref = ref[index, :, :, at] if axis == -1 else ref[index, :, at]
            written[number] = ref.set(new, mode="drop", unique_indices=True)
        return tuple(written)

    for number, layer in enumerate(params["layers"]):

        def attend(q: Array, k: Array, v: Array, number: int = number) -> Array:
            keys[number] = put(keys[number], k, -1)
            values[number] = put(values[number], v, -2)
            return _attend(
                q[:, None], keys[number][:pages], values[number][:pages], position[:, None]
            )

        x = decoder.layer(cfg, layer, x, position, attend)
    hidden = decoder.final_norm(cfg, params, x)
    logits = jnp.matmul(hidden, params["head"], precision=_EXACT)
    return Cache(k=tuple(keys), v=tuple(values)), logits


def _attend(q: Array, keys: Any, values: Any, positions: Array) -> Array:
    """Causal grouped-query attention of q [B, C, H, K] over pages; returns [B * C, H, K]."""
    b, c, h, d = q.shape
    g = keys[0].shape[1]
    q = (q * (1.0 / math.sqrt(d))).reshape(b, c, g, h // g, d).transpose(0, 2, 3, 1, 4)
    q = q.reshape(b, g, -1, d)
    visible = jnp.tile(positions, (1, h // g))[:, None, :, None]
    scores = []
    for number, page in enumerate(keys):
        found = jnp.einsum("bgmd,bgdw->bgmw", q, page, precision=_EXACT)
        seen = number * PAGE + jnp.arange(PAGE) <= visible
        scores.append(jnp.where(seen, found, _MASKED))
    # one exp over all pages: XLA then compiles the same exp for every number of pages
    every = jnp.concatenate(scores, axis=-1)
    every = jnp.exp(every - every.max(axis=-1, keepdims=True))
    weights = jnp.split(every, len(keys), axis=-1)
    total = sum(found.sum(axis=-1, keepdims=True) for found in weights)
    mixed = sum(
        jnp.einsum("bgmw,bgwd->bgmd", found, page, precision=_EXACT)
        for found, page in zip(weights, values, strict=True)
    )
    out = (mixed / total).reshape(b, g, h // g, c, d)
    return out.transpose(0, 3, 1, 2, 4).reshape(b * c, h, d)


def _store(
    store: tuple[Array, ...], new: Array, slots: Array, starts: Array, axis: int, pages: int
) -> tuple[Array, ...]:
    """Write row p of ``new`` at (slots[p], starts[p]) into whichever page that position is in."""
    written = list(store)
    for p in range(new.shape[0]):
        at = [slots[p], 0, 0, 0]
        at[axis] = starts[p] % PAGE
        block = new[p : p + 1]
        for number in range(pages):
            page = written[number]
            old = jax.lax.dynamic_slice(page, at, block.shape)
            kept = jnp.where(starts[p] // PAGE == number, block, old)
            written[number] = jax.lax.dynamic_update_slice(page, kept, at)
    return tuple(written)


def _rows(page: Array, slots: Array) -> Array:
    picked = [jax.lax.dynamic_index_in_dim(page, slots[p], axis=0) for p in range(slots.shape[0])]
    return jnp.concatenate(picked, axis=0)


def _pick(values: Float[Array, "S X"], index: Int[Array, " S"]) -> Float[Array, " S"]:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def _uniforms(seed: UInt32[Array, "S 2"], position: Array, steps: int) -> Float[Array, "n S"]:
    """Return draws in [0, 1 - 2**-23]: a counter-based hash of (seed, position)."""

    def one(words: Array, at: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words), at)
        return jax.random.bits(key, (), jnp.uint32)

    at = position[None, :] + jnp.arange(steps)[:, None]
    bits = jax.vmap(jax.vmap(one), in_axes=(None, 0))(seed, at)
    # 23 bits: with 24, draw * total could round up to total and fall off the end of the CDF
    return (bits >> 9).astype(jnp.float32) * jnp.float32(2.0**-23)


def _running_sum(values: Float[Array, "S X"]) -> Float[Array, "S X"]:
    """Inclusive running sum by one small matmul (cheaper on CPU than a scan)."""
    triangle = jnp.triu(jnp.ones((values.shape[-1],) * 2, jnp.float32))
    return jnp.matmul(values, triangle, precision=_EXACT)
