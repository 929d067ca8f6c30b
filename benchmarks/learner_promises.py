"""The learner's promises: families, exactness, sharding, memory, plans, speed, clear refusals."""

from __future__ import annotations

import learner_parts as parts
from checks import Part
from main_job import setup, tests

FAMILIES = (
    "tests/models/test_families.py",
    "tests/models/test_moe.py",
    "tests/models/test_hf_config.py",
    "tests/models/test_hf_read.py",
    "tests/models/test_gguf.py",
    "tests/models/test_hf.py::test_every_family_makes_the_round_trip_bitwise",
    "tests/learner/test_moe_step.py",
    "tests/batching/test_routing.py",
    "tests/engine/test_families.py",
    "tests/train/test_pretrained.py",
    "tests/train/test_wired_runs.py::test_a_run_with_experts_and_a_bfloat16_reference",
    "tests/test_faults_d.py::test_no_library_of_models_or_quantizers_is_imported",
)
PARITY = (
    "tests/models/test_families.py::test_packed_rows_equal_the_reference",
    "tests/models/test_families.py::test_scaled_frequencies_equal_the_release_formula",
    "tests/models/test_families.py::test_long_positions_rotate_by_their_angle",
    "tests/models/test_families.py::test_each_bias_is_used_and_gets_a_gradient",
    "tests/models/test_decoder.py::test_packed_rows_equal_the_reference",
    "tests/models/test_moe.py::test_forward_and_gradient_equal_the_dense_reference",
    "tests/models/test_hf.py::test_every_family_makes_the_round_trip_bitwise",
    "tests/learner/test_step.py::test_segments_do_not_see_each_other",
)
SHARDING = (
    "tests/learner/test_sharded.py",
    "tests/models/test_sharding.py",
    "tests/models/test_attention.py::test_eight_devices_equal_one",
    "tests/rl/test_vocab_parallel.py",
    "tests/train/test_policy_mesh.py",
)
ATTENTION = ("tests/models/test_attention.py",)
MEMORY = (
    "tests/rl/test_logprobs.py",
    "tests/rl/test_vocab_parallel.py",
    "tests/learner/test_memory.py",
    "tests/learner/test_tpu_compile.py",
    "tests/learner/test_step.py::test_split_and_packing_change_nothing",
    "tests/learner/test_step.py::test_remat_changes_no_gradient",
    "tests/learner/test_step.py::test_remat_keeps_what_it_says",
    "tests/learner/test_optimizer.py::test_bfloat16_first_moment",
    "tests/models/test_decoder.py::test_bfloat16_compute_keeps_fp32_masters",
    "tests/models/test_embedding.py::test_gradients_of_a_frequent_token_are_summed_in_fp32",
)
PACKING = (
    "tests/batching/test_packing.py",
    "tests/learner/test_step.py::test_padding_rows_are_free_and_share_the_program",
)
TRAINING = (
    "tests/learner/test_lora.py",
    "tests/learner/test_reference.py",
    "tests/learner/test_optimizer.py",
    "tests/learner/test_flops.py",
    "tests/learner/test_step.py::test_non_finite_update_is_skipped_and_counted",
    "tests/train/test_frozen.py",
    "tests/train/test_policy.py",
    "tests/train/test_tracing.py",
    "tests/train/test_wired_runs.py::test_a_llama_run_and_a_lora_run_with_kl_from_its_weights",
)
HOSTS = (
    "tests/learner/test_two_processes.py",
    "tests/learner/test_distributed.py",
    "tests/learner/test_agreement.py",
    "tests/train/test_together.py",
)
TPU = (
    # splash inside, tensor = 2 once and context = 2 once
    "tests/learner/test_tpu_compile.py::test_the_train_step_of_a_tpu",
    "tests/plan/test_compile.py::test_state_and_transfers_of_two_and_four_layers",
    "tests/learner/test_memory.py::test_offload_takes_8_bytes_a_parameter_off_a_v5e_chip",
    "tests/benchmarks/test_moe_flops.py::test_a_routed_layer_costs_what_its_active_experts_cost",
)
PLAN = (
    "tests/plan/test_compile.py",
    "tests/plan/test_cost.py",
    "tests/plan/test_hlo.py",
    "tests/plan/test_input.py",
    "tests/plan/test_launcher.py",
    "tests/plan/test_search.py",
)
BENCHMARKS = ("tests/benchmarks/test_learner_bench.py", "tests/benchmarks/test_flattened.py")
# Row 42 of section C: a process that is late, in either direction, and never inside a collective.
LATE = (
    "tests/learner/test_two_processes.py::test_two_processes_are_one_learner",
    "tests/learner/test_two_processes.py::test_a_killed_process_ends_the_other_with_its_name",
    "tests/learner/test_agreement.py::test_a_late_process_is_named_and_nobody_goes_on",
    "tests/learner/test_agreement.py::test_process_0_can_be_the_late_one",
)
DROPPED = (
    "tests/learner/test_moe_step.py::test_the_balance_loss_makes_uneven_routers_even",
    "tests/learner/test_moe_step.py::test_balance_loss_by_hand",
    "tests/learner/test_sharded.py::test_eight_devices_equal_one",
)
REFUSED = (
    "tests/models/test_bad_input.py",
    "tests/models/test_hf_read.py::test_wrong_tensors_are_named_with_what_would_be_right",
    "tests/models/test_hf_read.py::test_wrong_files_are_named",
    "tests/models/test_hf_config.py::test_what_is_not_computed_is_named",
    "tests/models/test_attention.py::test_meshes_that_do_not_fit_are_refused",
    "tests/models/test_sharding.py::test_a_mesh_that_cuts_heads_or_experts_is_named",
    "tests/train/test_pretrained.py::test_another_model_is_named_by_the_field_that_differs",
    "tests/train/test_wired_runs.py"
    "::test_a_checkpoint_that_does_not_fit_is_one_line_before_anything_is_opened",
    "tests/plan/test_launcher.py::test_a_mistake_is_one_line_and_exit_code_2",
)
HOUSE = (
    "tests/test_house.py::test_floors_and_wings_hold",
    "tests/test_house.py::test_format",
    "tests/test_house.py::test_lint",
    "tests/test_house.py::test_types",
)
# Each: part, promise, the tests that prove it.
PROVED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("build-1-families", "llama, qwen2, qwen3, qwen3_moe; HF folders, GGUF", FAMILIES),
    ("build-2-parity", "references in fp32, packed = unpacked, HF round trip bitwise", PARITY),
    ("build-3-sharding", "8 devices = 1 on 6 meshes; bytes by the rules; 8 -> 2 -> 1", SHARDING),
    ("build-4-attention", "every form = a plain reference; never T x T; context", ATTENTION),
    ("build-5-memory", "head never whole, remat, bf16, offload, donation, one program", MEMORY),
    ("build-6-packing", "95 % real tokens, fixed shapes, deterministic", PACKING),
    ("build-7-training", "LoRA, frozen reference, optimizer, metrics, profile", TRAINING),
    ("build-8-multi-host", "two processes = one; preempted, killed, late, not shared", HOSTS),
    ("build-9-plan", "plan's arithmetic, its reading of programs, its search", PLAN),
    ("build-10-benchmarks", "turns, medians, environments, one real run of our side", BENCHMARKS),
    ("tpu-compile", "small v5e compiles: splash, tensor > 1, context > 1, offload", TPU),
    ("fault-c42", "faults.md, row 42 of section C: wait on the host, named", LATE),
    ("moe-dropped", "dropped tokens are 0, or counted", DROPPED),
    ("bad-input-tests", "bad folders and meshes are named without a device", REFUSED),
    ("house", "import contracts, ruff, mypy run in make test", HOUSE),
)

