"""The train step: what it must not depend on, and what it must notice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.learner import state as state_lib
from skyrl_jax.learner import step as step_lib
from skyrl_jax.models import decoder

ONE_PER_ROW = [[0], [1], [2], [3], [4], []]
PACKED = [[0, 1], [4, 2], [3], []]

# Equal configs share one compiled program: compiling is what these tests cost.
train_step = functools.cache(step_lib.make_train_step)
logprob_step = functools.cache(step_lib.make_logprob_step)


def gradients(model_cfg, learner_cfg, objective, batch, host):
    """Return (loss, gradient tree, metrics) of one step: Adam's first moment is 0.1 x gradient."""
    cfg = dataclasses.replace(learner_cfg, lr=0.0)
    state = state_lib.init_state(model_cfg, cfg, jax.random.key(1))
    step = train_step(model_cfg, cfg, objective)
    after, metrics = step(state, batch)
    mu = after.opt_state.inner[0][0].mu
    grads = jax.tree.map(lambda x: x / (1 - learner_cfg.beta1), host(mu))
    return float(metrics["loss"]), grads, host(metrics)


def assert_close(a, b, rel=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rel, atol=rel * float(np.abs(y).max() + 1e-12))


@pytest.mark.parametrize("kind", ["policy", "sft"])
def test_split_and_packing_change_nothing(
    model_cfg, learner_cfg, objective, sequences, pack, replace, host, kind
):
    objective = objective if kind == "policy" else None
    want = None
    for rows, micro, chunk, remat in (
        (PACKED, 2, 16, "none"),
        (ONE_PER_ROW, 6, 1000, "none"),
        (ONE_PER_ROW, 1, 7, "full"),
    )[: 3 if kind == "policy" else 2]:
        cfg = replace(learner_cfg, micro_rows=micro, logprob_chunk=chunk, remat=remat)
        got = gradients(model_cfg, cfg, objective, pack(sequences, rows, 24), host)
        want = want or got
        assert got[0] == pytest.approx(want[0], rel=1e-5)
        assert_close(got[1], want[1])
        assert_close(got[2], want[2], 1e-4)
    assert want[2]["num_trained_tokens"] == sum(s["mask"].sum() for s in sequences)


def test_padding_rows_are_free_and_share_the_program(
    model_cfg, learner_cfg, objective, sequences, pack, host
):
    state = state_lib.init_state(model_cfg, learner_cfg, jax.random.key(1))
    step = train_step(model_cfg, learner_cfg, objective)
    few = pack(sequences, [[0], [], [], []], 24)
    many = pack(sequences, PACKED, 24)
    state, _ = step(state, few)
    programs = step._cache_size()
    state, _ = step(state, many)
    assert step._cache_size() == programs


def test_logprobs_are_those_of_the_previous_hidden_state(model_cfg, learner_cfg, sequences, pack):
    """Entry t = log softmax(hidden[t-1] @ head / temperature)[tokens[t]], sequence by sequence."""
    params = decoder.init_params(model_cfg, jax.random.key(1))
    score = logprob_step(model_cfg, learner_cfg)
    stats = score(params, pack(sequences, PACKED, 24))
    got, entropy = np.asarray(stats.logprobs), np.asarray(stats.entropy)
    for row, start, index in ((0, 0, 0), (0, 7, 1), (1, 0, 4), (1, 12, 2), (2, 0, 3)):
        s = sequences[index]
        n = len(s["tokens"])
        alone = decoder.hidden_fn(
            model_cfg,
            params,
            jnp.asarray(s["tokens"])[None],
            jnp.arange(n)[None],
            jnp.ones((1, n), jnp.int32),
        )
        head = np.asarray(decoder.head(model_cfg, params), np.float64)
        logits = np.asarray(alone[0], np.float64) @ head / s["temperature"]
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        want = logp[np.arange(n - 1), s["tokens"][1:]]
        np.testing.assert_allclose(got[row, start + 1 : start + n], want, atol=2e-6)
        want_entropy = -(np.exp(logp) * logp).sum(-1)[:-1]
        np.testing.assert_allclose(entropy[row, start + 1 : start + n], want_entropy, atol=2e-5)
        assert got[row, start] == 0


