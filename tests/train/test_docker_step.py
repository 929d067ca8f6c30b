"""The docker backend is the same run: one RL step in containers made from an image built here."""

from __future__ import annotations

import json

import pytest

from skyrl_jax.sandbox.images import base_image
from tests.sandbox.dockerd import build_image, docker_host
from tests.train.jobs import ROOT, command, finish


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("whole_run")
def test_one_rl_step_with_the_docker_backend(tmp_path):
    run = tmp_path / "run"
    with docker_host() as host:
        image = build_image(host, base_image(ROOT / ".cache"))
        argv = command(
            run,
            sandbox__backend="docker",
            sandbox__image=image,
            train__steps=1,
            tasks__train=4,
            rollout__live_sandboxes=4,
        )
        result = finish(argv, timeout_s=500, env={"DOCKER_HOST": host})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["episodes"], row["failed_episodes"]) == (8, 0)
    assert row["trained_tokens"] > 0
    assert 0 < row["mismatch_abs_mean"] < 1e-4
    parts = sum(row[f"{name}_s"] for name in ("wait", "pack", "step", "publish", "checkpoint"))
    assert abs(parts - row["wall_s"]) <= 0.05 * row["wall_s"]
