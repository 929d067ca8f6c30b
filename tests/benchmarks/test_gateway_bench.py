"""The load benchmark at a size that says nothing about speed: it counts, compares and lets go."""

import json
import subprocess
import sys


def test_a_small_load(repo_root, child_env):
    command = [sys.executable, str(repo_root / "benchmarks" / "gateway.py")]
    command += ["--sessions=3", "--turns=2", "--seconds=0", "--think=0", "--prompt_tokens=900"]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert (found["requests"], found["lost"], found["crossed"]) == (6, 0, 0), done.stderr[-2000:]
    assert found["alive"] == 0
    assert found["prompt_tokens"] >= 700
    assert 0 < found["overhead_ms"]["p50"] < 1000
