"""Which tasks a step plays: by hand, and as properties over many steps."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.core.errors import CheckpointError, DataError
from skyrl_jax.core.types import Trajectory, TrajectoryGroup
from skyrl_jax.train.curriculum import REST, Curriculum, Seen, draw, observe
from skyrl_jax.train.state import HostState
from tests.batching.make import group


def play(total, count, fraction, seed, steps, rates):
    """Return [(again, fresh)] of a run whose tasks are resolved at fixed rates (of 4 samples)."""
    state, drawn = Curriculum(), []
    for step in range(1, steps + 1):
        again, fresh, state = draw(state, total, count, fraction, seed, step)
        chosen = [*again, *fresh]
        groups = [group([1.0] * rates[at] + [0.0] * (4 - rates[at])) for at in chosen]
        state = observe(state, chosen, groups, step)
        drawn.append((again, fresh))
    return drawn, state


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 3))
def test_without_revisits_no_task_twice_in_a_step_and_every_task_equally_often(total, count, seed):
    drawn, _ = play(total, count, 0.0, seed, 2 * total, [2] * total)
    played: Counter[int] = Counter()
    for again, fresh in drawn:
        assert again == []
        assert len(set(fresh)) == len(fresh) == min(count, total)
        played.update(fresh)
        assert max(played.values()) - min(played[at] for at in range(total)) <= 2
    if count <= total:
        assert set(played.values()) == {2 * count}


@given(st.integers(8, 40), st.integers(2, 8), st.sampled_from([0.25, 0.5, 1.0]), st.data())
def test_revisits_are_tasks_with_mixed_groups_that_rested(total, count, fraction, data):
    rates = data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))
    drawn, _ = play(total, count, fraction, 0, 30, rates)
    last: dict[int, int] = {}
    for step, (again, fresh) in enumerate(drawn, start=1):
        chosen = [*again, *fresh]
        assert len(set(chosen)) == len(chosen) == count
        assert len(again) <= fraction * count
        assert fresh, "no step without a task whose turn it is"
        for at in again:
            assert 0 < rates[at] < 4
            assert step - last[at] > REST
        last |= dict.fromkeys(chosen, step)


def test_every_task_keeps_its_turn_whatever_is_played_again():
    drawn, _ = play(60, 4, 0.5, 0, 90, [2] * 30 + [0] * 30)
    turns = Counter(at for _, fresh in drawn for at in fresh)
    assert max(turns.values()) - min(turns[at] for at in range(60)) <= 1
    assert sum(len(again) for again, _ in drawn) > 120


def test_the_rate_is_a_running_half_and_failed_members_say_nothing():
    state = observe(Curriculum(), [3], [group([1, 0, 0, 0])], 1)
    assert state.seen == {3: Seen(rate=0.25, step=1)}
    state = observe(state, [3], [group([1, 1, 1, 1])], 5)
    assert state.seen == {3: Seen(rate=0.625, step=5)}
    made = group([1, 0])
    lost = [Trajectory(episode=item.episode, score=None) for item in made.trajectories]
    failed = TrajectoryGroup(task_id="t", trajectories=tuple(lost))
    rested = observe(state, [3], [failed], 9)
    assert rested.seen == {3: Seen(rate=0.625, step=9)}, "a broken task is not played every step"
    assert observe(Curriculum(), [3], [failed], 9).seen == {3: Seen(rate=0.0, step=9)}


def test_worth_weighs_the_draw():
    seen = {0: Seen(rate=0.5, step=0), 1: Seen(rate=0.05, step=0), 2: Seen(rate=0.01, step=0)}
    state = Curriculum(epoch=1, queue=tuple(range(10)), seen=seen)
    first = Counter(
        draw(state, 10, 2, 0.5, seed, step=REST + 1)[0][0] for seed in range(4000)
    )  # P(0 before 1) = 0.25 / (0.25 + 0.0475)
    assert first[0] / 4000 == pytest.approx(0.25 / 0.2975, abs=0.02)
    assert first[2] == 0


def test_it_follows_from_the_state_and_comes_back_from_json():
    _, state = play(30, 4, 0.5, 3, 25, [2] * 30)
    again = Curriculum.from_json(json.loads(json.dumps(state.to_json(), sort_keys=True)))
    assert again == state
    assert draw(again, 30, 4, 0.5, 3, 26) == draw(state, 30, 4, 0.5, 3, 26)
    host = HostState(step=25, curriculum=state)
    assert HostState.from_json(json.loads(json.dumps(host.to_json()))) == host
    with pytest.raises(CheckpointError, match=r"not ours .*'seen'.*new --workdir"):
        HostState.from_json(host.to_json() | {"curriculum": {"epoch": 1, "queue": []}})
    old = {key: value for key, value in host.to_json().items() if key != "curriculum"}
    with pytest.raises(CheckpointError, match=r"'curriculum'.*new --workdir"):
        HostState.from_json(old)
    with pytest.raises(DataError, match="made with 30 training tasks, now there are 29"):
        draw(state, 29, 4, 0.5, 3, 26)


@pytest.mark.parametrize(("count", "fraction", "most"), [(1, 0.75, 0), (2, 0.75, 1), (4, 1.0, 3)])
def test_the_share_is_never_exceeded(count, fraction, most):
    drawn, _ = play(40, count, fraction, 0, 60, [2] * 40)
    assert max(len(again) for again, _ in drawn) == most
