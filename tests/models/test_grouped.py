"""Grouped matmul against a loop over groups; the TPU's weight gradient, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.models import grouped


@pytest.mark.parametrize("kernel", ["", "interpret"])
def test_value_and_gradients_equal_a_loop_over_groups(kernel):
    """An empty group, one of a single row, and borders inside a tile; M is no multiple of it."""
    sizes = np.asarray([70, 0, 1, 129], np.int32)
    m, a, c = int(sizes.sum()), 24, 40
    rng = np.random.default_rng(0)
    x, w, ct = (rng.normal(size=shape).astype(np.float32) for shape in ((m, a), (4, a, c), (m, c)))

    def total(x, w):
        return jnp.sum(grouped.grouped_matmul(x, w, jnp.asarray(sizes), kernel) * ct)

    value, (dx, dw) = jax.jit(jax.value_and_grad(total, (0, 1)))(x, w)
    ends = np.cumsum(sizes)
    want = 0.0
    for g, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(start, end)
        want += float((x[rows].astype(np.float64) @ w[g] * ct[rows]).sum())
        np.testing.assert_allclose(dx[rows], ct[rows] @ w[g].T, atol=2e-5)
        np.testing.assert_allclose(dw[g], x[rows].T @ ct[rows], atol=5e-5)
    assert float(value) == pytest.approx(want, rel=1e-5)


def test_only_bfloat16_takes_the_kernel_and_the_result_has_the_dtype_of_the_rows():
    """On a CPU the kernel cannot be compiled: float32 does not reach it."""
    x, w = jnp.ones((4, 8)), jnp.ones((2, 8, 8), jnp.float32)
    sizes = jnp.asarray([1, 3], jnp.int32)
    gradient = jax.grad(lambda w: grouped.grouped_matmul(x, w, sizes, "tpu").sum())(w)
    np.testing.assert_array_equal(gradient[:, 0, 0], [1, 3])
    half = grouped.grouped_matmul(x.astype(jnp.bfloat16), w, sizes)
    assert half.dtype == jnp.bfloat16
