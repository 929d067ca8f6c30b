"""Faults that users of other JAX systems hit, and where each is a test here.

ROWS names, for a symptom in our words, the tests that hold it; a row whose test is gone fails. The
tests in this file hold the rows that belong to no room of the house. benchmarks/section_d.py says
which rows of faults.md these are.
"""

import ast
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.swe import get_config
from skyrl_jax.batching.packing import Segment, pack
from skyrl_jax.core.errors import WeightsError
from skyrl_jax.core.types import Batch, Sequence
from skyrl_jax.engine import steps
from skyrl_jax.learner import step as step_lib
from skyrl_jax.models import decoder, hf
from tests.learner.eight_devices import LEARNER, objective
from tests.models import tiny

HERE = "tests/test_faults_d.py"
ROWS = {
    "rope_theta of config.json is dropped": (
        "tests/models/test_families.py::test_packed_rows_equal_the_reference",
        "tests/models/test_hf_read.py::test_another_models_folder_is_refused_though_its_tensors_fit",
    ),
    "eos between turns, equal to the pad id, vanishes from attention and positions": (
        f"{HERE}::test_pad_and_eos_ids_inside_a_sequence_keep_attention_and_positions",
    ),
    "the clip statistic compares a mask with a token id": (
        "tests/rl/test_diagnostics.py::test_by_hand",
    ),
    "every row is padded to the longest prompt and response": (
        "tests/batching/test_packing.py::test_rows_are_nearly_full_on_long_tailed_lengths",
        "tests/batching/test_packing.py::test_pack_with_buckets_shortens_the_rows",
    ),
    "what is trained is the text tokenized again, not what was sampled": (
        "tests/agents/test_loop.py::test_sampled_ids_are_kept_even_when_text_would_encode_otherwise",
        "tests/batching/test_sequences.py::test_every_sampled_token_is_trained_once_or_abandoned",
    ),
    "compile time grows with depth, layers are restacked for scan": (
        f"{HERE}::test_the_program_does_not_grow_with_depth",
        "tests/models/test_families.py::test_leaves_and_shapes_are_those_of_the_family",
    ),
    "logits and entropy exist as [B, T, V]": (
        "tests/rl/test_logprobs.py::test_the_whole_logits_never_exist",
        "tests/rl/test_logprobs.py"
        "::test_a_large_vocabulary_needs_under_an_eighth_of_the_naive_temporaries",
        "tests/rl/test_vocab_parallel.py"
        "::test_the_head_is_never_gathered_and_no_loop_moves_its_size",
    ),
    "weights cross from learner to engine as device arrays": (
        "tests/sync/test_bridge.py::test_a_version_reaches_the_server",
    ),
    "a failed transfer silently keeps the old params": (
        "tests/sync/test_bridge.py"
        "::test_params_that_are_not_what_was_published_stop_before_the_server",
        "tests/sync/test_bridge.py::test_an_echo_of_another_version_is_an_error",
        "tests/weights/test_store.py::test_damage_is_found",
    ),
    "trainer and engine log-probs differ and nobody sees it": (
        "tests/learner/test_step.py::test_on_policy_ratio_is_one_and_a_shift_is_noticed",
        "tests/train/test_policy.py"
        "::test_mismatch_is_over_trained_tokens_and_absent_where_there_are_none",
        "tests/engine/test_engine.py::test_logprobs_equal_the_learners",
    ),
    "a start that waits for ever": (
        "tests/serve/test_child.py::test_a_server_that_ends_at_once_is_quoted",
        "tests/generation/test_generators.py::test_the_gate_has_a_deadline",
    ),
    "tokens do not say which version sampled them": (
        "tests/generation/test_sglang.py::test_spans_become_versions_per_token",
        "tests/generation/test_generators.py::test_a_completion_is_whole",
    ),
    "a backend without log-probs, version or finish reason": (
        "tests/generation/test_generators.py::test_a_completion_is_whole",
        "tests/generation/test_sglang.py::test_fewer_logprobs_than_ids_are_refused",
    ),
    "a vocabulary of 262,208 rows where 262,144 were expected": (
        f"{HERE}::test_a_padded_vocabulary_is_that_of_config_json_or_named",
    ),
    "evaluation runs once per micro-step": (
        "tests/train/test_summary.py::test_a_stored_evaluation_belongs_to_its_step_and_its_plan",
    ),
    "sampler noise enters the ratio of an on-policy update": (
        "tests/learner/test_moe_step.py"
        "::test_on_policy_the_ratio_is_one_and_the_gradient_that_of_the_policy",
    ),
    "the head is not sharded and nothing is recomputed": (
        "tests/models/test_sharding.py"
        "::test_a_large_leaf_that_would_lie_whole_on_every_device_is_named",
        f"{HERE}::test_large_presets_recompute_their_layers",
        "tests/learner/test_step.py::test_remat_keeps_what_it_says",
    ),
    "left padding": ("tests/batching/test_packing.py::test_two_segments_in_a_row_by_hand",),
    "training checkpoints and published weights share a name": (
        "tests/weights/test_store.py::test_other_names_are_left_alone",
    ),
    "trained mixtures cannot be written back": (
        "tests/models/test_hf.py::test_every_family_makes_the_round_trip_bitwise",
        "tests/models/test_hf.py::test_expert_tensors_are_oriented_as_in_hf",
    ),
    "a release of transformers or of a quantizer breaks the reader": (
        f"{HERE}::test_no_library_of_models_or_quantizers_is_imported",
    ),
    "the converter holds the whole model in host memory": (
        "tests/models/test_hf_read.py"
        "::test_eight_devices_get_the_same_and_the_host_holds_little_more_than_their_shards",
    ),
    "params lie whole on a device and nobody looked": (
        "tests/learner/test_sharded.py::test_eight_devices_equal_one",
    ),
    "the restored layout is the saved one, not the one asked for": (
        "tests/learner/test_sharded.py::test_eight_devices_equal_one",
    ),
    "a checkpoint restores on the same number of devices only": (
        "tests/learner/test_sharded.py::test_eight_devices_equal_one",
    ),
    "a mask is longer than its completion": (
        "tests/batching/test_sequences.py::test_fewer_log_probs_than_tokens_never_become_a_completion",
        "tests/batching/test_packing.py::test_what_does_not_belong_is_refused_by_name",
    ),
    "nobody sees what carrying the weights costs": (
        "tests/train/test_run_step.py::test_the_drawn_tasks_are_played_and_remembered",
        "tests/sync/test_bridge.py::test_publish_and_update_are_cheap",
    ),
    "a regression of one kind of task hides in the mean of all": (
        "tests/train/test_summary.py::test_rates_gains_and_parts_of_the_held_out_tasks",
    ),
    "the engine cannot be told to take new weights": (
        "tests/sync/test_bridge.py::test_a_version_reaches_the_server",
        "tests/serve/test_server.py::test_update_weights_and_its_failures",
    ),
    "asking for log-probs breaks the engine in the middle of a run": (
        "tests/sync/test_bridge.py::test_a_failed_probe_rolls_back_and_keeps_the_gate_shut",
        "tests/sync/test_bridge.py::test_a_probe_that_is_nan_fails",
    ),
    "a value that lies on several hosts cannot be read": (
        "tests/learner/test_two_processes.py::test_two_processes_are_one_learner",
    ),
    "joining the shards of one host repeats or loses rows": (
        "tests/learner/test_two_processes.py::test_two_processes_are_one_learner",
    ),
    "long rows do not fit": (
        "tests/models/test_attention.py::test_long_rows_never_hold_all_scores",
        "tests/learner/test_step.py::test_remat_keeps_what_it_says",
        "tests/rl/test_logprobs.py::test_the_whole_logits_never_exist",
        f"{HERE}::test_a_prompt_is_read_without_logits",
    ),
    "a second copy of the weights does not fit while they are carried": (
        "tests/models/test_hf_read.py"
        "::test_eight_devices_get_the_same_and_the_host_holds_little_more_than_their_shards",
    ),
    "writing a large model takes hours and begins again when it fails": (
        "tests/models/test_hf_read.py::test_a_cut_model_has_an_index_that_others_read",
        "tests/models/test_hf_read.py"
        "::test_eight_devices_get_the_same_and_the_host_holds_little_more_than_their_shards",
        "tests/models/test_hf.py::test_failed_write_leaves_the_old_folder",
    ),
    "a whole model is laid out anew at once": (
        "tests/models/test_hf_read.py"
        "::test_eight_devices_get_the_same_and_the_host_holds_little_more_than_their_shards",
        "tests/learner/test_sharded.py::test_eight_devices_equal_one",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_tests(repo_root, row):
    for node in ROWS[row]:
        path, name = node.split("::")
        tree = ast.parse((repo_root / path).read_text())
        made = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in made, node


def test_pad_and_eos_ids_inside_a_sequence_keep_attention_and_positions():
    """Id 0 fills the rows; here it is also the token that ends each turn, and once sampled."""
    ids = np.asarray([5, 6, 0, 7, 0, 8, 9, 0], np.int32)
    mask = np.asarray([0, 0, 1, 0, 0, 1, 1, 1], np.float32)
    members = []
    for number, tokens in enumerate((ids, ids[::-1].copy())):
        sequence = Sequence(
            rollout_id=f"t/{number}",
            token_ids=tokens,
            mask=mask,
            behavior_logprobs=-mask,
            weight_versions=np.zeros(8, np.int32),
            temperature=1.0,
        )
        members.append(Segment(sequence=sequence, weights=mask / 8, advantage=1.0))
    batch = pack(members, row_length=20, micro_rows=1)
    np.testing.assert_array_equal(batch.segment_ids, [[1] * 8 + [2] * 8 + [0] * 4])
    np.testing.assert_array_equal(batch.positions[0, :16], [*range(8), *range(8)])
    np.testing.assert_array_equal(batch.loss_weights[0, :8] > 0, mask > 0)
    np.testing.assert_array_equal(batch.tokens[0, 16:], 0)

    cfg = tiny.config("qwen3")
    params = tiny.params(cfg)
    rows = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids))
    packed = np.asarray(tiny.hidden(cfg, params, *rows))[0, :8]

    def alone(tokens):
        row = jnp.asarray(tokens)[None]
        n = row.shape[1]
        return np.asarray(
            tiny.hidden(cfg, params, row, jnp.arange(n, dtype=jnp.int32)[None], jnp.ones_like(row))
        )[0]

    np.testing.assert_allclose(packed, alone(ids), atol=2e-5)
    # the control: a model that does not see the zeros would say something else
    seen = alone(ids[ids != 0])
    assert np.abs(packed[ids != 0][1:] - seen[1:]).max() > 1e-2


