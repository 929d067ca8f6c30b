"""Whole runs of what the quick start leaves out: families, a start from weights, KL, LoRA."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.train.jobs import command, finish

# From weights that no warm start taught: their answers are noise, so a few short ones do. One layer
# and a short context, since most of the time goes into compiling.
FRESH = {
    "model__num_layers": 1,
    "sft__max_steps": 0,
    "rollout__samples_per_task": 2,
    "rollout__max_prompt_tokens": 100,
    "rollout__max_new_tokens": 12,
    "rollout__max_episode_tokens": 128,
    "rollout__max_turns": 2,
    "learner__row_length": 128,
    "engine__max_context": 128,
    "engine__slots": 4,
    "engine__start_timeout_s": 300.0,
    "train__steps": 2,
}
pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("whole_run")]


def _run(workdir: Path, *extra: str, **overrides: object) -> list[dict]:
    """Run a small job to its end; return its rows of metrics, each one on-policy."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    argv = command(workdir, *extra, **(FRESH | overrides))
    result = finish(argv, env={"XLA_FLAGS": flags})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["mismatch_abs_mean"] < 1e-4 for row in rows), rows
    return rows


def _manifest(workdir: Path, version: int) -> dict:
    return json.loads((workdir / "weights" / f"v{version:06d}" / "manifest.json").read_text())


def test_a_llama_run_and_a_lora_run_with_kl_from_its_weights(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    rows = _run(first, "--profile_steps=2", model__family="llama")
    measured = {"grad_norm", "update_norm", "lr", "num_tokens", "num_trained_tokens"}
    for row in rows:
        measured |= {"learner_tokens_per_s", "publish_gb_per_s"}
        assert all(row[name] > 0 for name in measured)
        assert "mfu" not in row
    traces = [path.relative_to(first / "profile") for path in first.rglob("*.xplane.pb")]
    assert {path.parts[0] for path in traces} == {"step_000002"}

    folder = first / "weights" / "hf" / "v000002"
    rows = _run(
        second,
        model__family="llama",
        model__checkpoint=folder,
        objective__kl_coef=0.01,
        learner__lora_rank=2,
        learner__lr=1e-2,
    )
    last, begun = _manifest(first, 2), _manifest(second, 0)
    assert begun["leaves"] == last["leaves"], "it starts from the very bits"
    assert begun["probe"] == last["probe"], "so its first log-probs are the other's last"
    tokens = [(run / "tokenizer.json").read_bytes() for run in (first, second)]
    assert tokens[0] == tokens[1] == (folder / "tokenizer.json").read_bytes()
    assert 0 <= rows[0]["ref_kl_mean"] < rows[1]["ref_kl_mean"]
    moved = {
        name
        for name, leaf in _manifest(second, 2)["leaves"].items()
        if leaf["bit_sum"] != begun["leaves"][name]["bit_sum"]
    }
    assert moved == {f"layers.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    adapter = json.loads((second / "weights" / "peft" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(folder)
    assert adapter["r"] == 2
    assert not (second / "weights" / "base").exists()


def test_a_run_with_experts_and_a_bfloat16_reference(tmp_path):
    rows = _run(
        tmp_path / "run",
        model__family="qwen3_moe",
        model__num_experts=4,
        model__experts_per_token=2,
        model__moe_intermediate_size=32,
        model__norm_topk_prob=True,
        objective__kl_coef=0.01,
        learner__reference_dtype="bfloat16",
    )
    assert all(0 < row["ref_kl_mean"] < 1e-2 for row in rows)


def test_a_checkpoint_that_does_not_fit_is_one_line_before_anything_is_opened(tmp_path):
    run = tmp_path / "run"
    # a platform that is not there: to look for its devices would be another error
    argv = command(run, model__checkpoint=tmp_path / "none")
    result = finish(argv, env={"JAX_PLATFORMS": "nowhere"})
    assert result.returncode == 2
    assert f"error: model.checkpoint = '{tmp_path / 'none'}'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (run / "tasks.json").exists()
