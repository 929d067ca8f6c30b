"""The step's pure parts: which tasks, which numbers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.core.types import Episode, Score, Status, Task, Trajectory
from skyrl_jax.train.step import episode_metrics, tasks_of_step


def _tasks(count: int) -> list[Task]:
    return [Task(task_id=f"t{i}", prompt="") for i in range(count)]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 3))
def test_no_task_twice_in_a_step_and_every_task_equally_often(total, count, seed):
    tasks = _tasks(total)
    steps = [tasks_of_step(tasks, count, seed, step) for step in range(1, 2 * total + 1)]
    drawn: Counter[str] = Counter()
    for chosen in steps:
        names = [task.task_id for task in chosen]
        assert len(set(names)) == len(names) == min(count, total)
        drawn.update(names)
        assert max(drawn.values()) - min(drawn[t.task_id] for t in tasks) <= 2
    if (2 * total * count) % total == 0 and count <= total:
        assert set(drawn.values()) == {2 * count}


def test_the_tasks_of_a_step_follow_from_seed_and_step_alone():
    tasks = _tasks(10)
    again = [t.task_id for t in tasks_of_step(tasks, 4, 7, 3)]
    assert again == [t.task_id for t in tasks_of_step(tasks, 4, 7, 3)]
    assert again != [t.task_id for t in tasks_of_step(tasks, 4, 8, 3)]


def _trajectory(index: int, value: float | None, reason: str = "submit") -> Trajectory:
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
