"""Losses and KL estimates, worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.rl.kl import kl_estimate
from skyrl_jax.rl.losses import cross_entropy_loss, masked_log_ratio, ppo_clip_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def loss(ratio, advantage, **changes):
    value = ppo_clip_loss(
        jnp.log(jnp.asarray([ratio])), jnp.asarray([advantage]), **(CLIP | changes)
    )
    return float(value[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "want"),
    [
        (1.0, 2.0, -2.0),  # on policy: -A
        (1.1, 2.0, -2.2),  # inside the band: -r A
        (1.5, 2.0, -2.56),  # above it with A > 0: clipped at 1.28
        (0.5, 2.0, -1.0),  # below it with A > 0: not clipped, the minimum is r A
        (0.5, -2.0, 1.6),  # below it with A < 0: clipped at 0.8
        (1.5, -2.0, 3.0),  # above it with A < 0: not clipped
        (5.0, -2.0, 10.0),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, want):
    assert loss(ratio, advantage) == pytest.approx(want, rel=1e-6)


def test_dual_clip_bounds_negative_advantages_only():
    assert loss(5.0, -2.0, dual_clip=3.0) == pytest.approx(6.0)
    assert loss(2.0, -2.0, dual_clip=3.0) == pytest.approx(4.0)
    assert loss(0.5, -2.0, dual_clip=3.0) == pytest.approx(1.6)
    assert loss(1.5, 2.0, dual_clip=3.0) == pytest.approx(-2.56)


@pytest.mark.parametrize(
    ("ratio", "advantage", "want"),
    [(1.1, 2.0, -2.2), (1.5, 2.0, 0.0), (0.5, 2.0, -1.0), (0.5, -2.0, 0.0), (1.5, -2.0, 3.0)],
)
def test_gradient_is_minus_ratio_times_advantage_or_zero_where_clipped(ratio, advantage, want):
    def f(log_ratio):
        return jnp.sum(ppo_clip_loss(log_ratio, jnp.asarray([advantage]), **CLIP))

    got = jax.grad(f)(jnp.log(jnp.asarray([ratio])))
    assert float(got[0]) == pytest.approx(want, rel=1e-5)


def test_log_ratio_is_clamped_both_ways():
    got = masked_log_ratio(
        jnp.asarray([-1.0, -91.0, -2.0]), jnp.asarray([-9999.0, -1.0, -1.5]), jnp.ones(3, bool)
    )
    np.testing.assert_allclose(got, [20.0, -20.0, -0.5])
    assert np.isfinite(np.exp(np.asarray(got))).all()


@pytest.mark.parametrize("garbage", [-9999.0, -91.0, np.nan, np.inf, -np.inf])
def test_masked_garbage_reaches_neither_value_nor_gradient(garbage):
    mask = jnp.asarray([True, False])
    anchor = jnp.asarray([-1.0, garbage])
    ratio = masked_log_ratio(jnp.asarray([-1.0, -2.0]), anchor, mask)
    np.testing.assert_array_equal(ratio, [0.0, 0.0])

    def f(logprobs):
        log_ratio = masked_log_ratio(logprobs, anchor, mask)
        per_token = ppo_clip_loss(log_ratio, jnp.asarray([1.0, 1.0]), **CLIP)
        return jnp.sum(jnp.where(mask, per_token, 0.0))

    value, gradient = jax.value_and_grad(f)(jnp.asarray([-1.0, -2.0]))
    assert float(value) == -1.0
    np.testing.assert_array_equal(gradient, [-1.0, 0.0])
    # and garbage of the learner itself, e.g. on padding
    value, gradient = jax.value_and_grad(f)(jnp.asarray([-1.0, garbage]))
    assert float(value) == -1.0
    np.testing.assert_array_equal(gradient, [-1.0, 0.0])


def test_kl_estimates_by_hand():
    x = jnp.asarray([0.0, np.log(2.0), -np.log(2.0)])
    np.testing.assert_allclose(kl_estimate(x, "k1"), [0, 0.693147, -0.693147], atol=1e-6)
    np.testing.assert_allclose(kl_estimate(x, "k2"), [0, 0.240227, 0.240227], atol=1e-6)
    # exp(-x) - 1 + x: 0.5 - 1 + 0.693147 and 2 - 1 - 0.693147
    np.testing.assert_allclose(kl_estimate(x, "k3"), [0, 0.193147, 0.306853], atol=1e-6)
    with pytest.raises(ValueError, match="'k4'; known: k1, k2, k3"):
        kl_estimate(x, "k4")


def test_k1_and_k3_are_unbiased():
    """E_p[k] = KL(p || q), exactly, over a three-token vocabulary."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    true = float((p * np.log(p / q)).sum())
    for kind in ("k1", "k3"):
        estimate = np.asarray(kl_estimate(jnp.asarray(np.log(p / q)), kind))
        assert float((p * estimate).sum()) == pytest.approx(true, rel=1e-5)


def test_k2_gradient_is_the_gradient_of_kl():
    q = jnp.asarray([0.2, 0.2, 0.6])
    logits = jnp.asarray([0.3, -0.4, 0.1])

    def exact(z):
        p = jax.nn.softmax(z)
        return jnp.sum(p * (jnp.log(p) - jnp.log(q)))

    def estimated(z):
        p = jax.lax.stop_gradient(jax.nn.softmax(z))  # tokens were drawn, not differentiated
        return jnp.sum(p * kl_estimate(jax.nn.log_softmax(z) - jnp.log(q), "k2"))

    np.testing.assert_allclose(jax.grad(estimated)(logits), jax.grad(exact)(logits), atol=1e-6)


def test_cross_entropy():
    got = cross_entropy_loss(jnp.asarray([-0.5, jnp.nan]), jnp.asarray([True, False]))
    np.testing.assert_array_equal(got, [0.5, 0.0])
