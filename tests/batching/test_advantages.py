"""Group statistics by hand: over rollouts, without failed ones and empty answers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.batching.advantages import group_advantages, permute_rewards, was_cut, zero_cut
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Status, TrajectoryGroup
from tests.batching.make import episode, group, trajectory, turn


def values(made, kind="grpo", **options):
    return list(group_advantages(made, kind, **options).values())


def test_grpo_by_hand() -> None:
    assert values(group([1, 0, 0, 1])) == [0.5, -0.5, -0.5, 0.5]
    assert values(group([1, 0, 0, 0])) == [0.75, -0.25, -0.25, -0.25]


def test_grpo_over_the_standard_deviation() -> None:
    # mean 0.25, sample variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25, std 0.5
    made = values(group([1, 0, 0, 0]), normalize_std=True)
    assert made == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_rloo_is_leave_one_out() -> None:
    rewards = [1.0, 0.0, 0.5, 0.0]
    by_hand = [
        r - sum(x for j, x in enumerate(rewards) if j != i) / 3 for i, r in enumerate(rewards)
    ]
    assert values(group(rewards), "rloo") == pytest.approx(by_hand)


def test_equal_rewards_give_exactly_zero() -> None:
    assert values(group([0.1] * 7), normalize_std=True) == [0.0] * 7
    assert values(group([1.0]), "rloo") == [0.0]


def test_failed_rollouts_leave_the_statistics() -> None:
    """Faults C21: 8 rollouts, 2 infra: statistics over 6."""
    made = group_advantages(group([1, None, 1, 1, 0, None, 0, 0]), "grpo")
    assert sorted(made) == ["t/0", "t/2", "t/3", "t/4", "t/6", "t/7"]
    assert [made[f"t/{i}"] for i in (0, 2, 3, 4, 6, 7)] == [0.5, 0.5, 0.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize(("rewards", "empty"), [((10, 0), 0), ((100, 1), 0)])
def test_an_empty_answer_neither_gets_nor_moves_an_advantage(rewards, empty) -> None:
    """Faults C19 and C20: -49.5 in the field."""
    members = [
        trajectory(r, turn([1], [] if i == empty else [2, 3]), index=i)
        for i, r in enumerate(rewards)
    ]
    made = group_advantages(TrajectoryGroup(task_id="t", trajectories=tuple(members)), "grpo")
    assert made == {"t/1": 0.0}


def test_a_group_without_members_has_no_advantages() -> None:
    assert group_advantages(group([None, None]), "grpo") == {}


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ConfigError, match=r"objective\.advantage is 'gae'"):
        group_advantages(group([1, 0]), "gae")


@given(
    st.lists(st.floats(0, 1) | st.none(), min_size=2, max_size=9), st.sampled_from(["grpo", "rloo"])
)
def test_advantages_of_a_group_sum_to_zero(rewards, kind) -> None:
    for normalize in (False, True):
        made = values(group(rewards), kind, normalize_std=normalize)
        assert math.fsum(made) == pytest.approx(0.0, abs=1e-9)
        assert len(made) == sum(r is not None for r in rewards)


def test_the_control_shuffles_rewards_over_the_whole_batch() -> None:
    groups = [group([1] * 4, "a"), group([0] * 4, "b"), group([None, 0.5], "c")]
    shuffled = permute_rewards(groups, seed=0)
    assert shuffled == permute_rewards(groups, seed=0) != permute_rewards(groups, seed=1)
    before = [t.score.value for g in groups for t in g.trajectories if t.score]
    after = [t.score.value for g in shuffled for t in g.trajectories if t.score]
    assert sorted(before) == sorted(after) and before != after
    assert len({t.score.value for t in shuffled[0].trajectories}) > 1, "stays within the groups"
    assert shuffled[2].trajectories[0].score is None
    verdicts = [[t.score.verdict for t in g.trajectories if t.score] for g in shuffled]
    assert verdicts[0] == ["resolved"] * 4  # what was resolved stays true


def test_masked_reasons() -> None:
    def ended(reason, status=Status.TRUNCATED):
        return episode(status=status, reason=reason)

    assert was_cut(ended("turns"), ["turns", "agent"])
    assert was_cut(ended("agent:gone"), ["agent"])
    assert not was_cut(ended("time"), ["turns"])
    assert not was_cut(ended("submit", Status.FINISHED), ["submit"])


def test_a_cut_repair_earns_nothing_in_training_and_stays_resolved() -> None:
    members = [
        trajectory(1, index=0),
        trajectory(1, index=1, status=Status.TRUNCATED, reason="turns"),
        trajectory(1, index=2, status=Status.TRUNCATED, reason="time"),
        trajectory(-1, index=3, status=Status.TRUNCATED, reason="turns"),
        trajectory(None, index=4),
    ]
    (made,) = zero_cut([TrajectoryGroup(task_id="t", trajectories=tuple(members))], ("turns",))
    assert [t.score and t.score.value for t in made.trajectories] == [1, 0, 1, -1, None]
    assert made.trajectories[1].score.verdict == "resolved"
