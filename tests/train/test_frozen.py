"""The policy with which RL began: kept bit for bit as KL reference and as the base of LoRA."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.errors import CheckpointError, ConfigError
from skyrl_jax.learner.lora import load_peft
from skyrl_jax.models import hf
from skyrl_jax.train.policy import Policy
from tests.train import tiny

# a schedule too, whose place must be found again
COSINE = {"learner__schedule": "cosine", "learner__decay_steps": 4, "learner__min_lr_fraction": 0.1}
KL = {"objective__kl_coef": 0.5, "learner__lr": 1e-2} | COSINE
LORA = {
    "learner__lora_rank": 2,
    "learner__lora_alpha": 6.0,
    "learner__lora_targets": ("q", "down"),
    "learner__lr": 1e-2,
}


@pytest.mark.parametrize(
    ("changes", "dtype", "at_start"),
    [
        (KL, np.float32, 1e-6),
        # the KL to its own rounding is small, and not nothing
        (KL | {"learner__reference_dtype": "bfloat16"}, jnp.bfloat16, 1e-3),
        (KL | LORA, np.float32, 1e-6),
    ],
    ids=["reference", "bfloat16", "lora"],
)
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, changes, dtype, at_start):
    config = tiny.config(**changes)
    one, two = [tiny.batch(1.0)], [tiny.batch(-1.0, (9, 8, 7, 6))]
    with Policy(config, tmp_path) as policy:
        policy.start_sft()
        policy.sft_update(one[0])
        policy.start_rl()  # the reference is the policy after the warm start
        wanted = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), policy.params)
        kept = tiny.bits(policy.frozen)
        assert kept == tiny.bits(wanted)
        first = policy.update(one)
        policy.save(1, {})
        second = policy.update(two)
        whole = tiny.bits(policy.params)
        assert tiny.bits(policy.frozen) == kept
    assert abs(first["ref_kl_mean"]) < at_start
    assert second["ref_kl_mean"] > max(1e-5, 5 * first["ref_kl_mean"]), "it moved away"
    with Policy(config, tmp_path) as policy:  # as after kill -9
        restored = policy.restore()
        assert restored is not None and restored.step == 1
        assert tiny.bits(policy.frozen) == kept
        again = policy.update(two)
        assert tiny.bits(policy.params) == whole
    assert again["ref_kl_mean"] == second["ref_kl_mean"]
    assert first["lr"] == pytest.approx(1e-2)
    # a quarter of the way down
    assert again["lr"] == pytest.approx(1e-2 * (0.1 + 0.9 * (1 + np.cos(np.pi / 4)) / 2))


def test_a_reference_that_is_gone_is_not_made_again_of_a_policy_that_moved(tmp_path):
    with Policy(tiny.config(**KL), tmp_path) as policy:
        policy.start_rl()
        policy.save(0, {})
    shutil.rmtree(tmp_path / "frozen")
    with Policy(tiny.config(**KL), tmp_path) as policy:
        with pytest.raises(CheckpointError, match=r"frozen does not hold the policy.*kl_coef"):
            policy.restore()
    with Policy(tiny.config(), tmp_path) as policy:  # a run without KL asks for none
        assert policy.restore() is not None
        assert policy.frozen is None


def test_lora_trains_adapters_alone_and_publishes_base_plus_product(tmp_path):
    config = tiny.config(**(KL | LORA))  # as above, so that nothing is compiled again
    with Policy(config, tmp_path / "c") as policy:
        policy.start_rl()
        base = tiny.host(policy.frozen)
        assert tiny.bits(policy.params) == tiny.bits(base), "adapters add nothing yet"
        for advantage in (1.0, -1.0):
            policy.update([tiny.batch(advantage)])
        assert tiny.bits(policy.frozen) == tiny.bits(base)
        adapters, whole = tiny.host(policy.state.params), tiny.host(policy.params)
        policy.export_peft(tmp_path / "peft", tmp_path / "base", extra_config={"eos_token_id": 2})
    assert set(adapters["layers"]) == {"q", "down"}
    for name, pair in adapters["layers"].items():
        assert (pair["b"] != 0).any()
        a, b = (pair[side].astype(np.float64) for side in "ab")
        want = base["layers"][name] + 6.0 / 2 * a @ b
        assert np.abs(want - base["layers"][name]).max() > 1e-4
        np.testing.assert_allclose(whole["layers"][name], want, rtol=0, atol=1e-6)
        whole["layers"][name] = base["layers"][name]
    assert tiny.bits(whole) == tiny.bits(base), "every other leaf is the base's own"
    back, alpha = load_peft(tmp_path / "peft")
    assert alpha == 6.0 and tiny.bits(back) == tiny.bits(adapters)
    named = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(tmp_path / "base")
    assert tiny.bits(hf.load_hf(tmp_path / "base")[1]) == tiny.bits(base)


def test_adapters_that_do_not_fit_are_refused_before_anything_is_made(tmp_path):
    for changes, text in (
        ({"learner__lora_targets": ("q", "router")}, r"learner\.lora_targets.*'router'"),
        ({"learner__lora_rank": 33}, r"learner\.lora_rank: LoRA rank 33.*at most 32"),
    ):
        with pytest.raises(ConfigError, match=text):
            Policy(tiny.config(**(LORA | {"learner__lora_targets": ("k",)} | changes)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_run_exports_no_adapters(tmp_path):
    with Policy(tiny.config(), tmp_path / "c") as policy:
        policy.start_rl()
        policy.export_peft(tmp_path / "peft", tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
