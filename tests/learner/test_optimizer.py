"""AdamW, warmup, clipping and the guard, worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.learner.optimizer import _decayed, learning_rate, make_optimizer


def test_warmup_then_constant(learner_cfg, replace):
    schedule = learning_rate(replace(learner_cfg, lr=0.4, warmup_steps=3))
    np.testing.assert_allclose([float(schedule(i)) for i in range(5)], [0.1, 0.2, 0.3, 0.4, 0.4])
    constant = learning_rate(replace(learner_cfg, lr=0.4))
    assert float(constant(0)) == pytest.approx(0.4)


def test_cosine_by_hand(learner_cfg, replace):
    """Warm-up 3, end at 11: half way between them is update 7; a quarter is update 5."""
    cfg = replace(
        learner_cfg,
        lr=0.4,
        schedule="cosine",
        warmup_steps=3,
        decay_steps=11,
        min_lr_fraction=0.25,
    )
    schedule = learning_rate(cfg)
    quarter = (1 + np.sqrt(0.5)) / 2
    want = {
        0: 0.1,  # the first update already moves
        1: 0.2,
        2: 0.3,
        3: 0.4,  # the whole lr
        5: 0.4 * (0.25 + 0.75 * quarter),
        7: 0.4 * (0.25 + 0.75 * 0.5),
        9: 0.4 * (0.25 + 0.75 * (1 - quarter)),
        11: 0.1,  # min_lr_fraction x lr, from here on
        12: 0.1,
        1000: 0.1,
    }
    got = [float(jax.jit(schedule)(jnp.asarray(i))) for i in want]
    np.testing.assert_allclose(got, list(want.values()), rtol=1e-6)
    bare = learning_rate(replace(cfg, warmup_steps=0, decay_steps=2, min_lr_fraction=0.0))
    np.testing.assert_allclose([float(bare(i)) for i in range(4)], [0.4, 0.2, 0.0, 0.0], atol=1e-7)


def test_constant_is_the_old_rule_bit_for_bit(learner_cfg, replace):
    cfg = replace(learner_cfg, lr=6e-5, warmup_steps=7, decay_steps=3, min_lr_fraction=0.5)
    schedule = jax.jit(learning_rate(cfg))
    rule = jax.jit(lambda count: 6e-5 * jnp.minimum(1.0, (count + 1.0) / (7 + 1.0)))
    for i in range(12):
        assert np.asarray(schedule(i)).tobytes() == np.asarray(rule(i)).tobytes()


def test_the_update_uses_the_schedule_and_skipped_updates_do_not_count(learner_cfg, replace):
    cfg = replace(
        learner_cfg,
        lr=0.4,
        schedule="cosine",
        decay_steps=2,
        min_lr_fraction=0.0,
        weight_decay=0.0,
    )
    optimizer = make_optimizer(cfg)
    params = {"q": jnp.asarray([1.0])}
    state = optimizer.init(params)
    moves = []
    for gradient in (1.0, np.nan, 1.0, 1.0):
        updates, state = optimizer.update({"q": jnp.asarray([gradient])}, state, params)
        moves.append(float(updates["q"][0]))
    # Adam of a constant gradient moves by lr; the NaN left the schedule where it was.
    np.testing.assert_allclose(moves, [-0.4, 0.0, -0.2, 0.0], atol=1e-6)


def test_bad_optimizer_settings_are_named(learner_cfg, replace):
    with pytest.raises(ConfigError, match=r"learner\.schedule.*'linear'; known: constant, cosine"):
        learning_rate(replace(learner_cfg, schedule="linear"))
    with pytest.raises(ConfigError, match=r"learner\.decay_steps.*is 3.*after.*warmup_steps' = 3"):
        learning_rate(replace(learner_cfg, schedule="cosine", warmup_steps=3, decay_steps=3))
    with pytest.raises(ConfigError, match=r"learner\.moment_dtype.*known: float32, bfloat16"):
        make_optimizer(replace(learner_cfg, moment_dtype="float16"))


def test_bfloat16_first_moment(learner_cfg, replace):
    """Kept in bfloat16 (8 bits), used in fp32; the second moment stays fp32."""
    cfg = replace(learner_cfg, lr=0.1, weight_decay=0.0, moment_dtype="bfloat16")
    optimizer = make_optimizer(cfg)
    params = {"q": jnp.asarray([0.0])}
    gradient = {"q": jnp.asarray([1.0 + 2.0**-12])}  # no bfloat16
    updates, state = optimizer.update(gradient, optimizer.init(params), params)
    adam = state.inner[0][0]
    assert adam.mu["q"].dtype == jnp.bfloat16 and adam.nu["q"].dtype == jnp.float32
    # 0.1 x 1.000244 x 2048 = 204.85; bfloat16 steps by 1/2048 there.
    assert float(adam.mu["q"][0]) == 205 / 2048
    # The update itself did not see the rounded value: |move| of a first Adam step is lr exactly.
    assert float(updates["q"][0]) == pytest.approx(-0.1, rel=1e-6)
    _, state = optimizer.update(gradient, state, params)
    # 0.9 x 205/2048 + 0.1 x 1.000244 = 0.190112: within a bfloat16 step (2^-10) of it.
    assert float(state.inner[0][0].mu["q"][0]) == pytest.approx(0.190112, abs=2**-10)


def test_two_adamw_updates_against_numpy(learner_cfg, replace):
    cfg = replace(learner_cfg, lr=0.1, weight_decay=0.01, max_grad_norm=1.0)
    optimizer = make_optimizer(cfg)
    params = {"q": jnp.asarray([1.0, -2.0]), "q_norm": jnp.asarray([1.0])}
    assert _decayed(params | {"scale": 1, "q_bias": 1, "a": 1, "router": 1}) == {
        "q": True, "q_norm": False, "scale": False, "q_bias": False, "a": True, "router": True,
    }  # fmt: skip
    state = optimizer.init(params)
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    m = {k: np.zeros_like(v) for k, v in p.items()}
    v = {k: np.zeros_like(x) for k, x in p.items()}
    for t, raw in enumerate(
        ({"q": [3.0, 0.0], "q_norm": [4.0]}, {"q": [0.1, 0.2], "q_norm": [0.1]})
    ):
        grads = {k: jnp.asarray(x) for k, x in raw.items()}
        updates, state = optimizer.update(grads, state, params)
        params = {k: params[k] + updates[k] for k in params}
        norm = np.sqrt(sum(np.square(x).sum() for x in map(np.asarray, raw.values())))
        for k in p:
            g = np.asarray(raw[k]) * min(1.0, 1.0 / norm)
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.95 * v[k] + 0.05 * g * g
            m_hat, v_hat = m[k] / (1 - 0.9 ** (t + 1)), v[k] / (1 - 0.95 ** (t + 1))
            decay = 0.01 * p[k] if k == "q" else 0.0  # norm scales are not decayed
            p[k] = p[k] - 0.1 * (m_hat / (np.sqrt(v_hat) + 1e-8) + decay)
            np.testing.assert_allclose(params[k], p[k], rtol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_non_finite_gradient_changes_nothing(learner_cfg, poison):
    optimizer = make_optimizer(learner_cfg)
    params = {"q": jnp.asarray([1.0, -0.0])}
    state = optimizer.init(params)
    updates, after = optimizer.update({"q": jnp.asarray([1.0, poison])}, state, params)
    assert np.asarray(params["q"] + updates["q"]).tobytes() == np.asarray(params["q"]).tobytes()
    assert int(after.num_skipped) == 1 and int(after.num_applied) == 0
    assert (np.asarray(after.inner[0][0].mu["q"]) == 0).all()
    assert int(after.inner[0][0].count) == 0