def test_segments_do_not_see_each_other(model_cfg, learner_cfg, sequences, pack, replace):
    params = decoder.init_params(model_cfg, jax.random.key(1))
    score = logprob_step(model_cfg, learner_cfg)
    batch = pack(sequences, PACKED, 24)
    before = np.asarray(score(params, batch).logprobs)
    tokens = batch.tokens.copy()
    tokens[0, :7] = (tokens[0, :7] + 3) % 40  # another first segment
    after = np.asarray(score(params, replace(batch, tokens=tokens)).logprobs)
    assert (after[0, 7:] == before[0, 7:]).all()
    assert (after[0, 1:7] != before[0, 1:7]).all()


def test_on_policy_ratio_is_one_and_a_shift_is_noticed(
    model_cfg, learner_cfg, objective, sequences, pack, replace, host
):
    params = decoder.init_params(model_cfg, jax.random.key(1))
    batch = pack(sequences, PACKED, 24)
    logprobs = logprob_step(model_cfg, learner_cfg)(params, batch).logprobs
    behavior = np.where(batch.loss_weights != 0, logprobs, 0).astype(np.float32)
    batch = replace(batch, behavior_logprobs=behavior)

    def run(given):
        return gradients(model_cfg, learner_cfg, objective, given, host)[2]

    good = run(batch)
    assert good["mismatch_abs_max"] < 2e-6
    assert abs(good["ratio_mean"] - 1) < 2e-6
    assert good["clip_low_fraction"] == good["clip_high_fraction"] == 0
    for shift in (1, -1):
        moved = run(replace(batch, behavior_logprobs=np.roll(behavior, shift, axis=1)))
        assert moved["mismatch_abs_mean"] > 0.1
        weights = np.roll(batch.loss_weights, shift, axis=1)
        assert run(replace(batch, loss_weights=weights))["mismatch_abs_mean"] > 0.1


@pytest.mark.parametrize("garbage", [-9999.0, -91.0, 1.0, np.nan, -np.inf, np.inf])
def test_masked_garbage_is_never_read(
    model_cfg, learner_cfg, objective, sequences, pack, replace, host, garbage
):
    objective = replace(objective, kl_coef=0.1, entropy_coef=0.01)
    batch = pack(sequences, PACKED, 24)
    clean = replace(batch, channels={"ref_logprobs": batch.behavior_logprobs})
    masked = batch.loss_weights == 0
    dirty_logprobs = np.where(masked, np.float32(garbage), batch.behavior_logprobs)
    dirty = replace(
        batch,
        behavior_logprobs=dirty_logprobs,
        advantages=np.where(masked, np.float32(garbage), batch.advantages),
        channels={"ref_logprobs": dirty_logprobs},
    )
    want = gradients(model_cfg, learner_cfg, objective, clean, host)
    got = gradients(model_cfg, learner_cfg, objective, dirty, host)
    assert np.isfinite(got[0]) and got[0] == want[0]
    for x, y in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        assert np.isfinite(x).all() and (x == y).all()


def test_trained_garbage_stays_finite(
    model_cfg, learner_cfg, objective, sequences, pack, replace, host
):
    batch = pack(sequences, PACKED, 24)
    awful = np.where(batch.loss_weights != 0, np.float32(-9999), 0)
    loss, grads, metrics = gradients(
        model_cfg, learner_cfg, objective, replace(batch, behavior_logprobs=awful), host
    )
    assert np.isfinite(loss)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert metrics["num_skipped_updates"] == 0


