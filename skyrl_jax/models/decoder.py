"""A Qwen3-shaped decoder as pure functions over a params pytree.

The learner (packed rows) and the decode engine (slots with a KV cache) run the same ``layer``;
only ``attend`` differs. Activations are flattened to [N, D] (N = tokens of all rows): XLA's CPU
weight gradient over two batch dimensions is several times slower than over one, and the maths is
the same. Tensors are named in models/module.py (the NNX module that makes them).

Shapes: N tokens, B rows, T tokens of a row, D model, H query heads, G key/value heads, K head dim,
F ffn, L layers, V vocabulary. Params are fp32 masters; compute runs in the dtype of ``x``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import ConfigError

Params = Any
Attend = Callable[
    [Float[Array, "N H K"], Float[Array, "N G K"], Float[Array, "N G K"]], Float[Array, "N H K"]
]


def check_config(cfg: ModelConfig) -> None:
    """Refuse a model that this code does not compute.

    Raises:
        ConfigError: unknown family, or head counts and sizes that do not divide.
    """
    known = ("qwen3",)
    if cfg.family not in known:
        raise ConfigError(f"config key 'model.family' is {cfg.family!r}; known: {', '.join(known)}")
    if cfg.num_heads % cfg.num_kv_heads:
        raise ConfigError(
            f"config key 'model.num_heads' ({cfg.num_heads}) must be a multiple of "
            f"'model.num_kv_heads' ({cfg.num_kv_heads})"
        )
    if cfg.head_dim % 2:
        raise ConfigError(f"config key 'model.head_dim' must be even, got {cfg.head_dim}")


def init_params(cfg: ModelConfig, key: Array, shardings: Any = None) -> Params:
    """Return fresh fp32 params, made under jit so that no leaf exists unsharded.

    Args:
        cfg: the model's shape.
        key: a jax PRNG key.
        shardings: pytree of shardings for the result (models/sharding.py), or ``None``.
    """
    check_config(cfg)
    if shardings is None:
        return _init(cfg, key)
    return jax.jit(_pure_params, static_argnums=0, out_shardings=shardings)(cfg, key)


def abstract_params(cfg: ModelConfig) -> Params:
    """Return the params tree as shapes and dtypes, without any memory."""
    check_config(cfg)
    return jax.eval_shape(lambda k: _pure_params(cfg, k), jax.random.key(0))


def matmul(x: Float[Array, "... A"], w: Float[Array, "A C"]) -> Float[Array, "... C"]:
    """Return ``x @ w`` in the dtype of ``x``; exact fp32 when that is float32."""
    return jnp.matmul(x, w.astype(x.dtype), precision=_precision(x), preferred_element_type=x.dtype)


def rms_norm(x: Float[Array, "... A"], scale: Float[Array, " A"], eps: float) -> Any:
    """Return ``x / sqrt(mean(x^2) + eps) * scale``, computed in fp32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rope(
    x: Float[Array, "N heads K"], positions: Int[Array, " N"], theta: float
) -> Float[Array, "N heads K"]:
    """Rotate the two halves of each head by the token's position (half-split form)."""
    half = x.shape[-1] // 2
    inv_freq = jnp.asarray(theta ** -(np.arange(half) / half), jnp.float32)
    angle = positions.astype(jnp.float32)[:, None, None] * inv_freq
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def embed(
    params: Params, tokens: Int[Array, "*S"], dtype: Any = jnp.float32
) -> Float[Array, "*S D"]:
    """Look up token embeddings in the compute dtype."""
    return params["embed"]["embedding"].astype(dtype)[tokens]


def layer(
    cfg: ModelConfig,
    p: Params,
    x: Float[Array, "N D"],
    positions: Int[Array, " N"],
    attend: Attend,
) -> Float[Array, "N D"]:
    """Run one transformer block.

    Args:
        cfg: the model's shape.
        p: one layer's params (the leaves of ``params["layers"]`` without the L axis).
        x: residual stream.
        positions: position of each token in its own sequence (rope).
        attend: mixes tokens: (q, k, v), rope already applied -> [N, H, K]. A decode engine stores
            k and v in its cache inside ``attend``.
    """
    n, eps = x.shape[0], cfg.rms_norm_eps
    y = rms_norm(x, p["attn_norm"], eps)
    q = matmul(y, p["q"]).reshape(n, cfg.num_heads, cfg.head_dim)
    k = matmul(y, p["k"]).reshape(n, cfg.num_kv_heads, cfg.head_dim)
    v = matmul(y, p["v"]).reshape(n, cfg.num_kv_heads, cfg.head_dim)
    q = rope(rms_norm(q, p["q_norm"], eps), positions, cfg.rope_theta)
    k = rope(rms_norm(k, p["k_norm"], eps), positions, cfg.rope_theta)
    x = x + matmul(attend(q, k, v).reshape(n, -1), p["o"])
    y = rms_norm(x, p["mlp_norm"], eps)
    gated = jax.nn.silu(matmul(y, p["gate"])) * matmul(y, p["up"])
    return x + matmul(gated, p["down"])