def test_the_program_does_not_grow_with_depth():
    lines = []
    for depth in (2, 7):
        cfg = tiny.config("qwen3", num_layers=depth)
        score = step_lib.make_score_fn(cfg, LEARNER)

        def total(params, batch, score=score):
            return step_lib.policy_loss(objective())(score(params, batch), batch)[0]

        shape = (2, 16)
        ints = {n: np.ones(shape, np.int32) for n in ("tokens", "segment_ids", "positions")}
        names = ("behavior_logprobs", "advantages", "loss_weights", "temperature")
        batch = Batch(**ints, **{n: np.ones(shape, np.float32) for n in names})
        lowered = jax.jit(jax.grad(total)).lower(decoder.abstract_params(cfg), batch)
        lines.append(len(lowered.as_text().splitlines()))
    assert lines[0] == lines[1] > 100


def test_a_padded_vocabulary_is_that_of_config_json_or_named(tmp_path):
    """Shapes come from config.json: rows behind the tokenizer's last id are just never sampled."""
    cfg = tiny.config("qwen3", vocab_size=40)
    params = tiny.params(cfg)
    folder = hf.save_hf(tmp_path / "m", cfg, params)
    loaded_cfg, loaded = hf.load_hf(folder)
    assert loaded_cfg.vocab_size == 40 and loaded["embed"]["embedding"].shape == (40, 20)
    tokens, positions, segments = tiny.rows(tiny.config("qwen3", vocab_size=33), [[9]], 9)
    hidden = tiny.hidden(cfg, params, tokens, positions, segments)
    assert decoder.matmul(hidden[0], decoder.head(cfg, params)).shape == (9, 40)

    path = str(folder / "model.safetensors")
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: np.concatenate([tensors[name], tensors[name][:8]])}, path)
    with pytest.raises(WeightsError, match=rf"'{name}' has shape \[48, 20\].*\[40, 20\]"):
        hf.load_hf(folder)