PARTS: tuple[Part, ...] = (
    Part(name="setup", promise="a fresh clone sets itself up", run=setup),
    Part(name="tests", promise="make test in 15 min after downloads, 0 skipped", run=tests),
    *(Part(name=name, promise=what, run=parts.proved(*by)) for name, what, by in PROVED),
    Part(
        name="faults-d",
        promise="faults.md, section D: every row names tests, which passed",
        run=parts.faults_of_section_d,
    ),
    Part(
        name="plan-8b-v5e",
        promise="qwen3_8b fits on v5e:4x4, 16 x 2048, remat full: peak <= 9.7 GiB, compiled < 90 s",
        run=parts.plan_fits("qwen3_8b", "v5e:4x4", 16, 2048, peak_gib=9.7),
    ),
    Part(
        name="plan-8b-v5e-too-large",
        promise="qwen3_8b on v5e:2x4, 16 x 4096: exit 1, what is over, by how much, to 10 %",
        run=parts.plan_too_large("qwen3_8b", "v5e:2x4", 16, 4096, larger="v5p:2x2x2"),
    ),
    Part(
        name="plan-8b-v5p",
        promise="qwen3_8b on v5p:2x2x4, 16 x 32768, remat full: peak <= 24.5 GiB, < 90 s",
        run=parts.plan_fits("qwen3_8b", "v5p:2x2x4", 16, 32_768, peak_gib=24.5),
    ),
    Part(
        name="plan-32b-v5p",
        promise="qwen3_32b on v5p:2x4x4, fsdp 16, tensor 2, 16 x 32768: peak <= 44.5 GiB, < 90 s",
        run=parts.plan_fits(
            "qwen3_32b",
            "v5p:2x4x4",
            16,
            32_768,
            peak_gib=44.5,
            mesh="data=1,fsdp=16,tensor=2",
        ),
    ),
    Part(
        name="plan-32b-search",
        promise="qwen3_32b, rows of 40,960: --search finds the smallest v5p in 15 min",
        run=parts.plan_search("qwen3_32b", "v5p", 40_960),
    ),
    Part(
        name="plan-table",
        promise="docs/scaling.md has a row for every preset of a real model, as measured",
        run=parts.plan_table,
    ),
    Part(
        name="load-2gb",
        promise="a 2 GB model loads within its local shards + 300 MB of host memory",
        run=parts.load_memory,
    ),
    Part(
        name="moe-flops",
        promise="a Qwen3-30B-A3B layer on v5e: <= 1.5 x its active experts' FLOPs",
        run=parts.moe_flops,
    ),
    Part(
        name="bench-torch",
        promise="small shape, fp32, default malloc: >= 1.0 x torch + transformers, target 1.3",
        run=parts.bench("torch", at_least=1.0, target=1.3),
    ),
    Part(
        name="bench-tunix",
        promise="small shape, fp32, default malloc: >= 1.6 x tunix, target 2.0",
        run=parts.bench("tunix", at_least=1.6, target=2.0),
    ),
    *(
        Part(
            name=f"bench-{peer}-bf16",
            promise=f"small shape, bf16, against {peer}: reported",
            run=parts.bench(peer, dtype="bfloat16"),
        )
        for peer in ("torch", "tunix")
    ),
    Part(
        name="flattened",
        promise="layers on one axis of tokens cost v5e <= 1 % more: peak, bytes sent, FLOPs",
        run=parts.flattened,
    ),
    Part(
        name="parity-lane",
        promise="make lane-parity: every family against transformers, SmolLM2 says Paris",
        run=parts.parity_lane,
    ),
    Part(
        name="bad-input",
        promise="launchers refuse in one clear line, exit 2, before device memory is taken",
        run=parts.refusals,
    ),
)
