"""A run that its time limit stops has saved what it trained, and goes on where it stopped."""

from __future__ import annotations

import json

import pytest

from tests.train.jobs import command, finish


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("whole_run")
def test_time_limit_saves_the_policy_between_two_checkpoints(tmp_path):
    run = tmp_path / "run"
    extra = {"train__steps": 900, "train__checkpoint_every": 900}
    first = finish(command(run, train__time_limit_s=0.001, **extra))
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    assert "time limit" in first.stdout
    assert "chat template: tool ok, think_tool ok" in first.stdout  # checked at every start
    assert "no RL step was made" in first.stdout  # and not "gain 0.0", as if one had been
    assert "No RL step was made" in (run / "report.html").read_text()
    assert _steps(run) == 0
    # A limit that is over after some steps: the clock of the run counts all its processes.
    spent = json.loads((run / "summary.json").read_text())["wall_s"]
    second = finish(command(run, train__time_limit_s=spent + 30, **extra))
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    reached = _steps(run)
    # Time counts over all starts, also what came after the last checkpoint; its parts add up to it.
    clock = json.loads((run / "clock.json").read_text())
    assert spent < clock["wall_s"] < spent + 30 + 120
    assert abs(sum(clock["seconds"].values()) - clock["wall_s"]) < 0.2 * clock["wall_s"]
    assert 0 < reached < 900
    assert (run / "checkpoints" / f"{reached:06d}").is_dir()


def _steps(run) -> int:
    return json.loads((run / "summary.json").read_text())["steps"]
