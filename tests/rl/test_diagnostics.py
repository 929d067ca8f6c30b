"""The figures of an update, worked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.rl import diagnostics
from skyrl_jax.rl.losses import masked_log_ratio


def tally(logprobs, behavior, advantages, mask, entropy=None):
    logprobs, behavior, advantages = (
        jnp.asarray([x], jnp.float32) for x in (logprobs, behavior, advantages)
    )
    mask = jnp.asarray([mask], bool)
    entropy = jnp.ones_like(logprobs) if entropy is None else jnp.asarray([entropy], jnp.float32)
    log_ratio = masked_log_ratio(logprobs, behavior, mask)
    return diagnostics.policy_tally(
        logprobs, behavior, log_ratio, advantages, entropy, mask, clip_low=0.2, clip_high=0.28
    )


def test_by_hand():
    log2 = float(np.log(2))
    got = diagnostics.finish(
        tally(
            logprobs=[-1.0, -1.0 + log2, -1.0 - log2, -1.0 + log2, 77.0],
            behavior=[-1.0, -1.0, -1.0, -1.0, -9999.0],
            advantages=[1.0, 1.0, -1.0, -1.0, 1.0],
            mask=[1, 1, 1, 1, 0],
            entropy=[1.0, 2.0, 3.0, 4.0, np.nan],
        )
    )
    assert float(got["num_trained_tokens"]) == 4
    assert float(got["mismatch_abs_mean"]) == pytest.approx(3 * log2 / 4, rel=1e-6)
    assert float(got["mismatch_abs_max"]) == pytest.approx(log2, rel=1e-6)
    # k3 of KL(behavior || learner), r = learner / behavior: r - 1 - log r
    want = (2 * (2 - 1 - log2) + (0.5 - 1 + log2)) / 4
    assert float(got["mismatch_kl_mean"]) == pytest.approx(want, rel=1e-5)
    assert float(got["ratio_mean"]) == pytest.approx((1 + 2 + 0.5 + 2) / 4, rel=1e-6)
    assert float(got["ratio_max"]) == pytest.approx(2, rel=1e-6)
    # above the band with A > 0: one of four; below it with A < 0: one; r = 2 with A < 0 passes
    assert float(got["clip_high_fraction"]) == 0.25
    assert float(got["clip_low_fraction"]) == 0.25
    assert float(got["entropy_mean"]) == 2.5


def test_merge_does_not_depend_on_the_split():
    rng = np.random.default_rng(0)
    fields = [rng.normal(size=10) for _ in range(3)]
    mask = rng.integers(0, 2, 10)
    whole = diagnostics.finish(tally(*fields, mask))
    parts = [tally(*(f[s] for f in fields), mask[s]) for s in (slice(0, 7), slice(7, 10))]
    merged = diagnostics.finish(diagnostics.merge(*parts))
    assert merged.keys() == whole.keys()
    for key, value in whole.items():
        assert float(merged[key]) == pytest.approx(float(value), rel=1e-5)


def test_nothing_trained_is_zero_and_finite():
    got = diagnostics.finish(tally([1.0], [np.nan], [np.inf], [0]))
    assert all(float(value) == 0 for value in got.values())


def test_supervised():
    got = diagnostics.finish(
        diagnostics.supervised_tally(
            jnp.asarray([[-1.0, -3.0, np.nan]]),
            jnp.asarray([[0.5, 0.7, np.nan]]),
            jnp.asarray([[True, True, False]]),
        )
    )
    assert float(got["nll_mean"]) == 2.0
    assert float(got["entropy_mean"]) == pytest.approx(0.6)
