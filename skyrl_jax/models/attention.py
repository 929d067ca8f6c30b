"""Causal grouped-query attention inside the segments of packed rows: one function, several forms.

| form      | where                          | how                                             |
|-----------|--------------------------------|-------------------------------------------------|
| packed    | rows up to SHORT_ROW tokens    | batched matmuls over few, unrolled query blocks |
| blockwise | longer rows on CPU and GPU     | models/blockwise.py: never T x T                |
| splash    | TPU                            | JAX's Pallas kernel, kv heads not repeated      |
| cudnn     | GPU, one sequence in each row  | cuDNN's fused kernel, which takes no segments   |

On a mesh each device attends for its own rows, heads and tokens (jax.shard_map: XLA cannot split a
kernel). Keys and values of a row whose tokens are spread over axis ``context`` are gathered, the
queries stay: K and V are small beside Q in grouped-query attention. The order of such rows is
that of models/layout.py.

Every form divides q by sqrt(K) first, has fp32 scores and softmax, and gives finite values where
segment_ids is 0 (padding); these are never read. The forms name what their backward pass needs
"attn_out" (decoder.REMAT).

Shapes: B rows, T tokens of a row, H query heads, G key/value heads (head h reads h // (H / G)),
K head dim, S keys, Q queries.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from skyrl_jax.core.validate import check_tensor_axis
from skyrl_jax.models.blockwise import Tokens, blockwise_attention
from skyrl_jax.models.layout import (
    CONTEXT,
    check_row_length,
    make_layout,
    natural_order,
    zigzag_order,
    zigzag_rows,
)

SHORT_ROW = 1024  # up to here [T, T] scores cost less than a loop over blocks
LANES = 128  # a TPU register row: blocks of the splash kernel are multiples of it
SPLASH_BLOCK = 512  # largest block of queries or keys of the splash kernel


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    mesh: Mesh | None = None,
    one_segment: bool = False,
    form: str | None = None,
) -> Float[Array, "B T H K"]:
    """Return the values each token gathers from its own segment up to itself.

    Args:
        q: queries, rope applied.
        k: keys.
        v: values.
        positions: position in the token's own segment; ascends within it.
        segment_ids: 0 = padding, 1.. = segments, each contiguous.
        mesh: devices, with the axes of models/sharding.py. With ``context`` above 1 the rows of all
            arguments, and of the result, are in the order of models/layout.py.
        one_segment: each row is one sequence followed by padding (no other segments).
        form: one of the table above; ``None`` chooses (``choose_form``). "splash" off a TPU runs
            interpreted: for tests.

    Raises:
        ConfigError: the mesh does not divide the heads, or the row length suits no form.
    """
    t, num_heads = q.shape[1:3]
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    context = 1 if mesh is None else mesh.shape[CONTEXT]
    if form is None:
        form = choose_form(platform, t, q.dtype, mesh is not None, context, one_segment)
    if mesh is not None:
        check_rows_and_heads(num_heads, k.shape[2], t, mesh)
    check_row_length(t, context, LANES if form == "splash" else 1)
    interpret = platform != "tpu"
    if mesh is not None and mesh.size > 1:
        return _attend_on_mesh(form, q, k, v, positions, segment_ids, mesh, interpret)
    kernel = _splash_kernel(num_heads, t, 1, interpret) if form == "splash" else None
    tokens = Tokens(positions, segment_ids, jnp.arange(t, dtype=jnp.int32))
    return _attend(form, q, k, v, tokens, tokens, kernel)


def choose_form(
    platform: str,
    row_length: int,
    dtype: Any,
    has_mesh: bool = False,
    context: int = 1,
    one_segment: bool = False,
) -> str:
    """Return the form that suits a platform ("tpu", "gpu" or "cpu") and its rows.

    Without a mesh a short row on a TPU takes "packed": such a call may run over several devices
    that XLA shards by itself (the probe of sync/publish.py), which it cannot do with a kernel.
    """
    short = row_length <= SHORT_ROW
    if platform == "tpu":
        return "packed" if short and not has_mesh else "splash"
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if platform == "gpu" and one_segment and half and context == 1:
        return "cudnn"
    return "packed" if short else "blockwise"


def check_rows_and_heads(
    num_heads: int, num_kv_heads: int, row_length: int, mesh: Mesh | AbstractMesh
) -> None:
    """Refuse a mesh that would cut through a head, or rows that it cannot spread.

    Raises:
        ConfigError: names the key, the sizes and what would be right.
    """
    check_tensor_axis(num_heads, num_kv_heads, mesh.shape["tensor"])
    on_tpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu"
    check_row_length(row_length, mesh.shape[CONTEXT], LANES if on_tpu else 1)


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
    q = _scaled(q)
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


def one_segment_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    *,
    implementation: Any = "cudnn",
) -> Float[Array, "B T H K"]:
    """Causal attention of rows that are one sequence each: padding behind it is seen by none of it.

    Only its mathematics is tested (``implementation="xla"``): cuDNN needs a GPU.
    """
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def _attend_on_mesh(
    form: str,
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    segment_ids: Array,
    mesh: Mesh,
    interpret: bool,
) -> Array:
    """Attend on each device for its own rows, heads and tokens."""
    t, context = q.shape[1], mesh.shape[CONTEXT]
    kernels: tuple[Any, ...] = ()
    if form == "splash":
        # Its tables differ between the devices of ``context``: it goes in as an argument.
        kernels = (_splash_kernel(q.shape[2] // mesh.shape["tensor"], t, context, interpret),)
    tables = [x.manual_sharding_spec(NamedSharding(mesh, _SPLASH_TABLES)) for x in kernels]
    rows = make_layout(mesh, (q.shape[0], t)).row_axes or None
    heads = PartitionSpec(rows, CONTEXT, "tensor", None)
    row = PartitionSpec(rows, CONTEXT)

    def local(q: Any, k: Any, v: Any, positions: Any, segments: Any, *kernel: Any) -> Any:
        ours = theirs = Tokens(positions, segments, jnp.arange(t, dtype=jnp.int32))
        if context > 1:
            mine = zigzag_rows(jax.lax.axis_index(CONTEXT), t, context)
            ours = Tokens(positions, segments, mine)
            k, v, *whole = (_whole_rows(x, context) for x in (k, v, positions, segments))
            theirs = Tokens(*whole, theirs.index)
        return _attend(form, q, k, v, ours, theirs, *(kernel or (None,)))

    # Pallas calls do not say over which axes their results vary: no check_vma.
    spread: Any = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, row, row, *tables),
        out_specs=heads,
        check_vma=False,
    )
    attended: Array = spread(q, k, v, positions, segment_ids, *kernels)
    return attended


def _attend(
    form: str, q: Array, k: Array, v: Array, ours: Tokens, theirs: Tokens, kernel: Any
) -> Array:
    """Attend on one device: any queries ``ours``, whole rows of keys ``theirs``."""
    if form == "splash":
        return _splash(kernel, q, k, v, ours, theirs)
    if form == "blockwise":
        return blockwise_attention(q, k, v, ours, theirs)
    if form == "cudnn":
        out = one_segment_attention(q, k, v)
    elif form != "packed":
        raise ValueError(f"no form of attention is called {form!r}")
    elif ours is theirs:
        out = packed_attention(q, k, v, ours.positions, ours.segment_ids)
    else:
        mask = (ours.segment_ids[:, :, None] == theirs.segment_ids[:, None]) & (
            ours.positions[:, :, None] >= theirs.positions[:, None]
        )
        out = masked_attention(q, k, v, mask)
    named: Array = checkpoint_name(out, "attn_out")
    return named


def _whole_rows(x: Array, context: int) -> Array:
    """Gather the tokens of a row from the devices of ``context``; natural order."""
    return natural_order(jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True), context)


# The kernel's tables [heads, query blocks, key blocks]: one head for all, queries as they lie.
_SPLASH_TABLES = PartitionSpec(None, CONTEXT)


def _splash_kernel(num_heads: int, row_length: int, context: int, interpret: bool) -> Any:
    """Return the kernel for ``num_heads`` query heads over rows of T keys.

    Causality in it goes by place in the row, which inside a segment is the order of positions;
    other segments are masked by SegmentIds. Its tables skip blocks that nothing in them sees, for
    the queries of each device of ``context`` by themselves.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

    mask = splash.CausalMask((row_length, row_length))
    share = row_length
    if context > 1:
        mask.q_sequence = zigzag_order(row_length, context)
        share = row_length // (2 * context)  # blocks of queries stay inside a chunk
    queries, keys = _splash_block(share), _splash_block(row_length)
    sizes = splash.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask((mask,) * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=context,
        residual_checkpoint_name="attn_out",
        interpret=interpret,
    )


def _splash_block(tokens: int) -> int:
    """Return the largest multiple of LANES, at most SPLASH_BLOCK, that divides ``tokens``."""
    return max(n for n in range(LANES, SPLASH_BLOCK + 1, LANES) if tokens % n == 0)


def _splash(kernel: Any, q: Array, k: Array, v: Array, ours: Tokens, theirs: Tokens) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    q, k, v = (x.swapaxes(1, 2) for x in (_scaled(q), k, v))
    segments = SegmentIds(q=ours.segment_ids, kv=theirs.segment_ids)
    out: Array = jax.vmap(lambda *row: kernel(*row))(q, k, v, segments)
    return out.swapaxes(1, 2)


def _scaled(q: Array) -> Array:
    return (q.astype(jnp.float32) / math.sqrt(q.shape[-1])).astype(q.dtype)


def _precision(x: Array) -> Any:
    exact = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
