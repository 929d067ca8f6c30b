"""Routed experts against a plain dense-masked reference; statistics by hand; replay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.models import decoder, moe
from tests.models import tiny


def dense_masked(cfg, p, x):
    """Compute every expert for every token and weigh with zero where it was not chosen."""
    probs = jax.nn.softmax(jnp.matmul(x, p["router"], precision="highest"), axis=-1)
    kth = jnp.sort(probs, axis=-1)[:, -cfg.experts_per_token, None]
    weights = jnp.where(probs >= kth, probs, 0.0)
    if cfg.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    out = 0.0
    for e in range(cfg.num_experts):
        mats = (p[name][e] for name in ("expert_gate", "expert_up", "expert_down"))
        gate, up, down = mats
        gated = jax.nn.silu(jnp.matmul(x, gate, precision="highest"))
        gated = gated * jnp.matmul(x, up, precision="highest")
        out = out + weights[:, e : e + 1] * jnp.matmul(gated, down, precision="highest")
    return out


def layer_params(cfg, seed=0):
    return {name: leaf[0] for name, leaf in tiny.params(cfg, seed)["layers"].items()}


def inputs(cfg, n=17, seed=3):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(n, cfg.hidden_size)), jnp.float32)


@pytest.mark.parametrize(("norm", "k"), [(True, 2), (False, 1)])
def test_forward_and_gradient_equal_the_dense_reference(norm, k):
    cfg = tiny.config("qwen3_moe", norm_topk_prob=norm, experts_per_token=k)
    p, x = layer_params(cfg), inputs(cfg)
    leaves = {n: p[n] for n in ("router", "expert_gate", "expert_up", "expert_down")}

    def run(function):
        def total(leaves, x):
            y = function(cfg, leaves, x)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(leaves, x)

    (_, got), got_grads = run(lambda *args: moe.moe_mlp(*args)[0])
    (_, want), want_grads = run(dense_masked)
    np.testing.assert_allclose(got, want, atol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (got_grads, want_grads)), strict=True):
        assert np.abs(np.asarray(theirs)).max() > 1e-3
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(np.asarray(theirs)).max())


def test_statistics_by_hand():
    """3 experts, 4 tokens with 2 each, the last is padding.

    Experts 0, 0, 0 and 1, 1, 2 of the first three: f = (3, 2, 1) / 6.
    p = mean of (.6 .3 .1), (.5 .4 .1), (.4 .2 .4) = (.5, .3, .2).
    Balance 3 (.5 .5 + .3333 .3 + .1667 .2) = 3 (.25 + .1 + .03333) = 1.15; max load .5 x 3.
    """
    probs = jnp.asarray([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.4, 0.2, 0.4], [0.0, 0.0, 1.0]])
    chosen = jnp.asarray([[0, 1], [0, 1], [0, 2], [2, 1]], jnp.int32)
    stats = moe.router_stats(probs, chosen, jnp.asarray([True, True, True, False]))
    np.testing.assert_allclose(stats.load, [3 / 6, 2 / 6, 1 / 6], atol=1e-6)
    np.testing.assert_allclose(stats.prob, [0.5, 0.3, 0.2], atol=1e-6)
    np.testing.assert_allclose(stats.balance_loss, 1.15, atol=1e-6)
    np.testing.assert_allclose(stats.max_load, 1.5, atol=1e-6)
    everyone = moe.router_stats(probs, chosen)
    np.testing.assert_allclose(everyone.load, [3 / 8, 3 / 8, 2 / 8], atol=1e-6)
    nobody = moe.router_stats(probs, chosen, jnp.zeros(4, bool))
    assert float(nobody.balance_loss) == 0 and np.isfinite(np.asarray(nobody.load)).all()


def test_even_routing_has_balance_one_and_its_gradient_is_through_p_alone():
    probs = jnp.full((6, 3), 1 / 3)
    chosen = jnp.asarray([[0], [1], [2]] * 2, jnp.int32)
    stats = moe.router_stats(probs, chosen)
    np.testing.assert_allclose([stats.balance_loss, stats.max_load], 1.0, atol=1e-6)
    # dL/dp[n, e] = E f_e / N: f = (2, 1, 0) / 3 and N = 3
    uneven = jnp.asarray([[0], [0], [1]], jnp.int32)
    gradient = jax.grad(lambda q: moe.router_stats(q, uneven).balance_loss)(probs[:3])
    np.testing.assert_allclose(gradient, np.tile([2 / 3, 1 / 3, 0], (3, 1)), atol=1e-6)


def test_replayed_experts_take_the_place_of_the_choice_and_keep_the_routers_weights():
    cfg = tiny.config("qwen3_moe")
    p, x = layer_params(cfg), inputs(cfg, n=6)
    y, stats = moe.moe_mlp(cfg, p, x)
    same, _ = moe.moe_mlp(cfg, p, x, experts=stats.chosen)
    assert np.asarray(same).tobytes() == np.asarray(y).tobytes()

    other = (stats.chosen + 1) % cfg.num_experts
    partly = other.at[2].set(-1)  # the engine never fed token 2
    replayed, their = moe.moe_mlp(cfg, p, x, experts=partly)
    np.testing.assert_array_equal(their.chosen, partly.at[2].set(stats.chosen[2]))
    np.testing.assert_allclose(replayed[2], y[2], atol=1e-6)
    probs = np.asarray(moe.router_probs(x, p["router"]))
    for token in (0, 5):
        ids = np.asarray(other[token])
        weights = probs[token, ids] / probs[token, ids].sum()
        want = 0.0
        for e, weight in zip(ids, weights, strict=True):
            gated = jax.nn.silu(x[token] @ p["expert_gate"][e]) * (x[token] @ p["expert_up"][e])
            want = want + weight * (gated @ p["expert_down"][e])
        np.testing.assert_allclose(replayed[token], want, atol=2e-5)


def test_statistics_of_the_model_leave_padding_out_and_replay_goes_layer_by_layer():
    cfg = tiny.config("qwen3_moe", num_layers=3)
    params = tiny.params(cfg)
    run = jax.jit(
        lambda rows, experts=None: decoder.hidden_and_stats_fn(cfg, params, *rows, experts=experts)
    )
    tokens, positions, segments = tiny.rows(cfg, [[5, 4]], 12)
    hidden, stats = run((tokens, positions, segments))
    plain = tiny.hidden(cfg, params, tokens, positions, segments)
    np.testing.assert_allclose(plain, hidden, atol=1e-6)
    assert stats.load.shape == stats.prob.shape == (3, 5)
    assert stats.balance_loss.shape == stats.max_load.shape == (3,)
    assert stats.chosen.shape == (12, 3, 2)
    np.testing.assert_allclose(stats.load.sum(axis=-1), 1.0, atol=1e-6)
    # other tokens in the padding change neither hidden states nor statistics
    changed = tokens.at[0, 9:].set((tokens[0, 9:] + 5) % cfg.vocab_size)
    again, others = run((changed, positions, segments))
    np.testing.assert_array_equal(again[:, :9], hidden[:, :9])
    for field in ("load", "prob", "balance_loss", "max_load"):
        np.testing.assert_allclose(getattr(others, field), getattr(stats, field), atol=1e-6)
    assert (others.chosen[9:] != stats.chosen[9:]).any()

    rolled = (stats.chosen + jnp.asarray([0, 1, 2])[None, :, None]) % cfg.num_experts
    moved, replayed = run((tokens, positions, segments), rolled)
    np.testing.assert_array_equal(replayed.chosen, rolled)
    assert np.abs(np.asarray(moved - hidden)[:, :9]).max() > 1e-3


def test_router_logits_are_not_rounded_to_the_compute_dtype():
    """Logits 3 + 2^-9 and 3 are one number in bf16, and two in fp32."""
    x = jnp.asarray([[1.0, 2.0**-9]], jnp.bfloat16)
    router = jnp.asarray([[3.0, 3.0], [1.0, 0.0]], jnp.float32)
    probs = moe.router_probs(x, router)
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(probs[0, 0] - probs[0, 1], np.tanh(2.0**-10), rtol=1e-3)
