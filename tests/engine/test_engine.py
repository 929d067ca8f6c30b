"""Log-probs against the learner's forward pass, stop rules, sampling, aborts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.engine import steps
from skyrl_jax.engine.engine import Engine, EngineShape
from skyrl_jax.models import decoder
from tests.engine import tiny


@pytest.fixture(scope="module")
def weights():
    return tiny.params()


@pytest.fixture(scope="module")
def engine(weights):
    return Engine(tiny.CFG, tiny.SHAPE, weights, "1")


def learner_logprobs(weights, tokens, temperature):
    """The learner's own forward: hidden_fn and head, rows divided by the temperature."""
    ids = jnp.asarray(tokens)[None]
    positions = jnp.arange(ids.shape[1])[None]
    hidden = decoder.hidden_fn(tiny.CFG, weights, ids, positions, jnp.ones_like(ids))[0]
    logits = decoder.matmul(hidden, decoder.head(tiny.CFG, weights)) / temperature
    logprobs = jax.nn.log_softmax(logits)
    return np.asarray(logprobs[jnp.arange(len(tokens) - 1), ids[0, 1:]])


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 90, 128, 129])
def test_logprobs_equal_the_learners(engine, weights, temperature, length):
    item = tiny.request("r", length, seed=length, new=24, temperature=temperature)
    result = tiny.run(engine, [item])["r"]
    tokens = [*item.prompt.tolist(), *result.token_ids]
    wanted = learner_logprobs(weights, tokens, temperature)[length - 1 :]
    assert len(result.token_ids) == 24
    np.testing.assert_allclose(result.logprobs, wanted, atol=1e-5)


def test_untied_head(weights):
    cfg = tiny.CFG.__class__(
        **{name: getattr(tiny.CFG, name) for name in tiny.CFG.__slots__} | {"tie_embeddings": False}
    )
    params = decoder.init_params(cfg, jax.random.key(3))
    item = tiny.request("r", 20, new=4)
    result = tiny.run(Engine(cfg, tiny.SHAPE, params, "1"), [item])["r"]
    ids = jnp.asarray([*item.prompt.tolist(), *result.token_ids])[None]
    hidden = decoder.hidden_fn(cfg, params, ids, jnp.arange(24)[None], jnp.ones_like(ids))[0]
    logprobs = jax.nn.log_softmax(decoder.matmul(hidden, params["lm_head"]["kernel"]))
    wanted = logprobs[jnp.arange(19, 23), ids[0, 20:]]
    np.testing.assert_allclose(result.logprobs, wanted, atol=1e-5)


def test_prompt_logprobs_ignore_temperature(engine, weights):
    item = tiny.request("r", 50, new=1, temperature=0.5, score_from=0)
    result = tiny.run(engine, [item])["r"]
    assert result.prompt_logprobs[0] is None
    wanted = learner_logprobs(weights, item.prompt, 1.0)
    np.testing.assert_allclose(result.prompt_logprobs[1:], wanted, atol=1e-5)
    later = tiny.run(engine, [tiny.request("r", 50, new=1, score_from=30)])["r"]
    assert later.prompt_logprobs[0] is None
    np.testing.assert_allclose(later.prompt_logprobs[1:], wanted[30:], atol=1e-5)


def test_no_token_wanted(engine):
    result = tiny.run(engine, [tiny.request("r", 33, new=0, score_from=0)])["r"]
    assert result.finish == "length"
    assert result.token_ids == ()
    assert len(result.prompt_logprobs) == 33


def test_greedy_takes_the_best_and_tells_its_logprob_at_one(engine, weights):
    item = tiny.request("r", 30, new=10, temperature=0.0)
    result = tiny.run(engine, [item])["r"]
    tokens = item.prompt.tolist()
    for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
        ids = jnp.asarray(tokens)[None]
        n = len(tokens)
        hidden = decoder.hidden_fn(tiny.CFG, weights, ids, jnp.arange(n)[None], jnp.ones_like(ids))[
            0, -1:
        ]
        row = jax.nn.log_softmax(decoder.matmul(hidden, decoder.head(tiny.CFG, weights)))[0]
        assert token == int(jnp.argmax(row))
        assert logprob == pytest.approx(float(row[token]), abs=1e-5)
        tokens.append(token)


