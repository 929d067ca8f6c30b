"""Eight devices give the numbers of one, on every mesh axis; each holds the part the rules say."""

import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

from skyrl_jax.learner.checkpoint import Checkpoints
from skyrl_jax.learner.state import abstract_state
from skyrl_jax.models.sharding import AXES
from tests.learner.eight_devices import DENSE, LEARNER, MESHES, ROWS, TOKENS

# Which axes (by first letter) share out each leaf, by hand.
SHARED = {
    "embed.embedding": "fte",
    "lm_head.kernel": "fte",
    **dict.fromkeys((f"layers.{name}" for name in ("q", "k", "v", "o")), "fte"),
    **dict.fromkeys((f"layers.{name}" for name in ("gate", "up", "down")), "fte"),
    **dict.fromkeys((f"layers.expert_{name}" for name in ("gate", "up", "down")), "fte"),
    "layers.router": "fe",
}


def test_every_axis_is_above_one_somewhere():
    assert len(MESHES) == 6
    assert {axis for _, axes in MESHES for axis, size in axes.items() if size > 1} == set(AXES)
    assert all(math.prod(axes.values()) == 8 for _, axes in MESHES)


def check_the_real_step_on_eight_devices_equals_one(results):
    """The whole train step, full or LoRA; it takes over the memory of the state it was given."""
    full, lora = results["full"], results["lora"]
    for out in (full, lora):
        assert out["loss"] < 1e-5
        assert out["grads"] < 1e-5
        assert all(error < 1e-5 for error in out["logprobs"])
    assert len(lora["logprobs"]) == 1  # the reference's, by the scoring step
    # The parameters really are spread, and adapters lie like the sides of their weights.
    assert "(None, 'fsdp', 'tensor')" in full["where"]["layers"]["q"]
    assert "('fsdp', 'tensor')" in full["where"]["lm_head"]["kernel"]
    assert "'fsdp'" in lora["where"]["q"]["a"] and "'tensor'" in lora["where"]["q"]["b"]
    assert "'tensor'" in lora["where"]["down"]["a"] and "'fsdp'" in lora["where"]["down"]["b"]


def check_loss_gradients_and_three_sgd_steps_equal_one_device_on_every_mesh(results):
    assert len(results["cases"]) == len(MESHES)
    for case in results["cases"]:
        for what in ("loss", "norm", "grads", "params"):
            assert case[what] <= 1e-5, (case["axes"], what, case[what])


def check_router_figures_are_of_all_devices_tokens(results):
    """Load, balance and entropy are global sums: a mean over devices of E f p would differ."""
    routed = [case for case in results["cases"] if case["family"] == "qwen3_moe"]
    names = ("balance_loss_mean", "router_entropy_mean", "busiest_expert_fraction")
    for case in routed:
        assert case["metrics"]["dropped_assignments_mean"] == 0
        for name in (*names, "expert_load_max"):
            assert case["metrics"][name] == pytest.approx(case["alone"][name], rel=1e-5)
        assert case["metrics"]["balance_loss_mean"] > 1.001  # not even: there is something to find


def check_nothing_is_dropped_when_every_token_wants_the_same_experts(results):
    """All assignments on one device of four, or half each on the first and the last."""
    assert len(results["skewed"]) == 2
    for errors in results["skewed"].values():
        assert errors["value"] <= 1e-5 and errors["grads"] <= 1e-5, results["skewed"]
        assert errors["dropped"] == 0
    assert results["kernel"] <= 1e-5


def check_a_device_holds_the_part_that_the_rules_say(results):
    """Argument bytes of the compiled step: fp32 params, and 7 arrays of 4 bytes a token."""
    for case in results["cases"]:
        axes = {"data": 1, "context": 1, "fsdp": 1, "tensor": 1, "expert": 1} | case["axes"]
        by_letter = {"f": axes["fsdp"], "t": axes["tensor"], "e": axes["expert"]}
        params = sum(
            size / math.prod(by_letter[letter] for letter in SHARED.get(name, ""))
            for name, size in results["sizes"][case["family"]].items()
        )
        rows = ROWS / (axes["data"] * axes["fsdp"] * axes["expert"])
        batch = 7 * rows * TOKENS / axes["context"]
        assert case["bytes"] == 4 * (params + batch), case["axes"]


def check_a_checkpoint_of_eight_devices_restores_on_two_and_on_one(results, folder):
    moved = results["moved"]
    assert moved["devices"] == [2, 1] and moved["equal"] == [True, True]
    # arrays that a reader placed otherwise would be noticed
    assert "layers.down was restored as" in moved["misplaced"]
    # and in a process that has one device and asks for no sharding: this one
    assert jax.device_count() == 1
    with Checkpoints(folder / "from-0", keep=1) as checkpoints:
        found = checkpoints.restore(abstract_state(DENSE, LEARNER))
    assert found.step == 3 and not found.skipped
    leaves = jax.tree_util.tree_leaves_with_path(found.state)
    assert {jax.tree_util.keystr(p): float(np.abs(x).sum(dtype=np.float64)) for p, x in (
        (p, np.asarray(x)) for p, x in leaves)} == moved["sums"]  # fmt: skip


def test_eight_devices_equal_one(child_env, tmp_path):
    """One test of all checks: their process is what costs, and workers would each start one."""
    env = child_env | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.learner.eight_devices", str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    check_the_real_step_on_eight_devices_equals_one(results)
    check_loss_gradients_and_three_sgd_steps_equal_one_device_on_every_mesh(results)
    check_router_figures_are_of_all_devices_tokens(results)
    check_nothing_is_dropped_when_every_token_wants_the_same_experts(results)
    check_a_device_holds_the_part_that_the_rules_say(results)
    check_a_checkpoint_of_eight_devices_restores_on_two_and_on_one(results, tmp_path)
