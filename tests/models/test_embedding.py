"""The embedding's gradient keeps every occurrence of a token (on a mesh: test_attention.py)."""

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_jax.models.embedding import embed_rows
from skyrl_jax.models.layout import Layout


def test_gradients_of_a_frequent_token_are_summed_in_fp32():
    """bfloat16 sums of ones stand still at 256."""
    n = 2048
    table = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    tokens = jnp.full((n,), 1, jnp.int32)

    def loss(table):
        x = embed_rows(table, tokens, Layout(shape=(1, n)), jnp.bfloat16)
        assert x.dtype == jnp.bfloat16
        return jnp.sum(x.astype(jnp.float32)), x

    (_, x), grad = jax.value_and_grad(loss, has_aux=True)(table)
    assert (x == table[1].astype(jnp.bfloat16)).all()
    assert np.asarray(grad).tolist() == [[0.0] * 4, [float(n)] * 4, [0.0] * 4]