def test_proximal_channel_is_the_anchor(
    model_cfg, learner_cfg, objective, sequences, pack, replace, host
):
    batch = pack(sequences, PACKED, 24)
    other = batch.behavior_logprobs - 0.5
    plain = gradients(
        model_cfg, learner_cfg, objective, replace(batch, behavior_logprobs=other), host
    )
    anchored = gradients(
        model_cfg,
        learner_cfg,
        objective,
        replace(batch, channels={"proximal_logprobs": other}),
        host,
    )
    assert anchored[0] == plain[0]
    assert anchored[2]["mismatch_abs_mean"] != plain[2]["mismatch_abs_mean"]


def test_reference_kl_needs_its_channel(
    model_cfg, learner_cfg, objective, sequences, pack, replace, host
):
    objective = replace(objective, kl_coef=0.1)
    with pytest.raises(ConfigError, match="ref_logprobs"):
        gradients(model_cfg, learner_cfg, objective, pack(sequences, PACKED, 24), host)


def test_zero_lr_keeps_every_bit(model_cfg, learner_cfg, objective, sequences, pack, replace, host):
    cfg = replace(learner_cfg, lr=0.0)
    state = state_lib.init_state(model_cfg, cfg, jax.random.key(1))
    before = host(state.params)
    step = train_step(model_cfg, cfg, objective)
    for _ in range(10):
        state, metrics = step(state, pack(sequences, PACKED, 24))
    assert metrics["grad_norm"] > 0 and int(state.step) == 10
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        assert x.tobytes() == np.asarray(y).tobytes()


def test_non_finite_update_is_skipped_and_counted(
    model_cfg, learner_cfg, objective, sequences, pack, replace, host
):
    state = state_lib.init_state(model_cfg, learner_cfg, jax.random.key(1))
    step = train_step(model_cfg, learner_cfg, objective)
    good = pack(sequences, PACKED, 24)
    state, _ = step(state, good)
    before = host((state.params, state.opt_state.inner))
    bad = replace(good, advantages=np.full_like(good.advantages, np.nan))
    state, metrics = step(state, bad)
    assert metrics["num_skipped_updates"] == 1
    after = host((state.params, state.opt_state.inner))
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert x.tobytes() == y.tobytes()
    state, metrics = step(state, good)
    assert metrics["num_skipped_updates"] == 1 and np.isfinite(metrics["loss"])
    assert int(state.opt_state.num_applied) == 2


def test_policy_learns_what_is_rewarded(model_cfg, learner_cfg, objective, sequences, pack):
    """Positive advantages raise the log-probs of their tokens, negative ones lower them."""
    for s, sign in zip(sequences, (1, -1, 1, -1, 1), strict=True):
        s["advantage"] = float(sign)
    batch = pack(sequences, PACKED, 24)
    params = decoder.init_params(model_cfg, jax.random.key(1))
    score = logprob_step(model_cfg, learner_cfg)
    before = score(params, batch).logprobs
    behavior = np.where(batch.loss_weights != 0, before, 0).astype(np.float32)
    batch = type(batch)(
        **{
            f: getattr(batch, f)
            for f in ("tokens", "segment_ids", "positions", "advantages", "loss_weights")
        },
        temperature=batch.temperature,
        behavior_logprobs=behavior,
    )
    state = state_lib.state_from_params(model_cfg, learner_cfg, params)
    step = train_step(model_cfg, learner_cfg, objective)
    for _ in range(3):
        state, _ = step(state, batch)
    change = np.asarray(score(state.params, batch).logprobs - before)
    for advantage, sign in ((1.0, 1), (-1.0, -1)):
        chosen = (batch.loss_weights != 0) & (batch.advantages == advantage)
        assert sign * change[chosen].mean() > 0.01
    jax.block_until_ready(params)  # the caller's tree was not donated


def test_sft_overfits_and_weights_only_their_tokens(model_cfg, learner_cfg, sequences, pack):
    batch = pack(sequences, PACKED, 24)
    state = state_lib.init_state(model_cfg, learner_cfg, jax.random.key(1))
    step = train_step(model_cfg, learner_cfg, None)
    losses = []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    # tied embeddings of norm 1 make a fresh policy repeat its last token: above log(40)
    assert np.log(40) < losses[0] < 3 * np.log(40)
    assert losses[-1] < 0.5
    assert float(metrics["nll_mean"]) == pytest.approx(losses[-1], rel=1e-5)


