"""Bit sums and names of leaves."""

import jax.numpy as jnp

from skyrl_jax.learner import export


def test_bit_sum_by_hand():
    assert int(export.bit_sum(jnp.asarray([1.0, 2.0]))) == 0x3F800000 + 0x40000000
    assert int(export.bit_sum(jnp.asarray([1.0, 1.0], jnp.bfloat16))) == 2 * 0x3F80
    wraps = jnp.asarray([-0.0, -0.0, 1.0])  # 2 x 0x80000000 is 0 modulo 2^32
    assert int(export.bit_sum(wraps)) == 0x3F800000
    assert int(export.bit_sum(jnp.asarray(7, jnp.int32))) == 7


def test_every_leaf_is_summed_under_its_dotted_name():
    tree = {"layers": {"q": jnp.ones(2)}, "opt_state": (jnp.zeros(3), jnp.asarray(7, jnp.int32))}
    sums = {"layers.q": 0x7F000000, "opt_state.0": 0, "opt_state.1": 7}
    assert export.bit_sums(tree) == sums
