"""Bit sums and what leaves the learner."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from skyrl_jax.learner import export
from skyrl_jax.models.decoder import init_params


def test_bit_sum_by_hand():
    assert int(export.bit_sum(jnp.asarray([1.0, 2.0]))) == 0x3F800000 + 0x40000000
    assert int(export.bit_sum(jnp.asarray([1.0, 1.0], jnp.bfloat16))) == 2 * 0x3F80
    wraps = jnp.asarray([-0.0, -0.0, 1.0])  # 2 x 0x80000000 is 0 modulo 2^32
    assert int(export.bit_sum(wraps)) == 0x3F800000
    assert int(export.bit_sum(jnp.asarray(7, jnp.int32))) == 7


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
def test_host_and_device_sums_agree_and_notice_one_bit(dtype):
    x = np.random.default_rng(0).normal(size=(3, 50)).astype(dtype)
    assert export.host_bit_sum(x) == int(export.bit_sum(jnp.asarray(x)))
    flipped = x.copy()
    flipped.view(np.uint8).reshape(-1)[17] ^= 1
    assert export.host_bit_sum(flipped) != export.host_bit_sum(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_params_round_trip_through_orbax(tmp_path, model_cfg, dtype):
    params = init_params(model_cfg, jax.random.key(0))
    host, sums = export.params_to_host(params, dtype)
    assert sums["layers.q"] == export.host_bit_sum(host["layers"]["q"])
    assert set(sums) >= {"embed.embedding", "final_norm.scale", "layers.down"}
    export.write_params(tmp_path / "orbax", host)
    back = export.read_params(tmp_path / "orbax")
    for x, y in zip(jax.tree.leaves(host), jax.tree.leaves(back), strict=True):
        assert x.dtype == y.dtype == jnp.dtype(dtype)
        assert x.tobytes() == y.tobytes()
    want = np.asarray(params["layers"]["q"]).astype(jnp.dtype(dtype))
    assert want.tobytes() == back["layers"]["q"].tobytes()
