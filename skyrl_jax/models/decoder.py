"""The decoder of all model families (models/families.py) as pure functions over a params pytree.

The learner (packed rows) and the decode engine (slots with a KV cache) run the same ``layer``;
only ``attend`` differs. Activations are flattened to [N, D] (N = tokens of all rows): XLA's CPU
weight gradient over two batch dimensions is several times slower than over one, and the maths is
the same. Tensors are named in models/module.py (the NNX module that makes them).

Shapes: N tokens, B rows, T tokens of a row, D model, H query heads, G key/value heads, K head dim,
F ffn, L layers, V vocabulary. Params are fp32 masters; compute runs in the dtype of ``x``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.models.attention import attention
from skyrl_jax.models.embedding import embed_rows
from skyrl_jax.models.families import check_config as check_config  # part of this module's face
from skyrl_jax.models.families import family_of
from skyrl_jax.models.layout import make_layout
from skyrl_jax.models.moe import MoeStats, moe_mlp
from skyrl_jax.models.rope import rope, rope_frequencies

Params = Any
Attend = Callable[
    [Float[Array, "N H K"], Float[Array, "N G K"], Float[Array, "N G K"]], Float[Array, "N H K"]
]

# What the backward pass keeps of each layer beside its input; the rest is computed again.
REMAT: dict[str, Any] = {
    "full": None,
    "attn_out": jax.checkpoint_policies.save_only_these_names("attn_out"),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class LowRank(NamedTuple):
    """A weight W [A C] with a low-rank addition: ``matmul`` gives x W + (x a) b; a [A r], b [r C].

    One leaf of ``params["layers"]`` may be this instead of an array (learner/lora.py).
    """

    base: Any
    a: Any
    b: Any


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


def matmul(x: Float[Array, "... A"], w: Float[Array, "A C"] | LowRank) -> Float[Array, "... C"]:
    """Return ``x @ w`` in the dtype of ``x``; exact fp32 when that is float32."""
    if isinstance(w, LowRank):
        return matmul(x, w.base) + matmul(matmul(x, w.a), w.b)
    return jnp.matmul(x, w.astype(x.dtype), precision=_precision(x), preferred_element_type=x.dtype)


def rms_norm(x: Float[Array, "... A"], scale: Float[Array, " A"], eps: float) -> Any:
    """Return ``x / sqrt(mean(x^2) + eps) * scale``, computed in fp32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def embed(
    params: Params, tokens: Int[Array, "*S"], dtype: Any = jnp.float32
) -> Float[Array, "*S D"]:
    """Look up token embeddings in the compute dtype."""
    return params["embed"]["embedding"][tokens].astype(dtype)


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
    return layer_and_stats(cfg, p, x, positions, attend)[0]


