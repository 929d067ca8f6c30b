"""The whole job is exact: multi-turn, packed, at temperature 0.6; and lr 0 moves nothing."""

from __future__ import annotations

import json

import pytest

from tests.train.jobs import command, finish


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("whole_run")
def test_zero_lr_job_at_temperature_0_6_keeps_every_bit_and_agrees_with_the_engine(tmp_path):
    run = tmp_path / "run"
    result = finish(
        command(
            run,
            learner__lr=0.0,
            rollout__temperature=0.6,
            train__steps=10,
            train__checkpoint_every=10,
            train__keep_weight_versions=20,
        )
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert all(0 < row["mismatch_abs_mean"] < 1e-4 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert max(row["turns_mean"] for row in rows) > 1
    for row in rows:
        parts = sum(row[f"{name}_s"] for name in ("wait", "pack", "step", "publish", "checkpoint"))
        assert abs(parts - row["wall_s"]) <= 0.05 * row["wall_s"]
    sums = [
        {name: leaf["bit_sum"] for name, leaf in _manifest(run, version)["leaves"].items()}
        for version in range(11)
    ]
    assert all(later == sums[0] for later in sums[1:])


def _manifest(run, version: int) -> dict:
    return json.loads((run / "weights" / f"v{version:06d}" / "manifest.json").read_text())
