"""Faults that users of other JAX systems hit, and where each is a test here.

ROWS names, for a thread and its symptom in our words, the tests that hold it; a row whose test is
gone fails. The tests in this file hold the rows that belong to no room of the house.
"""

import ast
import asyncio
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.swe import get_config
from skyrl_jax.batching.packing import Segment, pack
from skyrl_jax.core.errors import GenerationError, WeightsError
from skyrl_jax.core.types import Batch, Sequence
from skyrl_jax.engine import steps
from skyrl_jax.learner import step as step_lib
from skyrl_jax.learner.checkpoint import Checkpoints
from skyrl_jax.models import decoder, hf
from skyrl_jax.sync.bridge import Exported, put_on_server
from skyrl_jax.weights.store import FolderStore
from tests.learner.eight_devices import LEARNER, objective
from tests.models import tiny

HERE = "tests/test_faults_d.py"
LOADS = (
    "tests/models/test_load_memory.py"
    "::test_a_model_loads_within_its_shards_and_100_mb_of_host_memory"
)
# By thread of the field, and at the end the one of section C that is about a learner.
ROWS = {
    "tunix: rope_theta of config.json is dropped": (
        "tests/models/test_families.py::test_packed_rows_equal_the_reference",
        "tests/models/test_hf_read.py::test_another_models_folder_is_refused_though_its_tensors_fit",
    ),
    "tunix: eos between turns, equal to the pad id, vanishes from attention and positions": (
        f"{HERE}::test_pad_and_eos_ids_inside_a_sequence_keep_attention_and_positions",
    ),
    "tunix: the clip statistic compares a mask with a token id": (
        "tests/rl/test_diagnostics.py::test_by_hand",
    ),
    "tunix: every row is padded to the longest prompt and response": (
        "tests/batching/test_packing.py::test_rows_are_nearly_full_on_long_tailed_lengths",
        "tests/batching/test_packing.py::test_pack_with_buckets_shortens_the_rows",
    ),
    "tunix: what is trained is the text tokenized again, not what was sampled": (
        "tests/agents/test_loop.py::test_sampled_ids_are_kept_even_when_text_would_encode_otherwise",
        "tests/batching/test_sequences.py::test_every_sampled_token_is_trained_once_or_abandoned",
    ),
    "tunix, SkyRL#1079: compile time grows with depth, layers are restacked for scan": (
        f"{HERE}::test_the_program_does_not_grow_with_depth",
        "tests/models/test_families.py::test_leaves_and_shapes_are_those_of_the_family",
    ),
    "tunix: logits and entropy exist as [B, T, V]": (
        "tests/rl/test_logprobs.py::test_the_whole_logits_never_exist",
        "tests/rl/test_logprobs.py"
        "::test_a_large_vocabulary_needs_under_an_eighth_of_the_naive_temporaries",
        "tests/rl/test_vocab_parallel.py"
        "::test_the_head_is_never_gathered_and_no_loop_moves_its_size",
    ),
    "marin#3947: weights cross from learner to engine as device arrays": (
        "tests/sync/test_bridge.py::test_a_version_reaches_the_server",
        "tests/test_house.py::test_floors_and_wings_hold",
    ),
    "marin#1747: copying weights takes long, and nobody knows how long": (
        "tests/train/test_run_step.py::test_the_drawn_tasks_are_played_and_remembered",
        "tests/train/test_wired_runs.py::test_a_llama_run_and_a_lora_run_with_kl_from_its_weights",
        "tests/sync/test_bridge.py::test_publish_and_update_are_cheap",
    ),
    "marin#1652: a failed transfer silently keeps the old params": (
        "tests/sync/test_bridge.py"
        "::test_params_that_are_not_what_was_published_stop_before_the_server",
        "tests/sync/test_bridge.py::test_an_echo_of_another_version_is_an_error",
        "tests/sync/test_bridge.py::test_an_update_past_its_deadline_is_the_engines_failure",
        "tests/weights/test_store.py::test_damage_is_found",
    ),
    "marin#1879: trainer and engine log-probs differ and nobody sees it": (
        "tests/learner/test_step.py::test_on_policy_ratio_is_one_and_a_shift_is_noticed",
        "tests/train/test_policy.py"
        "::test_mismatch_is_over_trained_tokens_and_absent_where_there_are_none",
        "tests/engine/test_engine.py::test_logprobs_equal_the_learners",
    ),
    "marin#2350: a start that waits for ever": (
        "tests/serve/test_child.py::test_a_server_that_ends_at_once_is_quoted",
        "tests/generation/test_generators.py::test_the_gate_has_a_deadline",
        "tests/learner/test_two_processes.py::test_a_process_that_never_starts_is_named",
        "tests/learner/test_waiting.py"
        "::test_a_coordinator_that_does_not_answer_is_told_while_jax_waits",
    ),
    "marin#1745: tokens do not say which version sampled them": (
        "tests/generation/test_sglang.py::test_spans_become_versions_per_token",
        "tests/generation/test_generators.py::test_a_completion_is_whole",
        "tests/sync/test_bridge.py"
        "::test_requests_in_flight_are_aborted_and_the_next_use_the_new_version",
    ),
    "marin#1808: one kind of task gets worse and the mean hides it": (
        "tests/train/test_summary.py::test_rates_gains_and_parts_of_the_held_out_tasks",
    ),
    "sglang-jax#873: a server without the call that updates its weights": (
        "tests/generation/test_sglang.py::test_a_refused_update_is_an_error",
        "tests/generation/test_sglang.py::test_old_endpoint_names_are_tried_on_404",
    ),
    "sglang-jax#1261: log-probs crash the server in the middle of a run": (
        "tests/sync/test_bridge.py::test_a_failed_probe_rolls_back_and_keeps_the_gate_shut",
        f"{HERE}::test_a_server_gives_its_log_probs_before_its_gate_opens",
    ),
    "sglang-jax#1400, tpu-inference#3573: arrays spread over hosts are read by one": (
        "tests/learner/test_two_processes.py::test_two_processes_are_one_learner",
    ),
    "tpu-inference#3579: shards joined by hand repeat rows": (
        "tests/learner/test_two_processes.py::test_two_processes_are_one_learner",
    ),
    "tunix#1651: a vocabulary of 262,208 rows where 262,144 were expected": (
        f"{HERE}::test_a_padded_vocabulary_is_that_of_config_json_or_named",
    ),
    "tunix#1523: evaluation runs once per micro-step": (
        "tests/train/test_measured_once.py::test_a_step_is_measured_once_and_only_where_it_is_due",
    ),
    "tunix#2061: sampler noise enters the ratio of an on-policy update": (
        "tests/learner/test_moe_step.py"
        "::test_on_policy_the_ratio_is_one_and_the_gradient_that_of_the_policy",
    ),
    "tunix#131: a backend without log-probs, version or finish reason": (
        "tests/generation/test_generators.py::test_a_completion_is_whole",
        "tests/generation/test_sglang.py::test_fewer_logprobs_than_ids_are_refused",
        "tests/generation/test_sglang.py::test_unknown_finish_is_refused",
    ),
    "SkyRL#592: the head is not sharded and nothing is recomputed": (
        "tests/models/test_sharding.py"
        "::test_a_large_leaf_that_would_lie_whole_on_every_device_is_named",
        f"{HERE}::test_large_presets_recompute_their_layers",
        "tests/learner/test_step.py::test_remat_keeps_what_it_says",
    ),
    "SkyRL#891: long rows need memory that grows with their square": (
        "tests/models/test_attention.py::test_long_rows_never_hold_all_scores",
        f"{HERE}::test_a_prompt_is_read_without_logits",
        "tests/rl/test_logprobs.py"
        "::test_a_large_vocabulary_needs_under_an_eighth_of_the_naive_temporaries",
        "tests/learner/test_step.py::test_remat_keeps_what_it_says",
        f"{HERE}::test_large_presets_recompute_their_layers",
    ),
    "SkyRL#927: left padding": (f"{HERE}::test_padding_is_behind_and_nowhere_else",),
    "SkyRL#591: training checkpoints and published weights share a name": (
        f"{HERE}::test_a_checkpoint_and_a_weight_version_of_one_number_live_side_by_side",
    ),
    "SkyRL#1623, #2065: weights come while the engine works, or all at once": (
        f"{HERE}::test_a_server_gives_its_log_probs_before_its_gate_opens",
        "tests/models/test_hf_read.py"
        "::test_eight_devices_get_the_same_and_the_host_holds_little_more_than_their_shards",
        "tests/engine/test_engine.py::test_weights_cannot_change_under_a_running_request",
    ),
    "maxtext#3231: trained mixtures cannot be written back": (
        "tests/models/test_hf.py::test_every_family_makes_the_round_trip_bitwise",
        "tests/models/test_hf.py::test_expert_tensors_are_oriented_as_in_hf",
    ),
    "maxtext#3868, sglang-jax#712: a release of a model or quantizer library breaks the reader": (
        f"{HERE}::test_no_library_of_models_or_quantizers_is_imported",
    ),
    "maxtext#2596, levanter#506: the converter holds the whole model in host memory": (
        "tests/models/test_hf_read.py"
        "::test_eight_devices_get_the_same_and_the_host_holds_little_more_than_their_shards",
        LOADS,
    ),
    "maxtext#3742: placing the model anew needs all of it once more": (
        LOADS,
        "tests/learner/test_sharded.py::test_eight_devices_equal_one",
    ),
    "maxtext#2784: params lie whole on a device and nobody looked": (
        "tests/learner/test_sharded.py::test_eight_devices_equal_one",
        "tests/train/test_policy_mesh.py"
        "::test_a_run_on_four_devices_restarts_with_the_same_bits_in_the_same_places",
    ),
    "flax#5110: the restored layout is the saved one, not the one asked for": (
        "tests/learner/test_sharded.py::test_eight_devices_equal_one",
    ),
    "orbax#648: a checkpoint restores on the same number of devices only": (
        "tests/learner/test_sharded.py::test_eight_devices_equal_one",
    ),
    "trl#5144: a mask is longer than its completion": (
        "tests/batching/test_sequences.py::test_fewer_log_probs_than_tokens_never_become_a_completion",
        "tests/batching/test_packing.py::test_what_does_not_belong_is_refused_by_name",
    ),
    "C42, marin#7039: processes wait for each other inside a collective": (
        "tests/learner/test_two_processes.py::test_two_processes_are_one_learner",
        "tests/learner/test_agreement.py::test_a_late_process_is_named_and_nobody_goes_on",
        "tests/learner/test_agreement.py"
        "::test_the_verdict_is_the_same_for_all_however_close_it_was",
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


def test_padding_is_behind_and_nowhere_else():
    """Rows begin at their first token, and more room behind changes no number."""
    rng = np.random.default_rng(3)
    segments = []
    for number, length in enumerate((5, 11, 3, 7)):
        mask = np.asarray([0] * 2 + [1] * (length - 2), np.float32)
        sequence = Sequence(
            rollout_id=f"t/{number}",
            token_ids=rng.integers(1, 37, length).astype(np.int32),
            mask=mask,
            behavior_logprobs=-mask,
            weight_versions=np.zeros(length, np.int32),
            temperature=1.0,
        )
        segments.append(Segment(sequence=sequence, weights=mask, advantage=1.0))
    cfg = tiny.config("qwen3")
    found = []
    for row_length in (14, 24):
        batch = pack(segments, row_length=row_length, micro_rows=1)
        used = batch.segment_ids != 0
        behind = np.arange(row_length) >= used.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(used, ~behind)
        assert (batch.positions[:, 0] == 0).all() and not batch.loss_weights[behind].any()
        rows = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids))
        hidden = np.asarray(tiny.hidden(cfg, tiny.params(cfg), *rows))
        by_tokens = {}  # of each sequence, wherever it lies
        for row in range(len(batch.tokens)):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                own = batch.segment_ids[row] == segment
                by_tokens[tuple(batch.tokens[row, own])] = hidden[row, own]
        found.append(by_tokens)
    assert len(found[0]) == 4 and set(found[0]) == set(found[1])
    for tokens, hidden in found[0].items():
        np.testing.assert_allclose(hidden, found[1][tokens], atol=2e-5)


