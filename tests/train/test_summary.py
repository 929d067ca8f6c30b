"""The summary's numbers, worked by hand on a suite of four tasks."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from configs.swe import get_config
from skyrl_jax.core.config import parse_config
from skyrl_jax.core.types import Task
from skyrl_jax.train.evaluate import EvalPlan, Evaluation, _path, drop, stored, stored_sampled
from skyrl_jax.train.state import HostState
from skyrl_jax.train.summary import summarize
from skyrl_jax.train.workdir import write_json

PLAN = EvalPlan(name="sampled", split="heldout", samples=2, temperature=1.0)


class Suite:
    """Two training tasks and four held-out ones; held-out h2 and h3 are renamed training code."""

    def tasks(self, split: str) -> tuple[Task, ...]:
        """Return a split."""
        bodies = {"train": ["x + 1", "x + 2"], "heldout": ["x + 3", "x + 4", "y + 1", "z + 2"]}
        return tuple(
            Task(
                task_id=f"{split[0]}{i}",
                prompt="",
                payload={
                    "function": f"def f({body[0]}):\n    return {body}\n",
                    "sft": i % 2 == 0,
                },
            )
            for i, body in enumerate(bodies[split])
        )


def _evaluation(**scores: list[float]) -> Evaluation:
    return Evaluation(name="sampled", scores=scores, failed=0)


def test_rates_gains_and_parts_of_the_held_out_tasks():
    before = _evaluation(h0=[0, 0], h1=[1, 0], h2=[0, 0], h3=[0, 0])
    after = _evaluation(h0=[1, 0], h1=[1, 1], h2=[1, 1], h3=[0, 0])
    config = parse_config(get_config("quickstart").to_dict())
    found = summarize(
        config,
        HostState(step=7, failed=1, mismatch_max=2e-7),
        Suite(),
        {"sampled": before},
        {"sampled": after},
        wall_s=60.0,
        sampled={0: before, 5: _evaluation(h0=[1, 0]), 7: after},
    )
    assert found["resolved_curve"] == [[0, 1 / 8], [5, 1 / 2], [7, 5 / 8]]
    assert (found["episodes"], found["tasks"], found["steps"]) == (8, 4, 7)
    assert found["resolved_before"] == 1 / 8
    assert found["resolved_after"] == 5 / 8
    assert found["gain"] == 4 / 8
    assert found["gain_low"] < 4 / 8 < found["gain_high"]
    assert found["resolved_sft_kinds_after"] == 3 / 4  # h0 and h2
    assert found["resolved_new_kinds_after"] == 2 / 4  # h1 and h3
    assert found["tasks_new_bodies"] == 2  # h0 and h1: no training body, whatever its names
    assert found["resolved_new_bodies_after"] == 3 / 4
    assert found["infra_failures"] == 1


def test_a_task_measured_once_only_is_in_no_gain():
    before = _evaluation(h0=[0, 0], h1=[1, 1])
    after = _evaluation(h0=[1, 1])
    config = parse_config(get_config("quickstart").to_dict())
    found = summarize(
        config,
        HostState(),
        Suite(),
        {"sampled": before},
        {"sampled": after},
        wall_s=1.0,
        sampled={},
    )
    assert (found["resolved_before"], found["resolved_after"]) == (0.0, 1.0)


def test_a_stored_evaluation_belongs_to_its_step_and_its_plan(tmp_path):
    made = _evaluation(h0=[1.0])
    write_json(_path(tmp_path, 3, PLAN), asdict(made) | {"plan": asdict(PLAN)})
    assert stored(tmp_path, 3, PLAN) == made
    assert stored(tmp_path, 4, PLAN) is None
    other = EvalPlan(name="sampled", split="heldout", samples=4, temperature=1.0)
    assert stored(tmp_path, 3, other) is None
    assert stored_sampled(tmp_path) == {3: made}
    drop(tmp_path, after=3)  # of a run that goes on after step 3
    assert stored(tmp_path, 3, PLAN) == made
    drop(tmp_path, after=2)
    assert stored(tmp_path, 3, PLAN) is None
    assert stored_sampled(tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"name": "sampled", "scores": [1], "failed": 0, "plan": {}}',
        '{"name": "sampled", "scores": {"h0": "ab"}, "failed": 0, "plan": {}}',
        '{"name": "sampled", "scores": {"h0": []}, "failed": 0, "plan": {}}',
        '{"name": "sampled", "scores": {"h0": [1]}, "failed": "x", "plan": {}}',
        '{"name": "sampled", "scores": {"h0": [1e999]}, "failed": 0, "plan": {}}',
    ],
)
def test_a_damaged_evaluation_was_not_made(tmp_path, content):
    path = _path(tmp_path, 3, PLAN)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    path.with_name("step_last-sampled.json").write_text("of somebody")
    assert stored(tmp_path, 3, PLAN) is None
    assert stored_sampled(tmp_path) == {}
    drop(tmp_path)
    assert [left.name for left in path.parent.iterdir()] == ["step_last-sampled.json"]


def test_an_infrastructure_failure_of_any_evaluation_is_counted_once():
    config = parse_config(get_config("quickstart").to_dict())
    made = {
        name: Evaluation(name=name, scores={"h0": [1.0]}, failed=failed)
        for name, failed in (("sampled", 1), ("greedy", 10))
    }
    middle = Evaluation(name="sampled", scores={"h0": [1.0]}, failed=100)
    sampled = {0: made["sampled"], 5: middle, 7: made["sampled"]}
    found = summarize(config, HostState(), Suite(), made, made, wall_s=1.0, sampled=sampled)
    assert found["infra_failures"] == 1 + 1 + 10 + 10 + 100
