"""One routed layer of Qwen3-30B-A3B, compiled for a TPU that is not here."""

import json
import subprocess
import sys


def test_a_routed_layer_costs_what_its_active_experts_cost(repo_root, child_env):
    """Forward and backward: dense weight gradients alone would be 43 times as much."""
    done = subprocess.run(
        [sys.executable, str(repo_root / "benchmarks" / "moe_flops.py"), "--tokens=2048"],
        env=child_env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    for part in ("forward", "backward"):
        assert 1.0 <= out[part]["ratio"] <= 1.5, out