def test_a_checkpoint_and_a_weight_version_of_one_number_live_side_by_side(tmp_path):
    """In one folder, which no run does: neither takes, keeps or removes what is the other's."""

    def write(folder):
        folder.mkdir()
        (folder / "params").write_text("served")

    store = FolderStore(tmp_path, keep=1)
    for number in (3, 4):
        state = {"params": jnp.full(3, float(number))}
        version = store.publish(number, write, {})
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            checkpoints.save(number, state, {"cursor": number})
        assert store.latest() == version and not store.sweep()
        store.manifest(version)  # each of its files is what was published
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000004", "v000004"]
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        found = checkpoints.restore({"params": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert (found.step, found.host, found.skipped) == (4, {"cursor": 4}, ())
    np.testing.assert_array_equal(found.state["params"], [4.0] * 3)
    assert (version.path / "orbax" / "params").read_text() == "served"


class Server:
    """Writes down what the bridge asks for; its log-probs can be missing."""

    base_url = "http://recorded"

    def __init__(self, logprobs):
        self.calls, self.logprobs = [], logprobs

    def close_gate(self):
        self.calls.append("close_gate")

    def open_gate(self):
        self.calls.append("open_gate")

    async def pause(self):
        self.calls.append("pause")

    async def flush(self):
        self.calls.append("flush")

    async def update_weights(self, folder, number):
        self.calls.append(f"update_weights {number}")

    async def model_info(self):
        self.calls.append("model_info")
        return {"weight_version": "7"}

    async def resume(self):
        self.calls.append("resume")

    async def prompt_logprobs(self, ids):
        self.calls.append("prompt_logprobs")
        if self.logprobs is None:
            raise GenerationError("no log-probs with dp_size 2", cause="engine_http")
        return self.logprobs


def test_a_server_gives_its_log_probs_before_its_gate_opens():
    """Weights come when it has nothing to do, paused and flushed; then it must prove them."""
    probe = {"input_ids": [1, 2], "logprobs": [-0.5], "tolerance": 1e-3}
    exported = Exported(number=7, folder=Path("v7"), probe=probe)
    server = Server([-0.5])
    asyncio.run(put_on_server(server, exported))
    order = ["close_gate", "pause", "flush", "update_weights 7", "model_info", "resume"]
    assert server.calls == [*order, "prompt_logprobs"]
    for logprobs, told in ((None, "no log-probs with dp_size 2"), ([-0.6], "off by 0.1")):
        server = Server(logprobs)
        with pytest.raises(GenerationError, match=told):
            asyncio.run(put_on_server(server, exported))
        assert "open_gate" not in server.calls


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
