"""Same (prompt ids, seed, version): same bits, alone or beside any others, in any slot."""

import random

import numpy as np
import pytest

from skyrl_jax.engine.block import Programs
from skyrl_jax.engine.engine import Engine, EngineShape
from tests.engine import tiny


@pytest.fixture(scope="module")
def weights():
    return tiny.params()


@pytest.fixture(scope="module")
def engine(weights):
    return Engine(tiny.CFG, tiny.SHAPE, weights, "1")


def _mixed(count, salt=1):
    """Requests of many lengths, budgets and temperatures (all page counts occur)."""
    draw = np.random.default_rng(salt)
    return [
        tiny.request(
            f"other{i}",
            int(draw.integers(1, 220)),
            seed=int(draw.integers(1 << 62)),
            new=int(draw.integers(1, 30)),
            temperature=float(draw.choice([0.0, 0.6, 1.0, 1.3])),
            salt=salt,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(engine):
    """Each request of the mix, run alone in an otherwise empty engine."""
    return {item.rid: tiny.run(engine, [item])[item.rid] for item in _mixed(40)}


def test_the_policy_is_not_trivial(alone):
    ids = [token for result in alone.values() for token in result.token_ids]
    assert len(set(ids)) > 30
    assert np.std([x for result in alone.values() for x in result.logprobs]) > 0.5


def test_again_alone(engine, alone):
    for item in _mixed(40)[:5]:
        assert tiny.same_bits(tiny.run(engine, [item])[item.rid], alone[item.rid])


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_beside_thirty_others_in_any_order(engine, alone, order, every):
    items = _mixed(40)
    random.Random(order).shuffle(items)
    results = tiny.run(engine, items, every=every)
    wrong = [rid for rid in alone if not tiny.same_bits(results[rid], alone[rid])]
    assert wrong == []


def test_in_every_slot(engine):
    """31 neighbours and the request in turn in each of the 32 slots."""
    item = tiny.request("it", 70, seed=5, new=20)
    wanted = tiny.run(engine, [item])["it"]
    for slot in range(tiny.SHAPE.slots):
        others = [tiny.request(f"n{i}", 3 + 5 * i, seed=i, new=25) for i in range(31)]
        results = tiny.run(engine, [*others[:slot], item, *others[slot:]])
        assert tiny.same_bits(results["it"], wanted), f"slot {slot}"


def test_after_a_fresh_start_and_after_stale_cache(engine, weights):
    item = tiny.request("it", 100, seed=9, new=20)
    used = tiny.run(engine, [item])["it"]
    fresh = tiny.run(Engine(tiny.CFG, tiny.SHAPE, weights, "1"), [item])["it"]
    assert tiny.same_bits(used, fresh)


def test_page_count_does_not_change_bits(engine, weights):
    """A neighbour of 200 tokens makes the block read two pages; alone the request reads one."""
    item = tiny.request("it", 40, seed=3, new=10)
    far = tiny.request("far", 200, seed=4, new=10)
    assert tiny.same_bits(tiny.run(engine, [item])["it"], tiny.run(engine, [far, item])["it"])


def test_other_seed_or_weights_give_other_tokens(engine, weights):
    one = tiny.run(engine, [tiny.request("a", 50, seed=1, new=20)])["a"]
    prompt = tiny.request("a", 50, seed=1, new=20).prompt
    other = tiny.request("b", 50, seed=2, new=20)
    object.__setattr__(other, "prompt", prompt)
    assert tiny.run(engine, [other])["b"].token_ids != one.token_ids
    moved = Engine(tiny.CFG, tiny.SHAPE, tiny.params(seed=1), "2")
    assert tiny.run(moved, [tiny.request("a", 50, seed=1, new=20)])["a"].token_ids != one.token_ids


def test_dispatch_length_does_not_change_bits(weights, alone):
    """decode_steps only says how often the host looks: the draw depends on (seed, position)."""
    shape = EngineShape(
        slots=16, max_context=256, prefill_rows=4, prefill_chunk=16, decode_steps=7, block=16
    )
    results = tiny.run(Engine(tiny.CFG, shape, weights, "1"), _mixed(12))
    wrong = [
        item.rid for item in _mixed(12) if not tiny.same_bits(results[item.rid], alone[item.rid])
    ]
    assert wrong == []


def test_the_engine_checks_its_page_counts_at_start(weights, monkeypatch):
    """All counts are used when they agree; where one differs, only the largest."""
    programs = Programs(tiny.CFG, tiny.SHAPE)
    programs.warm_up(weights)
    assert programs.page_counts == [2, 4]
    honest = programs._probe
    monkeypatch.setattr(
        programs,
        "_probe",
        lambda params, pages: [leaf + (pages == 2) for leaf in honest(params, pages)],
    )
    programs.warm_up(weights)
    assert programs.page_counts == [4]
    assert programs.pages(10) == 4