def layer_and_stats(
    cfg: ModelConfig,
    p: Params,
    x: Float[Array, "N D"],
    positions: Int[Array, " N"],
    attend: Attend,
    *,
    valid: Bool[Array, " N"] | None = None,
    experts: Int[Array, "N C"] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "N D"], MoeStats | None]:
    """Run one transformer block; also return its router's statistics (``None`` when dense).

    Args:
        cfg: the model's shape.
        p: as in ``layer``, and so are x, positions and attend.
        x: residual stream.
        positions: position of each token.
        attend: mixes tokens.
        valid: tokens that count in the statistics; ``None`` = all.
        experts: replay of routing decisions (models/moe.py); C experts a token.
        mesh: devices over which the experts are spread (models/moe.py).
    """
    n, eps, family = x.shape[0], cfg.rms_norm_eps, family_of(cfg)
    frequency = rope_frequencies(cfg)
    y = rms_norm(x, p["attn_norm"], eps)
    q, k, v = (matmul(y, p[name]) for name in ("q", "k", "v"))
    if family.qkv_bias:
        biases = ("q_bias", "k_bias", "v_bias")
        q, k, v = (z + p[name].astype(z.dtype) for z, name in zip((q, k, v), biases, strict=True))
    q = q.reshape(n, cfg.num_heads, cfg.head_dim)
    k = k.reshape(n, cfg.num_kv_heads, cfg.head_dim)
    v = v.reshape(n, cfg.num_kv_heads, cfg.head_dim)
    if family.qk_norm:
        q, k = rms_norm(q, p["q_norm"], eps), rms_norm(k, p["k_norm"], eps)
    q, k = rope(q, positions, frequency), rope(k, positions, frequency)
    x = x + matmul(attend(q, k, v).reshape(n, -1), p["o"])
    y = rms_norm(x, p["mlp_norm"], eps)
    if family.experts:
        out, stats = moe_mlp(cfg, p, y, valid=valid, experts=experts, mesh=mesh)
        return x + out, stats
    gated = jax.nn.silu(matmul(y, p["gate"])) * matmul(y, p["up"])
    return x + matmul(gated, p["down"]), None


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
    mesh: Mesh | None = None,
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
        remat: what the backward pass keeps: "none" everything, "full" only each layer's input,
            "attn_out" that and the output of the attention, "dots" that and the results of the
            projections (the matmuls without a batch dimension).
        mesh: devices that the params and rows are spread over (models/sharding.py); ``None`` = one,
            or several that XLA shards by itself.

    Raises:
        ConfigError: the mesh does not divide the heads, or the row length suits no attention.
    """
    return hidden_and_stats_fn(
        cfg, params, tokens, positions, segment_ids, dtype=dtype, remat=remat, mesh=mesh
    )[0]


def hidden_and_stats_fn(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    mesh: Mesh | None = None,
    experts: Int[Array, "N L C"] | None = None,
) -> tuple[Float[Array, "B T D"], MoeStats | None]:
    """Return what ``hidden_fn`` returns and each layer's router statistics (``None`` when dense).

    Args:
        cfg: as in ``hidden_fn``, and so are all arguments but ``experts``.
        params: the params pytree.
        tokens: token ids.
        positions: position in the token's own segment.
        segment_ids: 0 = padding, which the statistics leave out.
        dtype: compute dtype.
        remat: what the backward pass keeps.
        mesh: devices.
        experts: replay: the C experts of each token (N = B T) in each layer, as the engine chose
            them and as ``MoeStats.chosen`` gives them back; rows of -1 choose for themselves.

    Returns:
        The hidden states, and a MoeStats whose fields lead with L; but ``chosen`` is [N, L, C].
    """
    b, t = tokens.shape
    layout = make_layout(mesh, (b, t))
    tokens, positions, segment_ids = map(layout.arrange, (tokens, positions, segment_ids))
    where, valid = layout.flat(positions), layout.flat(segment_ids) != 0

    def attend(q: Array, k: Array, v: Array) -> Array:
        rows = (layout.rows(x) for x in (q, k, v))
        return layout.flat(attention(*rows, positions, segment_ids, mesh=mesh))

    one = unknown_one(segment_ids)

    def body(x: Array, scanned: tuple[Params, Array | None]) -> tuple[Array, MoeStats | None]:
        p, replayed = scanned
        x = layout.pin(x)
        p = kept_in_layer(p, dtype, one)
        return layer_and_stats(cfg, p, x, where, attend, valid=valid, experts=replayed, mesh=mesh)

    if remat != "none":
        # Inside scan the barriers that stop XLA from undoing remat are not needed.
        body = jax.checkpoint(body, prevent_cse=False, policy=REMAT[remat])
    replay = None
    if experts is not None:
        arranged = layout.arrange(experts.reshape(b, t, *experts.shape[1:]))
        replay = jnp.moveaxis(layout.flat(arranged), 1, 0)
    x = embed_rows(params["embed"]["embedding"], layout.flat(tokens), layout, dtype)
    x, stats = jax.lax.scan(body, x, (params["layers"], replay))
    if stats is not None:
        chosen = layout.restore(layout.rows(jnp.moveaxis(stats.chosen, 0, 1)))
        stats = stats._replace(chosen=chosen.reshape(b * t, *chosen.shape[2:]))
    return layout.restore(layout.rows(final_norm(cfg, params, x))), stats


def unknown_one(segment_ids: Int[Array, "B T"]) -> Array:
    """Return 1.0, computed so that XLA cannot know it."""
    return (segment_ids[0, 0] >= 0).astype(jnp.float32)


def kept_in_layer(p: Params, dtype: Any, one: Array) -> Params:
    """Return a layer's masters such that their cast to ``dtype`` stays in the layer.

    XLA else casts the stacked masters once before the loops, since a slice of a cast is a cast of
    a slice: 2 bytes a parameter, alive through the whole step. It cannot pass a factor of which it
    does not know that it is 1.
    """
    return jax.tree.map(lambda w: w if w.dtype == dtype else w * one.astype(w.dtype), p)


def _pure_params(cfg: ModelConfig, key: Array) -> Params:
    from skyrl_jax.models.module import pure_params  # flax costs a second to import

    return pure_params(cfg, key)


@functools.partial(jax.jit, static_argnums=0)
def _init(cfg: ModelConfig, key: Array) -> Params:
    return _pure_params(cfg, key)


def _precision(x: Array) -> Any:
    exact = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