def test_bfloat16_agrees_roughly(model_cfg, learner_cfg, objective, sequences, pack, replace, host):
    batch = pack(sequences, PACKED, 24)
    exact = gradients(model_cfg, learner_cfg, objective, batch, host)
    cfg = replace(learner_cfg, compute_dtype="bfloat16")
    rough = gradients(model_cfg, cfg, objective, batch, host)
    assert rough[0] == pytest.approx(exact[0], rel=0.05, abs=0.02)
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(rough[1]))


def test_bad_settings_are_named(model_cfg, learner_cfg, objective, sequences, pack, replace, host):
    with pytest.raises(ConfigError, match=r"learner\.compute_dtype.*known: float32, bfloat16"):
        step_lib.make_score_fn(model_cfg, replace(learner_cfg, compute_dtype="float16"))
    with pytest.raises(ConfigError, match=r"learner\.remat.*known: none, full, attn_out, dots"):
        step_lib.make_score_fn(model_cfg, replace(learner_cfg, remat="some"))
    with pytest.raises(ConfigError, match=r"4 rows cannot be split.*pad"):
        cfg = replace(learner_cfg, micro_rows=3)
        gradients(model_cfg, cfg, objective, pack(sequences, PACKED, 24), host)


def test_shape_checks_are_on(model_cfg):
    """The learner's tests run with jaxtyping + beartype: a wrong shape is an error."""
    from skyrl_jax.rl.losses import ppo_clip_loss

    with pytest.raises(Exception, match="Type-check error"):
        ppo_clip_loss(jnp.zeros((2, 3)), jnp.zeros((3, 2)), clip_low=0.2, clip_high=0.2)


def test_remat_changes_no_gradient(model_cfg, sequences, pack):
    batch = pack(sequences, PACKED[:2], 24)
    where = [jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids)]
    params = decoder.init_params(model_cfg, jax.random.key(1))

    def loss(p, remat):
        return jnp.sum(jnp.sin(decoder.hidden_fn(model_cfg, p, *where, remat=remat)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    want = gradient(params, "none")
    for remat in ("full", "attn_out", "dots"):
        assert_close(gradient(params, remat), want, 1e-6)


def test_remat_keeps_what_it_says(model_cfg, sequences, pack):
    """Numbers per layer and token that the backward pass gets from the forward one."""
    cfg, batch = model_cfg, pack(sequences, PACKED[:2], 24)
    where = [jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids)]
    params = decoder.init_params(cfg, jax.random.key(1))
    saved = {}
    for remat in ("none", "full", "attn_out", "dots"):

        def hidden(p, remat=remat):
            return decoder.hidden_fn(cfg, p, *where, remat=remat)

        # The backward function closes over what was kept; per layer and token are [L, N, ...],
        # or [L, B, T, ...] inside attention.
        kept = jax.tree.leaves(jax.vjp(hidden, params)[1])
        leads = ((cfg.num_layers, batch.tokens.size), (cfg.num_layers, *batch.tokens.shape))
        ours = [x for x in kept if any(x.shape[: len(lead)] == lead for lead in leads)]
        saved[remat] = sum(x.size for x in ours) / (cfg.num_layers * batch.tokens.size)
    d, heads = cfg.hidden_size, cfg.num_heads * cfg.head_dim
    kv, f = cfg.num_kv_heads * cfg.head_dim, cfg.intermediate_size
    assert saved["full"] == d
    assert saved["attn_out"] == d + heads
    # q, k, v, o, gate, up; not down: nothing but the next layer's input needs its result
    assert saved["dots"] == d + heads + 2 * kv + d + 2 * f
    assert saved["none"] > saved["dots"]
