"""AdamW, warmup, clipping and the guard, worked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.learner.optimizer import learning_rate, make_optimizer


def test_warmup_then_constant(learner_cfg, replace):
    schedule = learning_rate(replace(learner_cfg, lr=0.4, warmup_steps=3))
    np.testing.assert_allclose([float(schedule(i)) for i in range(5)], [0.1, 0.2, 0.3, 0.4, 0.4])
    constant = learning_rate(replace(learner_cfg, lr=0.4))
    assert float(constant(0)) == pytest.approx(0.4)


def test_two_adamw_updates_against_numpy(learner_cfg, replace):
    cfg = replace(learner_cfg, lr=0.1, weight_decay=0.01, max_grad_norm=1.0)
    optimizer = make_optimizer(cfg)
    params = {"q": jnp.asarray([1.0, -2.0]), "q_norm": jnp.asarray([1.0])}
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