def test_large_presets_recompute_their_layers():
    for preset in ("qwen3_8b", "qwen3_14b", "qwen3_32b"):
        assert get_config(preset).learner.remat != "none"


def test_no_library_of_models_or_quantizers_is_imported(repo_root):
    wrong = {"transformers", "torch", "qwix", "tunix", "huggingface_hub"}
    for path in (repo_root / "skyrl_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not wrong & {name.split(".")[0] for name in names}, path


def test_a_prompt_is_read_without_logits():
    """Prefill gives hidden states; only the positions that are asked for meet the head."""
    cfg = tiny.config("qwen3", vocab_size=97)
    params = steps.serving_params(cfg, tiny.params(cfg))
    chunk = jnp.zeros((2, 16), jnp.int32)
    ends = jnp.zeros(2, jnp.int32)

    def logits(f, *given):
        return re.findall(r"-> tensor<(?:\d+x)*97xf32>", jax.jit(f).lower(*given).as_text())

    read = functools.partial(steps.prefill, cfg, pages=1)
    assert not logits(read, params, steps.empty_cache(cfg, 2, 32), chunk, ends, ends)
    hidden = jnp.zeros((2, 16, cfg.hidden_size))
    assert logits(steps.score, params, hidden, chunk), "where they are made, they are seen"
