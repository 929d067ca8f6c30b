"""One routed layer of Qwen3-30B-A3B, compiled for a TPU that is not here."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("mesh", "pieces"), [("", 1), ("expert=4", 4)])
def test_a_routed_layer_costs_what_its_active_experts_cost(repo_root, child_env, mesh, pieces):
    """Forward and backward: dense weight gradients alone would be 43 times as much.

    On one device, and with the experts spread over four: there all devices together.
    """
    script = str(repo_root / "benchmarks" / "moe_flops.py")
    done = subprocess.run(
        [sys.executable, script, "--tokens=2048", f"--mesh={mesh}"],
        env=child_env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["pieces"] == pieces
    for part in ("forward", "backward"):
        assert 1.0 <= out[part]["ratio"] <= 1.5, out