def test_stop_id_ends_the_row_and_is_kept(engine):
    free = tiny.run(engine, [tiny.request("r", 25, seed=2, new=20)])["r"]
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    result = tiny.run(engine, [tiny.request("r", 25, seed=2, new=20, stop_ids=(95, stop))])["r"]
    assert result.finish == "stop"
    assert result.matched == stop
    assert result.token_ids == free.token_ids[: first + 1]
    assert result.logprobs == free.logprobs[: first + 1]


def test_stop_on_the_last_allowed_token_is_a_stop(engine):
    free = tiny.run(engine, [tiny.request("r", 25, seed=2, new=1)])["r"]
    assert free.finish == "length"
    stopped = tiny.request("r", 25, seed=2, new=1, stop_ids=free.token_ids)
    assert tiny.run(engine, [stopped])["r"].finish == "stop"


def test_the_whole_context_can_be_used(engine):
    result = tiny.run(engine, [tiny.request("r", 200, new=56)])["r"]
    assert len(result.token_ids) == 56


def test_abort_keeps_what_was_sampled_and_frees_the_slot(engine):
    for item in (tiny.request("aa1", 20, new=50), tiny.request("b1", 20, seed=1, new=8)):
        engine.admit(item)
    engine.step()
    (aborted,) = engine.abort(lambda rid: rid.startswith("aa"))
    assert aborted.finish == "abort"
    assert 0 < len(aborted.token_ids) < 50
    results = tiny.run(engine, [])
    assert tiny.same_bits(
        results["b1"], tiny.run(engine, [tiny.request("b1", 20, seed=1, new=8)])["b1"]
    )
    assert engine.free_slots == tiny.SHAPE.slots


def test_abort_before_prefill_leaves_no_chunk_behind(engine):
    engine.admit(tiny.request("x", 100, new=5))
    (aborted,) = engine.abort(lambda rid: True)
    assert aborted.token_ids == ()
    item = tiny.request("y", 60, seed=3, new=5)
    first = tiny.run(engine, [item])["y"]
    assert tiny.same_bits(first, tiny.run(engine, [item])["y"])


def test_weights_cannot_change_under_a_running_request(engine, weights):
    engine.admit(tiny.request("x", 10, new=5))
    with pytest.raises(RuntimeError, match="1 requests are running"):
        engine.load(weights, "2")
    with pytest.raises(RuntimeError, match="1 requests are running"):
        engine.flush()
    tiny.run(engine, [])


def test_load_replaces_weights_and_version(weights):
    engine = Engine(tiny.CFG, tiny.SHAPE)
    assert not engine.loaded
    engine.load(weights, "7")
    first = tiny.run(engine, [tiny.request("r", 30)])["r"]
    engine.load(tiny.params(seed=2), "8")
    second = tiny.run(engine, [tiny.request("r", 30)])["r"]
    assert (first.version, second.version) == ("7", "8")
    assert first.logprobs != second.logprobs
    engine.load(weights, "9")
    assert tiny.same_bits(first, tiny.run(engine, [tiny.request("r", 30)])["r"])


def test_nan_of_old_weights_does_not_survive_a_load(weights):
    engine = Engine(tiny.CFG, tiny.SHAPE, jax.tree.map(lambda x: x * jnp.nan, weights), "bad")
    for slot in range(tiny.SHAPE.slots):
        engine.admit(tiny.request(str(slot), 200, new=4))
    tiny.run(engine, [])
    engine.load(weights, "good")
    result = tiny.run(engine, [tiny.request("r", 40, new=8)])["r"]
    assert np.isfinite(result.logprobs).all()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sample_follows_the_softmax(vocab, temperature):
    """200,000 evenly spread draws: each token's share is its probability to a draw's width."""
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal(vocab) * 2).astype(np.float32)
    draws, rows = 200_000, 2000
    one = jax.jit(
        lambda d: steps.sample(
            jnp.tile(logits, (rows, 1)), jnp.full((rows,), temperature, jnp.float32), d
        )
    )
    spread = ((np.arange(draws) + 0.5) / draws).astype(np.float32).reshape(-1, rows)
    tokens, logprobs = (np.concatenate(x) for x in zip(*(one(d) for d in spread), strict=True))
    exact = np.exp(logits.astype(np.float64) / temperature)
    exact /= exact.sum()
    share = np.bincount(tokens, minlength=vocab) / draws
    assert np.abs(share - exact).max() < 3 / draws + 1e-6
    np.testing.assert_allclose(logprobs, np.log(exact)[tokens], atol=2e-6)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1.0 - 2.0**-23])
