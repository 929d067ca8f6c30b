"""benchmarks/sandbox_scale.py in the small: hosts in network namespaces, one killed midway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox.dockerd import REPO

pytestmark = pytest.mark.xdist_group("sandbox")


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_every_episode_ends_once_though_a_host_is_killed(image: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "sandbox_scale.py"), "--hosts=3"]
    command += ["--live=12", "--episodes=48", "--pause=0.3", "--name=skyrlts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["ended_once"], row["live_peak"], row["hosts_down"]) == (48, 12, 1)
    assert 0 < row["host_killed"] < 24 and row["wrong"] == 0 and row["left"] == 0
    assert set(row["failures"]) <= {"infra:host_unreachable", "infra:destroy"}
