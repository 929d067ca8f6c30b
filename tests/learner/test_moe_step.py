"""Routed experts in the train step: balance loss, figures, and replay of the engine's routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.learner import state as state_lib
from skyrl_jax.learner import step as step_lib
from skyrl_jax.models import decoder
from skyrl_jax.models.moe import MoeStats
from skyrl_jax.rl.logprobs import TokenStats

PACKED = [[0, 1], [4, 2], [3], []]
NUM = 4
train_step = functools.cache(step_lib.make_train_step)
logprob_step = functools.cache(step_lib.make_logprob_step)


@pytest.fixture
def routed_cfg(model_cfg, replace):
    return replace(
        model_cfg,
        family="qwen3_moe",
        num_experts=NUM,
        experts_per_token=2,
        moe_intermediate_size=8,
        norm_topk_prob=True,
    )


def routers(**fields):
    values = dict(
        load=jnp.full((2, NUM), 0.25),
        prob=jnp.full((2, NUM), 0.25),
        balance_loss=jnp.asarray([1.5, 2.5]),
        max_load=jnp.ones(2),
        entropy=jnp.asarray([0.5, 0.7]),
        dropped=jnp.zeros(2),
        chosen=None,
    )
    return MoeStats(**(values | fields))


def one_token_stats(aux):
    return TokenStats(jnp.zeros((1, 3)), jnp.zeros((1, 3)), aux=aux)


def batch_of(weights, pack, sequences, replace):
    blank = pack(sequences, [[]], 3)
    return replace(blank, loss_weights=np.asarray([weights], np.float32))


def test_balance_loss_by_hand(objective, pack, sequences, replace):
    """Two trained tokens of weights 0.25 and 0.5, advantage 0: 0.75 x 0.1 x (1.5 + 2.5) / 2."""
    batch = batch_of([0.0, 0.25, 0.5], pack, sequences, replace)
    stats = one_token_stats(routers(load=jnp.asarray([[0.5, 0.3, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]])))
    loss, tally = step_lib.policy_loss(replace(objective, balance_coef=0.1))(stats, batch)
    assert float(loss) == pytest.approx(0.15, rel=1e-6)
    got = step_lib.diagnostics.finish(tally)
    assert float(got["balance_loss_mean"]) == pytest.approx(2.0)
    assert float(got["router_entropy_mean"]) == pytest.approx(0.6)
    assert float(got["busiest_expert_fraction"]) == pytest.approx(0.45)
    assert float(got["expert_load_max"]) == pytest.approx(2.0)
    assert float(got["dropped_assignments_mean"]) == 0
    assert "replayed_fraction" not in got
    plain, _ = step_lib.policy_loss(objective)(stats, batch)
    assert float(plain) == 0
    lost = one_token_stats(routers(dropped=jnp.asarray([1.0, 3.0])))
    tally = step_lib.supervised_loss()(lost, batch)[1]
    assert (
        float(step_lib.diagnostics.finish(tally)["dropped_assignments_mean"]) == 2
    )  # 4 / 2 tokens


def test_a_dense_policy_has_no_figures_of_routers_and_no_balance(
    objective, pack, sequences, replace
):
    batch = batch_of([0.0, 0.25, 0.5], pack, sequences, replace)
    _, tally = step_lib.policy_loss(objective)(one_token_stats(None), batch)
    assert not {"balance_loss", "router_entropy"} & set(tally.sums)
    with pytest.raises(ConfigError, match=r"balance_coef.*no routed experts; use 0"):
        step_lib.policy_loss(replace(objective, balance_coef=0.1))(one_token_stats(None), batch)


def test_the_balance_loss_makes_uneven_routers_even(
    routed_cfg, learner_cfg, objective, sequences, pack, replace
):
    """Advantages are 0 and there is no decay, so without the term nothing would move at all."""
    for s in sequences:
        s["advantage"] = 0.0
    batch = pack(sequences, PACKED, 24)
    cfg = replace(learner_cfg, weight_decay=0.0, lr=3e-2)
    state = state_lib.init_state(routed_cfg, cfg, jax.random.key(1))
    layers = dict(state.params["layers"])
    # All tokens have much of the first coordinate, and the first expert likes it.
    layers["router"] = layers["router"].at[:, 0, 0].set(1.0)
    embedding = state.params["embed"]["embedding"].at[:, 0].set(2.0)
    params = state.params | {"layers": layers, "embed": {"embedding": embedding}}
    state = state._replace(params=params)
    step = train_step(routed_cfg, cfg, replace(objective, balance_coef=1.0))
    seen = []
    for _ in range(25):
        state, metrics = step(state, batch)
        seen.append(float(metrics["balance_loss_mean"]) - 1)
        assert float(metrics["dropped_assignments_mean"]) == 0
    assert seen[0] > 0.15 and seen[-1] < seen[0] / 2, seen


def chosen_by(cfg, params, batch):
    """Return what the routers choose for a batch, as an engine would send it: [B, T, L, k]."""
    rows = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids))
    _, stats = decoder.hidden_and_stats_fn(cfg, params, *rows)
    return np.asarray(stats.chosen).reshape(*batch.tokens.shape, *stats.chosen.shape[1:])


def test_replay_takes_the_engines_experts(
    routed_cfg, learner_cfg, objective, sequences, pack, replace, host
):
    params = decoder.init_params(routed_cfg, jax.random.key(1))
    batch = pack(sequences, PACKED, 24)
    own = chosen_by(routed_cfg, params, batch).astype(np.int32)
    assert own.shape == (4, 24, 2, 2)
    score = logprob_step(routed_cfg, learner_cfg)
    plain = np.asarray(score(params, batch).logprobs)

    def replayed(routed):
        return np.asarray(
            score(params, replace(batch, channels={"routed_experts": routed})).logprobs
        )

    np.testing.assert_allclose(replayed(own), plain, atol=1e-6)
    np.testing.assert_array_equal(replayed(np.full_like(own, -1)), replayed(own))
    other = (own + 1) % NUM
    assert np.abs(replayed(other) - plain).max() > 1e-3
    # only the first sequence of the first row is replayed: its neighbours keep their numbers
    partly = np.full_like(own, -1)
    partly[0, :7] = other[0, :7]
    moved = np.abs(replayed(partly) - plain) > 1e-6
    assert moved[0, 1:7].any() and not moved[0, 7:].any() and not moved[1:].any()

    step = train_step(routed_cfg, learner_cfg, objective)
    state = state_lib.state_from_params(routed_cfg, learner_cfg, params)
    _, metrics = step(state, replace(batch, channels={"routed_experts": partly}))
    trained = batch.loss_weights != 0
    want = trained[0, :7].sum() / trained.sum()
    assert float(metrics["replayed_fraction"]) == pytest.approx(want, rel=1e-6)


def test_the_gradient_of_a_replayed_row_is_through_the_replayed_experts(
    routed_cfg, learner_cfg, objective, sequences, pack, replace, host
):
    """Everything is sent to experts 0 and 1: the others get no gradient."""
    params = decoder.init_params(routed_cfg, jax.random.key(1))
    batch = pack(sequences, PACKED, 24)
    routed = np.tile(np.asarray([0, 1], np.int32), (4, 24, 2, 1))
    state = state_lib.state_from_params(routed_cfg, learner_cfg, params)
    step = train_step(routed_cfg, learner_cfg, objective)
    after, metrics = step(state, replace(batch, channels={"routed_experts": routed}))
    mu = host(after.opt_state.inner[0][0].mu)["layers"]
    for name in ("expert_gate", "expert_up", "expert_down"):
        assert (mu[name][:, 2:] == 0).all() and np.abs(mu[name][:, :2]).max() > 0
    assert float(metrics["busiest_expert_fraction"]) == 0.5


def test_a_channel_that_does_not_fit_is_named(
    model_cfg, routed_cfg, learner_cfg, sequences, pack, replace
):
    batch = pack(sequences, PACKED, 24)
    wrong = replace(batch, channels={"routed_experts": np.zeros((4, 24, 3, 2), np.int32)})
    params = decoder.init_params(routed_cfg, jax.random.key(1))
    with pytest.raises(DataError, match=r"routed_experts.*\[2, 24, 3, 2\].*\[2, 24, 2, 2\]"):
        step_lib.make_score_fn(routed_cfg, learner_cfg)(
            params, jax.tree.map(lambda x: x[:2], wrong)
        )
    dense = decoder.init_params(model_cfg, jax.random.key(1))
    with pytest.raises(DataError, match=r"'qwen3'\) asks for none: it has no experts"):
        step_lib.make_score_fn(model_cfg, learner_cfg)(dense, wrong)


def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_the_policy(
    objective, pack, sequences, replace
):
    """Engine log-probs 2 and 3 nats off: d loss / d log-prob is still -weight x advantage."""
    batch = replace(
        batch_of([0.0, 0.25, 0.5], pack, sequences, replace),
        advantages=np.asarray([[9.0, 2.0, -4.0]], np.float32),
        behavior_logprobs=np.asarray([[0.0, -3.0, -1.0]], np.float32),
    )
    logprobs = jnp.asarray([[0.0, -1.0, -4.0]])

    def gradient(objective):
        def loss(x):
            value, tally = step_lib.policy_loss(objective)(TokenStats(x, jnp.zeros((1, 3))), batch)
            return value, step_lib.diagnostics.finish(tally)

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(logprobs)
        return float(value), metrics, np.asarray(grads)

    value, metrics, grads = gradient(replace(objective, on_policy=True))
    np.testing.assert_array_equal(grads, [[0.0, -0.5, 2.0]])
    assert value == -(0.25 * 2 - 0.5 * 4)
    assert float(metrics["ratio_mean"]) == float(metrics["ratio_max"]) == 1
    assert float(metrics["mismatch_abs_mean"]) == 2.5  # the engine's log-probs are still compared
    other = gradient(objective)
    assert float(other[1]["ratio_max"]) > 7 and (other[2] != grads).any()
