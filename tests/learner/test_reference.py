"""The frozen reference: its log-probs beside a batch, and the KL of the loss by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.learner.reference import make_reference_channel, reference_params
from skyrl_jax.learner.step import make_logprob_step, policy_loss
from skyrl_jax.models import decoder
from skyrl_jax.rl.logprobs import TokenStats

PACKED = [[0, 1], [4, 2], [3], []]


def test_channel_is_the_reference_scored_at_the_batch_temperature(
    model_cfg, learner_cfg, sequences, pack, replace
):
    policy = decoder.init_params(model_cfg, jax.random.key(1))
    other = decoder.init_params(model_cfg, jax.random.key(2))
    batch = replace(pack(sequences, PACKED, 24), channels={"values": np.ones((4, 24), np.float32)})
    reference_channel = make_reference_channel(model_cfg, learner_cfg)
    score = make_logprob_step(model_cfg, learner_cfg)
    got = reference_channel(batch, reference_params(model_cfg, other))
    assert set(got.channels) == {"values", "ref_logprobs"}
    assert set(batch.channels) == {"values"}  # the caller's batch is as it was
    bare = replace(batch, channels={})
    want = np.asarray(score(other, bare).logprobs)
    assert np.asarray(got.channels["ref_logprobs"]).tobytes() == want.tobytes()
    assert np.abs(want - np.asarray(score(policy, bare).logprobs)).max() > 0.1
    half = reference_params(model_cfg, other, "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}
    rough = np.asarray(reference_channel(batch, half).channels["ref_logprobs"])
    assert rough.dtype == np.float32
    np.testing.assert_allclose(rough, want, atol=0.1)
    with pytest.raises(ConfigError, match="'float16'; known: float32, bfloat16"):
        reference_params(model_cfg, other, "float16")


def test_the_copy_outlives_the_policy(model_cfg):
    params = decoder.init_params(model_cfg, jax.random.key(1))
    reference = reference_params(model_cfg, params)
    before = np.array(params["layers"]["q"])
    for leaf in jax.tree.leaves(params):
        leaf.delete()  # what donation does to the policy's params
    np.testing.assert_array_equal(reference["layers"]["q"], before)


@pytest.mark.parametrize(("kind", "second"), [("k1", np.log(2)), ("k3", 0.5 - 1 + np.log(2))])
def test_kl_in_the_loss_by_hand(objective, sequences, pack, replace, kind, second):
    """One row, three trained tokens, policy against reference: equal, twice, and masked."""
    blank = pack(sequences, [[]], 4)
    row = {
        "loss_weights": [0, 0.5, 0.25, 0],
        "behavior_logprobs": [0, -1, -2, 0],
        "advantages": [0, 1, -3, 0],
    }
    ref = np.asarray([[9.0, -1.0, -2.0 - np.log(2), np.nan]], np.float32)
    batch = replace(
        blank,
        channels={"ref_logprobs": ref},
        **{name: np.asarray([x], np.float32) for name, x in row.items()},
    )
    logprobs = jnp.asarray([[0.0, -1.0, -2.0, 5.0]])
    stats = TokenStats(logprobs, jnp.zeros((1, 4)))
    cfg = replace(objective, kl_coef=0.1, kl_kind=kind)
    loss, tally = policy_loss(cfg)(stats, batch)
    # Ratios are 1: the policy loss is -A. KL of the tokens: 0, and x = log 2.
    want = 0.5 * -1 + 0.25 * (3 + 0.1 * second)
    assert float(loss) == pytest.approx(want, rel=1e-6)
    assert float(tally.sums["ref_kl"]) == pytest.approx(second, rel=1e-6)
    # d/dx of k1 is 1, of k3 1 - exp(-x) = 1/2; -A of the policy term, times the weights.
    slope = {"k1": 1.0, "k3": 0.5}[kind]
    gradient = jax.grad(lambda x: policy_loss(cfg)(TokenStats(x, jnp.zeros((1, 4))), batch)[0])(
        logprobs
    )
    zero = {"k1": 1.0, "k3": 0.0}[kind]
    want = [0, 0.5 * (-1 + 0.1 * zero), 0.25 * (3 + 0.1 * slope), 0]
    np.testing.assert_allclose(gradient[0], want, rtol=1e-5, atol=1e-7)