def final_norm(cfg: ModelConfig, params: Params, x: Float[Array, "... D"]) -> Any:
    """Apply the last RMSNorm; its output times ``head`` are the logits."""
    return rms_norm(x, params["final_norm"]["scale"], cfg.rms_norm_eps)


def head(cfg: ModelConfig, params: Params) -> Float[Array, "D V"]:
    """Return the output projection (the transposed embedding when tied), fp32 master."""
    if cfg.tie_embeddings:
        return params["embed"]["embedding"].T
    return params["lm_head"]["kernel"]


def hidden_fn(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
) -> Float[Array, "B T D"]:
    """Return the normed hidden states of packed rows; hidden[t] predicts tokens[t + 1].

    Tokens see earlier tokens of their own segment only. Segments are contiguous and their
    positions ascend from 0 (batching/ packs them so).

    Args:
        cfg: the model's shape.
        params: the params pytree.
        tokens: token ids.
        positions: position in the token's own segment.
        segment_ids: 0 = padding, 1.. = segments.
        dtype: compute dtype.
        remat: "full" keeps only each layer's input for the backward pass; "none" keeps all.
    """
    b, t = tokens.shape

    def attend(q: Array, k: Array, v: Array) -> Array:
        rows = (x.reshape(b, t, *x.shape[1:]) for x in (q, k, v))
        return packed_attention(*rows, positions, segment_ids).reshape(q.shape)

    def body(x: Array, p: Params) -> tuple[Array, None]:
        return layer(cfg, p, x, positions.reshape(-1), attend), None

    if remat == "full":
        # Inside scan the barriers that stop XLA from undoing remat are not needed.
        body = jax.checkpoint(body, prevent_cse=False)
    x, _ = jax.lax.scan(body, embed(params, tokens.reshape(-1), dtype), params["layers"])
    return final_norm(cfg, params, x).reshape(b, t, -1)


def packed_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    block: int = 128,
) -> Float[Array, "B T H K"]:
    """Causal attention inside segments, as batched matmuls over blocks of queries.

    A block of queries reads the keys up to its own end only: what lies behind is masked anyway,
    and leaving it out saves up to half of the work.
    """
    t = q.shape[1]
    block = max(block, math.ceil(t / 8))  # few blocks: they are unrolled
    parts = []
    for start in range(0, t, block):
        end = min(start + block, t)
        ours = slice(start, end)
        mask = (segment_ids[:, ours, None] == segment_ids[:, None, :end]) & (
            positions[:, ours, None] >= positions[:, None, :end]
        )
        parts.append(masked_attention(q[:, ours], k[:, :end], v[:, :end], mask))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def masked_attention(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Bool[Array, "B Q S"],
) -> Float[Array, "B Q H K"]:
    """Grouped-query attention with an explicit mask; softmax in fp32.

    A query whose mask is empty gets the mean of the values: finite, and never read.
    """
    b, n, h, d = q.shape
    g, r = k.shape[2], h // k.shape[2]
    # Heads lead and the r query heads of a group share one matmul: 25 % faster on CPU than leaving
    # the layout to einsum.
    q = (q.astype(jnp.float32) / math.sqrt(d)).astype(q.dtype)
    q = q.reshape(b, n, g, r, d).transpose(0, 2, 3, 1, 4).reshape(b, g, r * n, d)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum(
        "bgqd,bgsd->bgqs", q, k, precision=_precision(q), preferred_element_type=jnp.float32
    )
    scores = jnp.where(jnp.tile(mask, (1, r, 1))[:, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(
        "bgqs,bgsd->bgqd", weights, v, precision=_precision(v), preferred_element_type=v.dtype
    )
    return out.reshape(b, g, r, n, d).transpose(0, 3, 1, 2, 4).reshape(b, n, h, d)


def _pure_params(cfg: ModelConfig, key: Array) -> Params:
    from skyrl_jax.models.module import pure_params  # flax costs a second to import

    return pure_params(cfg, key)


@functools.partial(jax.jit, static_argnums=0)
def _init(cfg: ModelConfig, key: Array) -> Params:
    return _pure_params(cfg, key)


def _precision(x: Array) -> Any:
    exact = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
