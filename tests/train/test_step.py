"""The step's pure parts: which tasks, which numbers."""

from __future__ import annotations

from skyrl_jax.core.types import Episode, Score, Status, Trajectory, TrajectoryGroup
from skyrl_jax.train.step import episode_metrics, turn_metrics


def _trajectory(
    index: int, value: float | None, reason: str = "submit", **counts: int
) -> Trajectory:
    status = Status.FAILED if value is None else Status.FINISHED
    episode = Episode(
        task_id="t",
        sample_index=index,
        messages=(),
        turns=(),
        status=status,
        reason=reason,
        submission="",
        temperature=1.0,
        counts=counts,
    )
    verdict = "resolved" if value else "unresolved"
    score = None if value is None else Score(value=value, verdict=verdict)
    return Trajectory(episode=episode, score=score)


def test_a_failed_episode_is_counted_and_enters_no_mean():
    found = episode_metrics(
        [_trajectory(0, 1.0), _trajectory(1, 0.0), _trajectory(2, None, "infra:engine")]
    )
    assert found["reward_mean"] == 0.5
    assert found["resolved_rate"] == 0.5
    assert found["failed_episodes"] == 1.0
    assert found["verdict/resolved"] == 0.5


def test_what_happened_at_the_gateway_is_told_per_episode():
    found = episode_metrics(
        [_trajectory(0, 1.0, calls=4, ignored_top_p=4), _trajectory(1, 0.0, calls=2)]
    )
    assert {name: value for name, value in found.items() if name.startswith("gateway/")} == {
        "gateway/calls": 3.0,
        "gateway/ignored_top_p": 2.0,
    }


def test_the_fresh_rate_leaves_out_the_tasks_played_again():
    def group(*values: float | None) -> TrajectoryGroup:
        made = [_trajectory(at, value) for at, value in enumerate(values)]
        return TrajectoryGroup(task_id="t", trajectories=tuple(made))

    groups = [group(1.0, 1.0), group(1.0, 0.0), group(0.0, None)]
    assert turn_metrics(groups, 1) == {"revisited_tasks": 1.0, "resolved_rate_fresh": 1 / 3}
    assert turn_metrics(groups, 3) == {"revisited_tasks": 3.0}
