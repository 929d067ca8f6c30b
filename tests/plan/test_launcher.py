"""launchers/plan.py: what it prints, and its exit codes."""

import json
import subprocess
import sys

import pytest

KEYS = {"fits", "peak_bytes", "hbm_bytes", "topology", "mesh", "remat", "step_time_s"}
SMALL = ("--rows=4", "--seq_len=64", "--config.model.num_layers=2")


@pytest.fixture
def plan(repo_root, child_env):
    def run(*flags, preset="quickstart"):
        argv = [sys.executable, "launchers/plan.py", f"--config=configs/swe.py:{preset}", *flags]
        done = subprocess.run(
            argv, cwd=repo_root, env=child_env, capture_output=True, text=True, timeout=200
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "--topology is missing"),
        (("--topology=v9:2x2",), "known: v4:"),
        (("--topology=gpu:4xH100-80GB", "--mesh=fsdp=3"), "does not divide the 4 devices"),
        (("--topology=gpu:4xH100-80GB",), "learner.micro_rows) are spread over 4 devices"),
        (("--topology=gpu:4xH100-80GB", "--rows=6"), "--rows=6"),
        (("--topology=v5p", "--search", "--mesh=fsdp=4"), "leave --mesh out"),
        (("--topology=v5p", "--search", "--limit_s=nan"), "--limit_s=nan: give the search"),
        (("--topology=v5p", "--search", "--limit_s=0"), "--limit_s=0: give the search"),
        (("--topology=gpu:0xH100-80GB",), "e.g. gpu:8xH100-80GB"),
        (("--topology=v5e:2x2", "--rows=1600000000"), "learner.micro_rows = 1600000000 rows"),
        (("--topology=v5e:2x2", "--config.model.vocab_size=100000000000"), "and 2147483647, got"),
        (
            ("--topology=v5p:4x4x4", "--mesh=fsdp=32,context=2", "--rows=32", "--seq_len=64"),
            "wired as 4x4x4): each axis must be a product of whole dimensions of the slice",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(plan, flags, told):
    code, out, err = plan(*flags)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and told in err and len(err.strip().splitlines()) == 1


def test_a_mesh_of_gpus_is_estimated(plan):
    code, out, err = plan("--topology=gpu:2xH100-80GB", *SMALL, "--json")
    assert code == 0, err
    *table, last = out.strip().splitlines()
    result = json.loads(last)
    assert set(result) >= KEYS and result["fits"] and result["estimate"]
    assert result["topology"] == "gpu:2xH100-80GB" and result["mesh"]["fsdp"] == 2
    assert result["remat"] == "none" and result["step_time_s"] > 0
    assert result["hbm_bytes"] == int(0.9 * 80 * 2**30) > result["peak_bytes"] > 0
    text = "\n".join(table)
    for word in ("parameters", "optimizer state", "temporaries", "peak", "HBM available", "fits"):
        assert word in text
    assert "estimate" in text and "all-" in text and "50 % MFU" in text and "tokens/s" in text


def test_nothing_that_fits_is_exit_code_1(plan):
    # 10^12 parameters: no number of these GPUs holds them, and nothing needs to be compiled.
    flags = ("--topology=gpu:H100-80GB", "--search", "--json", *SMALL[:2])
    code, out, err = plan(*flags, "--config.model.intermediate_size=1000000000")
    assert code == 1, err
    *tries, last = out.strip().splitlines()
    assert set(json.loads(last)) >= KEYS and json.loads(last)["fits"] is False
    assert "not tried: needs at least" in tries[0] and "nothing that was tried" in tries[-1]


def test_too_large_for_the_slice_says_by_how_much(plan, tpu_compiler):
    flags = ("--topology=v5e:2x4", "--rows=16", "--seq_len=4096", "--json")
    code, out, err = plan(*flags, preset="qwen3_8b")
    assert code == 1, err
    result = json.loads(out.strip().splitlines()[-1])
    assert not result["fits"] and result["step_time_s"] is None
    held = result["peak_bytes"] + result["reference_bytes"]  # the recipe has a KL term
    assert result["over_bytes"] == held - result["hbm_bytes"] > 0
    assert "does not fit" in out and "GiB too much" in out and "exceeds available HBM" in out
