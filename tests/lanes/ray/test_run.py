"""The same run over Ray: one RL step whose episodes were played by workers, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.ray.conftest import RESOURCE
from tests.sandbox.hosts import TOKEN, host_process
from tests.train.jobs import command, finish

SMALL = {"train__steps": 1, "tasks__train": 4, "rollout__live_sandboxes": 4}


def play(run: Path, **changes: Any) -> list[dict[str, Any]]:
    """Return the episodes of the first step."""
    env = {"RAY_AUTH_MODE": "disabled", "SKYRL_SANDBOX_TOKEN": TOKEN}
    result = finish(command(run, **SMALL, **changes), timeout_s=500, env=env)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["episodes"], row["failed_episodes"]) == (8, 0)
    lines = (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def untimed(value: Any) -> Any:
    """A value without its timings."""
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key != "timings"}
    return [untimed(item) for item in value] if isinstance(value, list) else value


def tokens(episodes: list[dict[str, Any]]) -> list[str]:
    """What must be equal: everything but times."""
    return sorted(json.dumps(untimed(found), sort_keys=True) for found in episodes)


@pytest.mark.timeout(900)
def test_a_step_over_ray_and_over_hosts_is_the_local_one(cluster: Any, tmp_path: Path) -> None:
    local = play(tmp_path / "local")
    with host_process() as host:
        remote = play(
            tmp_path / "remote", sandbox__backend="remote", sandbox__hosts=f"('{host.url}',)"
        )
    over_ray = play(
        tmp_path / "ray",
        actor__runtime="ray",
        actor__ray_address=cluster.address,
        actor__ray_resource=RESOURCE,
        actor__ray_workers=1,
    )
    assert tokens(remote) == tokens(local)
    assert tokens(over_ray) == tokens(local)
