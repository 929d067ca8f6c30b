"""The engine's device programs: pure functions over a KV cache with one slot per live request.

Every program has fixed shapes, and no row reads another row's data, so a request's bits depend on
neither its slot nor its neighbours. The draw of a token depends on (seed, position, logits) alone.

Shapes: S slots, T cached positions, P chunk rows of C tokens, G key/value heads, K head dim,
V vocabulary, E stop ids a row.
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
_CDF_BLOCK = 32
_EXACT = jax.lax.Precision.HIGHEST


class Cache(NamedTuple):
    """Keys and values of all layers: a tuple over layers of [S, T, G, K] arrays."""

    k: tuple[Float[Array, "S T G K"], ...]
    v: tuple[Float[Array, "S T G K"], ...]


class Rows(NamedTuple):
    """What a decode dispatch knows about each slot.

    ``token`` is fed next at ``position``; ``budget`` tokens may still be sampled (0 = idle slot);
    ``stops`` is padded with -1; ``seed`` holds the two words of the request's 64-bit seed.
    """

    token: Int[Array, " S"]
    position: Int[Array, " S"]
    budget: Int[Array, " S"]
    temperature: Float[Array, " S"]
    seed: UInt32[Array, "S 2"]
    stops: Int[Array, "S E"]


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
    """Return a zero cache."""
    shape = (slots, length, cfg.num_kv_heads, cfg.head_dim)
    layers = range(cfg.num_layers)
    return Cache(
        k=tuple(jnp.zeros(shape, jnp.float32) for _ in layers),
        v=tuple(jnp.zeros(shape, jnp.float32) for _ in layers),
    )


def prefill(
    cfg: ModelConfig,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "P C"],
    slots: Int[Array, " P"],
    starts: Int[Array, " P"],
    *,
    window: int,
) -> tuple[Cache, Float[Array, "P C D"]]:
    """Write the keys and values of P chunks and return their final hidden states.

    A row is one chunk of one prompt: ``tokens[p]`` stand at ``starts[p]`` and after. Chunks of one
    prompt may share a call, because each layer stores all rows before any of them attends. A
    duplicated row is harmless padding; positions past a prompt's end are overwritten by decode.
    """
    rows, width = tokens.shape
    positions = starts[:, None] + jnp.arange(width)
    mask = jnp.arange(window) <= positions[:, :, None]
    x = decoder.embed(params, tokens.reshape(-1))
    keys, values = [], []
    for index, layer in enumerate(params["layers"]):
        k_store, v_store = cache.k[index], cache.v[index]

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal k_store, v_store
            k_rows, v_rows = (y.reshape(rows, 1, width, *y.shape[1:]) for y in (k, v))
            for p in range(rows):
                at = (slots[p], starts[p], 0, 0)
                k_store = jax.lax.dynamic_update_slice(k_store, k_rows[p], at)
                v_store = jax.lax.dynamic_update_slice(v_store, v_rows[p], at)
            out = decoder.masked_attention(
                q.reshape(rows, width, *q.shape[1:]),
                jnp.stack([_row(k_store, slots[p], window) for p in range(rows)]),
                jnp.stack([_row(v_store, slots[p], window) for p in range(rows)]),
                mask,
            )
            return out.reshape(q.shape)

        x = decoder.layer(cfg, layer, x, positions.reshape(-1), attend)
        keys.append(k_store)
        values.append(v_store)
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
    cfg: ModelConfig, params: Params, cache: Cache, rows: Rows, *, steps: int, window: int
) -> tuple[Cache, Sampled]:
    """Sample up to ``steps`` tokens for every live slot in one dispatch.

    A row ends on a stop id (kept in its ids) or when its budget is used; the loop ends early when
    all rows have. ``window`` bounds the positions that are read.
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
        cache, logits = _decode_one(cfg, params, cache, token, rows.position + n, window)
        picked, logprob = sample(logits, rows.temperature, draws[n])
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
    logits: Float[Array, "S V"], temperature: Float[Array, " S"], draw: Float[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draw one token a row by inverse CDF; return it and its log-prob (nats, at temperature).

    The token is the first whose cumulative probability exceeds ``draw`` in [0, 1). A temperature
    under 1e-6 takes the most likely token, with its log-prob at temperature 1 (SGLang's rule).
    """
    greedy = temperature < GREEDY_BELOW
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    top = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled - top)
    cdf, total = _cumulative(weights)
    below = cdf <= (draw * total)[:, None]
    token = jnp.minimum(jnp.sum(below, axis=-1, dtype=jnp.int32), logits.shape[-1] - 1)
    token = jnp.where(greedy, jnp.argmax(scaled, axis=-1).astype(jnp.int32), token)
    picked = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return token, picked - top[:, 0] - jnp.log(total)


def _decode_one(
    cfg: ModelConfig, params: Params, cache: Cache, token: Array, position: Array, window: int
) -> tuple[Cache, Float[Array, "S V"]]:
    """Feed one token a slot; return the updated cache and fp32 logits."""
    slots = token.shape[0]
    where = jnp.minimum(position, cache.k[0].shape[1] - 1)
    mask = jnp.arange(window) <= position[:, None]
    index = jnp.arange(slots)
    x = decoder.embed(params, token)
    keys, values = [], []
    for number, layer in enumerate(params["layers"]):
        k_store, v_store = cache.k[number], cache.v[number]

        def attend(q: Array, k: Array, v: Array) -> Array:
            nonlocal k_store, v_store
            k_store = k_store.at[index, where].set(k, unique_indices=True)
            v_store = v_store.at[index, where].set(v, unique_indices=True)
            out = decoder.masked_attention(
                q[:, None], k_store[:, :window], v_store[:, :window], mask[:, None]
            )
            return out[:, 0]

        x = decoder.layer(cfg, layer, x, position, attend)
        keys.append(k_store)
        values.append(v_store)
    hidden = decoder.final_norm(cfg, params, x)
    logits = jnp.matmul(hidden, params["head"], precision=_EXACT)
    return Cache(k=tuple(keys), v=tuple(values)), logits


def _row(store: Array, slot: Array, window: int) -> Array:
    row = jax.lax.dynamic_index_in_dim(store, slot, axis=0, keepdims=False)
    return row[:window]


def _uniforms(seed: UInt32[Array, "S 2"], position: Array, steps: int) -> Float[Array, "n S"]:
    """Return draws in [0, 1 - 2**-23]: a counter-based hash of (seed, position)."""

    def one(words: Array, at: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words), at)
        return jax.random.bits(key, (), jnp.uint32)

    at = position[None, :] + jnp.arange(steps)[:, None]
    bits = jax.vmap(jax.vmap(one), in_axes=(None, 0))(seed, at)
    # 23 bits: with 24, draw * total could round up to total and fall off the end of the CDF
    return (bits >> 9).astype(jnp.float32) * jnp.float32(2.0**-23)


def _cumulative(weights: Float[Array, "S V"]) -> tuple[Float[Array, "S V"], Float[Array, " S"]]:
    """Return the running sum over the vocabulary and its last value, by blocks (two small matmuls
    instead of a scan of V steps).
    """
    rows, vocab = weights.shape
    blocks = math.ceil(vocab / _CDF_BLOCK)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * _CDF_BLOCK - vocab)))
    padded = padded.reshape(rows * blocks, _CDF_BLOCK)
    inside = jnp.matmul(padded, jnp.triu(jnp.ones((_CDF_BLOCK, _CDF_BLOCK))), precision=_EXACT)
    inside = inside.reshape(rows, blocks, _CDF_BLOCK)
    before = jnp.matmul(
        inside[:, :, -1], jnp.triu(jnp.ones((blocks, blocks)), k=1), precision=_EXACT
    )
    running = (before[:, :, None] + inside).reshape(rows, -1)
    return running[:, :vocab], running[:, -1]