def test_sample_never_leaves_the_support(draw):
    logits = jnp.full((4, 70), -1e9).at[:, 37].set(3.0)
    token, logprob = steps.sample(logits, jnp.ones(4), jnp.full(4, draw, jnp.float32))
    assert token.tolist() == [37] * 4
    assert logprob.tolist() == [0.0] * 4


def test_uniforms_depend_on_seed_and_position_only():
    seeds = jnp.asarray([[0, 1], [0, 1], [1, 0], [0, 2]], jnp.uint32)
    draws = np.asarray(steps._uniforms(seeds, jnp.asarray([5, 3, 5, 5]), 4))
    np.testing.assert_array_equal(draws[:2, 0], draws[2:, 1])  # position 5, 6 of the same seed
    assert len({*draws[:, 0], *draws[:, 2], *draws[:, 3]}) == 12
    many = steps._uniforms(
        jnp.stack([jnp.zeros(4096, jnp.uint32), jnp.arange(4096, dtype=jnp.uint32)], 1),
        jnp.zeros(4096, jnp.int32),
        1,
    )[0]
    assert 0 <= many.min() and many.max() < 1
    assert abs(float(many.mean()) - 0.5) < 0.02


def test_bad_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.slots must be at least 1"):
        EngineShape(slots=0)
    with pytest.raises(ConfigError, match=r"engine\.prefill_chunk \(48\) must divide 64"):
        EngineShape(prefill_chunk=48)
    with pytest.raises(ConfigError, match=r"engine\.slots \(20\) must be a multiple"):
        EngineShape(slots=20, block=16)
    assert EngineShape(slots=20).block == 20


def test_a_request_that_does_not_fit_takes_no_slot(engine):
    free = engine.free_slots
    with pytest.raises(OverflowError):
        engine.admit(tiny.request("bad", 20, stop_ids=(1 << 40,)))
    assert (engine.free_slots, engine.active) == (free, 0)
    assert tiny.run(engine, [tiny.request("good", 20, new=2)])["good"].finish == "length"


def test_forced_ids_have_the_logprobs_that_the_policy_gives_them(engine, weights):
    """Any ids: what the learner's forward pass says of them, and nothing changes beside them."""
    item, other = (tiny.request(rid, 40, seed=3, new=11, temperature=0.7) for rid in "ab")
    ids = tuple(np.random.default_rng(5).integers(0, tiny.CFG.vocab_size, 11).tolist())
    forced = dataclasses.replace(item, forced=ids)
    alone = tiny.run(engine, [other])["b"]
    found = tiny.run(engine, [forced, other])
    assert found["a"].token_ids == ids and found["a"].finish == "length"
    wanted = learner_logprobs(weights, [*item.prompt.tolist(), *ids], 0.7)[39:]
    np.testing.assert_allclose(found["a"].logprobs, wanted, atol=1e-5)
    assert tiny.same_bits(found["b"], alone)
    # the slot that held the script draws freely afterwards
    assert tiny.same_bits(tiny.run(engine, [other])["b"], alone)


def test_forcing_what_would_be_drawn_changes_no_bit(engine):
    item = tiny.request("r", 33, seed=8, new=13)
    free = tiny.run(engine, [item])["r"]
    whole = tiny.run(engine, [dataclasses.replace(item, forced=free.token_ids)])["r"]
    part = tiny.run(engine, [dataclasses.replace(item, forced=free.token_ids[:6])])["r"]
    assert tiny.same_bits(whole, free) and tiny.same_bits(part, free)


def test_a_forced_stop_id_ends_the_completion(engine):
    item = tiny.request("r", 20, new=12, stop_ids=(9,))
    result = tiny.run(engine, [dataclasses.replace(item, forced=(5, 6, 9, 7))])["r"]
    assert (result.token_ids, result.finish, result.matched) == ((5, 6, 9), "stop", 9)
    short = dataclasses.replace(item, forced=tuple(range(10, 30)), max_new_tokens=3)
    assert tiny.run(engine, [short])["r"].token_ids == (10, 11, 12)
