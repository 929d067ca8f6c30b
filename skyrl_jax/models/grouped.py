"""Grouped matmul: rows sorted by group, and a matrix of its own for each group.

    y[r] = x[r] w[g(r)]      dx[r] = dy[r] w[g(r)]^T      dw[g] = sum over its rows x[r]^T dy[r]

``jax.lax.ragged_dot`` does all three. On a TPU the first two become a kernel that costs what the
rows cost, but the third a dense matmul per group (Qwen3-30B-A3B, compiled for v5e: 128 times its
work), so there it is Pallas' ``tgmm`` (megablox). On CPU and GPU all three are dense: right, slow.

Shapes: M rows, A in, C out, E groups.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Rows of a tile of the weight gradient: a tile that two groups share is computed for each.
_ROWS = 128


def grouped_matmul(
    x: Float[Array, "M A"], w: Float[Array, "E A C"], sizes: Int[Array, " E"], kernel: str = ""
) -> Float[Array, "M C"]:
    """Multiply the first sizes[0] rows by w[0], the next sizes[1] by w[1], and so on.

    Args:
        x: rows, in the compute dtype, which is that of the result.
        w: matrices; cast to it.
        sizes: rows of each group; they sum to M.
        kernel: "tpu" = bfloat16 weight gradients by the TPU kernel; "interpret" = by the same
            code, interpreted (any device); "" = by ``ragged_dot``.
    """
    w = w.astype(x.dtype)
    if kernel == "interpret" or (kernel and x.dtype == jnp.bfloat16):
        return _with_kernel(kernel == "interpret", x, w, sizes)
    return _ragged(x, w, sizes)


def _ragged(x: Array, w: Array, sizes: Array) -> Array:
    exact = x.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.ragged_dot(x, w, sizes, precision=precision, preferred_element_type=x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_kernel(interpret: bool, x: Array, w: Array, sizes: Array) -> Array:
    return _ragged(x, w, sizes)


def _forward(interpret: bool, x: Array, w: Array, sizes: Array) -> tuple[Array, Any]:
    return _ragged(x, w, sizes), (x, w, sizes)


def _backward(interpret: bool, saved: Any, ct: Array) -> tuple[Array, Array, None]:
    x, w, sizes = saved
    return _ragged(ct, w.swapaxes(1, 2), sizes), weight_gradient(x, ct, sizes, interpret), None


_with_kernel.defvjp(_forward, _backward)


def weight_gradient(
    x: Float[Array, "M A"], ct: Float[Array, "M C"], sizes: Int[Array, " E"], interpret: bool
) -> Float[Array, "E A C"]:
    """Return the gradient of the matrices from that of the result, by the Pallas kernel."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    pad = -x.shape[0] % _ROWS
    x, ct = (jnp.pad(v, ((0, pad), (0, 0))) for v in (x, ct))
    last = jnp.arange(sizes.shape[0]) == sizes.shape[0] - 1  # rows of zeros add nothing to it
    made: Array = tgmm(
        x.T,
        ct,
        sizes + jnp.where(last, pad, 0),
        preferred_element_type=x.dtype,
        tiling=(_ROWS, _tile(x.shape[1]), _tile(ct.shape[1])),
        interpret=interpret,
    )
    return made


def _tile(size: int) -> int:
    """Return a tile that divides ``size`` if one of lanes' multiples does."""
    return next((t for t in (768, 640, 512, 384, 256) if size % t == 0), 128)
