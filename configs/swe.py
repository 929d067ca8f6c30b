"""SWE agents: repair bugs in git repositories by multi-turn tool use.

Command    python launchers/train.py --config=configs/swe.py[:PRESET] [--config.learner.lr=3e-6 ...]

PRESET          hardware                       what it is
quickstart      2 CPU cores, 20 minutes        tiny policy from scratch, synthetic repos, bwrap
smollm2_135m    2 CPU cores, hours             SmolLM2-135M's shape; no run was made yet
qwen3_8b        v5p:2x2x4 or v6e:4x4           SkyRL-v0 8B recipe (no thinking), rows of 32,768
qwen3_14b       v5p:2x2x4                      SkyRL-v0 14B recipe, rows of 34,816
qwen3_32b       v5p:2x4x4                      SA-SWE-32B recipe, rows of 40,960 tokens

The chips are those that launchers/plan.py finds room on (docs/scaling.md; GPUs: an estimate there).

This version trains the quick start. smollm2_135m starts from fresh weights; the three recipes are
checked and refused: their tasks (rows with docker images) and their tokenizers are not built yet.
Without PRESET: quickstart, on accelerators too; the choice is printed.
Expected of quickstart: see README.md (measured curve, interval and time).
"""

import glob

from ml_collections import ConfigDict

# Device nodes of NVIDIA GPUs and of TPUs (PCI and vfio); asking jax here would grab the device.
_ACCELERATOR_NODES = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


def get_config(preset: str = "") -> ConfigDict:
    """Return the configuration of a preset."""
    if not preset:
        found = any(glob.glob(pattern) for pattern in _ACCELERATOR_NODES)
        preset = "quickstart"
        # No preset for accelerators can be trained yet (train/trainable.py): none is the default.
        why = (
            "an accelerator was found; its presets are not trained by this version"
            if found
            else ("no accelerator was found")
        )
        print(f"configs/swe.py: preset {preset} ({why})", flush=True)
    presets = {
        "quickstart": _quickstart,
        "smollm2_135m": _smollm2_135m,
        "qwen3_8b": _qwen3_8b,
        "qwen3_14b": _qwen3_14b,
        "qwen3_32b": _qwen3_32b,
    }
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}; known: {', '.join(presets)}")
    return presets[preset]()


def _quickstart() -> ConfigDict:
    c = ConfigDict()
    c.name = "swe-quickstart"
    c.seed = 0

    _tiny_policy(c)
    _tiny_objective(c)
    _tiny_episodes(c)
    _tiny_run(c)
    return c


def _tiny_policy(c: ConfigDict) -> None:
    """Set the policy of the quick start and how it learns."""
    c.model = ConfigDict()
    c.model.family = "qwen3"
    c.model.vocab_size = 512
    c.model.hidden_size = 96
    c.model.num_layers = 3
    c.model.num_heads = 3
    c.model.num_kv_heads = 1
    c.model.head_dim = 32
    c.model.intermediate_size = 192
    c.model.rope_theta = 10_000.0
    c.model.rms_norm_eps = 1e-6
    c.model.tie_embeddings = True
    c.model.max_position = 512
    c.model.checkpoint = ""  # from scratch
    c.model.rope_factor = 1.0  # no rope scaling
    c.model.rope_low_freq_factor = 1.0
    c.model.rope_high_freq_factor = 4.0
    c.model.rope_original_position = 0
    c.model.num_experts = 0  # dense
    c.model.experts_per_token = 0
    c.model.moe_intermediate_size = 0
    c.model.norm_topk_prob = False

    c.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1, context=1, expert=1))

    c.learner = ConfigDict()
    c.learner.lr = 4.5e-5
    c.learner.schedule = "constant"
    c.learner.warmup_steps = 0
    c.learner.decay_steps = 0  # read by "cosine" alone
    c.learner.min_lr_fraction = 0.1
    c.learner.weight_decay = 0.0
    c.learner.beta1 = 0.9
    c.learner.beta2 = 0.95
    c.learner.moment_dtype = "float32"
    c.learner.max_grad_norm = 1.0
    c.learner.compute_dtype = "float32"  # exactness on a CPU
    c.learner.row_length = 512
    c.learner.micro_rows = 2  # a multiple of data x fsdp x expert devices
    c.learner.updates_per_batch = 2
    c.learner.epochs_per_batch = 1
    c.learner.logprob_chunk = 512
    c.learner.remat = "none"
    c.learner.reference_dtype = "float32"  # read where objective.kl_coef is not 0
    c.learner.lora_rank = 0  # 0 = every parameter is trained
    c.learner.lora_alpha = 16.0
    c.learner.lora_targets = ("q", "k", "v", "o", "gate", "up", "down")
    c.learner.offload_optimizer = False


def _tiny_objective(c: ConfigDict) -> None:
    """Set what the quick start maximises."""
    c.objective = ConfigDict()
    c.objective.advantage = "grpo"
    c.objective.normalize_std = False
    c.objective.clip_low = 0.2
    c.objective.clip_high = 0.28
    c.objective.dual_clip = 3.0
    c.objective.kl_coef = 0.0
    c.objective.kl_kind = "k3"
    c.objective.entropy_coef = 0.0
    c.objective.reduction = "token_mean"
    c.objective.reduction_norm = 1.0
    c.objective.permute_rewards = False
    c.objective.masked_reasons = ()
    c.objective.zeroed_reasons = ("turns", "context")
    c.objective.balance_coef = 0.0  # dense
    c.objective.on_policy = False  # two updates a batch
    c.objective.abandoned = "drop"


def _tiny_episodes(c: ConfigDict) -> None:
    """Set how the quick start plays episodes."""
    c.rollout = ConfigDict()
    c.rollout.tasks_per_step = 16
    c.rollout.samples_per_task = 8
    c.rollout.revisit_fraction = 0.75
    c.rollout.temperature = 1.0
    c.rollout.top_p = 1.0
    c.rollout.top_k = -1
    c.rollout.max_turns = 3
    c.rollout.max_prompt_tokens = 256
    c.rollout.max_new_tokens = 48
    c.rollout.max_episode_tokens = 480
    c.rollout.live_sandboxes = 16
    c.rollout.init_concurrency = 2
    c.rollout.grade_concurrency = 4
    c.rollout.create_timeout_s = 30.0
    c.rollout.init_timeout_s = 60.0
    c.rollout.run_timeout_s = 120.0
    c.rollout.grade_timeout_s = 150.0  # a lost grading sandbox is tried once more: 2 x 60 s
    c.rollout.destroy_timeout_s = 60.0
    c.rollout.breaker = 10
    c.rollout.replay_routing = False  # dense

    c.agent = ConfigDict(dict(kind="codeact", prompt_style="compact", observation_tokens=64))

    c.engine = ConfigDict()
    c.engine.servers = ()  # () = start the embedded engine
    c.engine.slots = 64
    c.engine.max_context = 512
    c.engine.prefill_chunk = 32
    c.engine.prefill_rows = 2
    c.engine.decode_steps = 4
    c.engine.request_timeout_s = 60.0
    c.engine.start_timeout_s = 120.0

    c.sandbox = ConfigDict()
    c.sandbox.backend = "bwrap"
    c.sandbox.image = ""  # "" = the base image made on this machine
    c.sandbox.cpus = 1.0
    c.sandbox.memory_mb = 512
    c.sandbox.pids = 64
    c.sandbox.disk_mb = 64
    c.sandbox.command_timeout_s = 10.0
    c.sandbox.lifetime_s = 600.0
    c.sandbox.best_effort = True
    c.sandbox.warm = 0  # kept ready for the next episodes; bwrap starts in milliseconds
    c.sandbox.warm_creates = 2
    c.sandbox.docker_runtime = ""  # "" = the daemon's default; "runsc" = gVisor, where it is known
    c.sandbox.docker_read_only = False
    c.sandbox.docker_connections = 16
    c.sandbox.docker_timeout_s = 60.0
    c.sandbox.kubernetes_namespace = "default"  # backend "kubernetes"
    c.sandbox.kubernetes_context = ""
    c.sandbox.image_mirror = ""  # "registry.example.org:5000": asked in place of Docker Hub
    c.sandbox.image_login_file = ""  # such as ~/.docker/config.json
    c.sandbox.image_disk_gb = 0.0  # 0 = no limit
    c.sandbox.image_pulls = 2
    c.sandbox.image_pull_timeout_s = 1800.0
    c.sandbox.hosts = ()  # backend "remote": URLs of launchers/sandbox_host.py
    c.sandbox.token_file = ""  # "" = the environment variable SKYRL_SANDBOX_TOKEN

    c.actor = ConfigDict()
    c.actor.runtime = "local"  # "ray": sandbox hosts over the nodes of a Ray cluster
    c.actor.ray_address = "auto"
    c.actor.ray_hosts = 0  # 0 = one on every node that has ray_resource
    c.actor.ray_resource = ""
    c.actor.ray_workers = 0  # processes that play the episodes; 0 = this one does
    c.actor.host_capacity = 64
    c.actor.host_lease_s = 60.0


def _tiny_run(c: ConfigDict) -> None:
    """Set the tasks of the quick start, its warm start, its evaluations and its length."""
    c.tasks = ConfigDict(
        dict(source="synthetic", train=1024, heldout=136, unseen=64, templates=25, seed=0)
    )

    c.sft = ConfigDict()
    c.sft.max_steps = 1000
    c.sft.lr = 4e-3
    c.sft.warmup_steps = 10
    c.sft.batch_size = 32
    c.sft.played = 360
    c.sft.openings = 4000
    c.sft.rewrite_steps = 40
    c.sft.prompt_loss_weight = 0.3
    c.sft.target_success = 0.21
    c.sft.probe_from = 400
    c.sft.probe_every = 50
    c.sft.probe_episodes = 384

    c.eval = ConfigDict(
        dict(every=75, episodes=512, unseen_episodes=128, greedy=True, temperature=1.0)
    )

    c.train = ConfigDict()
    c.train.steps = 300
    c.train.time_limit_s = 1080.0  # leaves room for the last evaluation within 20 minutes
    c.train.checkpoint_every = 5
    c.train.keep_checkpoints = 3
    c.train.keep_weight_versions = 3


def _smollm2_135m() -> ConfigDict:
    c = _quickstart()
    c.name = "swe-smollm2-135m"
    c.model.update(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        max_position=8192,
    )
    c.learner.update(lr=1e-5, row_length=640, micro_rows=2, remat="full", updates_per_batch=1)
    c.rollout.update(tasks_per_step=4, samples_per_task=4, max_prompt_tokens=384)
    c.rollout.update(max_new_tokens=128, max_episode_tokens=640)
    c.engine.update(slots=8, max_context=640)
    c.sft.update(lr=1e-4)
    c.train.update(steps=30, time_limit_s=0.0)
    return c


def _qwen3_8b() -> ConfigDict:
    """SkyRL-v0 8B (no thinking): GRPO, 32 prompts x 8, 25 turns, prompt 31,232 + 1,536 new tokens.

    This version validates the recipe; it refuses to train it (docker images of rows and the markup
    of a foreign tokenizer are not built yet).

    Deviations from the published recipe (SkyRL-v0), on purpose:
      temperature 1.0 and top_p 1, top_k -1, no repetition penalty (recipe: 0.6, 0.95, 20, 1.5):
        with truncated sampling the engine's log-probs are not those of the distribution drawn from;
      updates_per_batch 1 (the recipe made 8, counting mini-batches without the samples per prompt);
      rollout log-probs of the engine are used (the recipe recomputed them in the trainer);
      advantages over action tokens only (the recipe's reached into tool output).
    """
    c = _quickstart()
    c.name = "swe-qwen3-8b"
    c.model.update(
        vocab_size=151_936,
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12_288,
        rope_theta=1_000_000.0,
        tie_embeddings=False,
        max_position=40_960,
        checkpoint="Qwen3-8B",  # an HF directory on local disk
    )
    c.learner.update(lr=1e-6, weight_decay=0.01, beta2=0.999, compute_dtype="bfloat16")
    c.learner.update(row_length=32_768, micro_rows=16, remat="full", logprob_chunk=1024)
    c.learner.update(updates_per_batch=1)
    c.objective.update(clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl_coef=0.001, kl_kind="k3")
    c.objective.update(normalize_std=True, reduction="token_mean", zeroed_reasons=())
    c.rollout.update(tasks_per_step=32, samples_per_task=8, max_turns=25, live_sandboxes=64)
    c.rollout.update(revisit_fraction=0.0)
    c.rollout.update(max_prompt_tokens=31_232, max_new_tokens=1536, max_episode_tokens=32_768)
    c.rollout.update(init_concurrency=16, grade_concurrency=32)
    # what passes is graded twice (tasks/swe/second_look.py): 2 x 900 s, and their sandboxes
    c.rollout.update(init_timeout_s=3600.0, run_timeout_s=5400.0, grade_timeout_s=2000.0)
    c.rollout.update(create_timeout_s=300.0, destroy_timeout_s=120.0)
    c.agent.update(prompt_style="full", observation_tokens=8192)
    c.engine.update(slots=256, max_context=32_768, prefill_chunk=64, request_timeout_s=1800.0)
    c.engine.update(start_timeout_s=1800.0, servers=("http://127.0.0.1:30000",))
    c.sandbox.update(backend="docker", cpus=1.0, memory_mb=4096, pids=512, disk_mb=8192)
    # best_effort: docker cannot limit a container's disk on most storage drivers (it warns)
    c.sandbox.update(command_timeout_s=300.0, lifetime_s=10_800.0, best_effort=True)
    c.sandbox.update(warm=16, warm_creates=4, docker_connections=64)
    c.tasks.update(source="swe_gym.parquet", train=293, heldout=23, unseen=0)
    c.sft.update(max_steps=0)
    c.eval.update(episodes=23, unseen_episodes=0)
    c.train.update(steps=100, time_limit_s=0.0, checkpoint_every=1, keep_checkpoints=10)
    return c


def _qwen3_14b() -> ConfigDict:
    """SkyRL-v0 14B (thinking): 32 x 8, 35 turns, 31,744 + 3,072 tokens, clip 0.2 / 0.28.

    Deviation beside those of the 8B recipe: the recipe used PPO with a critic (GAE, gamma =
    lambda = 1); this preset uses group statistics, which need no critic.
    """
    c = _qwen3_8b()
    c.name = "swe-qwen3-14b"
    c.model.update(hidden_size=5120, num_layers=40, num_heads=40, intermediate_size=17_408)
    c.model.update(checkpoint="Qwen3-14B")
    c.learner.update(row_length=34_816)
    c.objective.update(clip_high=0.28, entropy_coef=0.001)
    c.rollout.update(max_turns=35, max_prompt_tokens=31_744, max_new_tokens=3072)
    c.rollout.update(max_episode_tokens=34_816, live_sandboxes=192)
    c.engine.update(max_context=34_816)
    return c


def _qwen3_32b() -> ConfigDict:
    """SA-SWE-32B: leave-one-out without std, 64 x 8, 50 turns, rows of 40,960 tokens, no KL.

    The recipe limits the first prompt to 8,000 and all that follows to 32,768 tokens; here one
    limit of 40,960 holds for both, with 4,096 a turn.
    Reduction: sum over the tokens of a sequence divided by 40,768, mean over sequences. The recipe
    drops the gradient of episodes that a budget or the scaffold ended, and keeps their reward in
    the statistics.
    """
    c = _qwen3_8b()
    c.name = "swe-qwen3-32b"
    c.model.update(hidden_size=5120, num_layers=64, num_heads=64, intermediate_size=25_600)
    c.model.update(checkpoint="Qwen3-32B")
    c.mesh.update(tensor=2)
    c.learner.update(row_length=40_960, weight_decay=0.01)
    c.objective.update(advantage="rloo", normalize_std=False, clip_low=0.2, clip_high=0.28)
    c.objective.update(kl_coef=0.0, reduction="sequence_sum_norm", reduction_norm=40_768.0)
    c.objective.update(masked_reasons=("context", "turns", "time", "loop"))
    c.rollout.update(tasks_per_step=64, samples_per_task=8, max_turns=50, live_sandboxes=96)
    c.rollout.update(max_prompt_tokens=36_864, max_new_tokens=4096, max_episode_tokens=40_960)
    c.engine.update(max_context=40_960)
    c.tasks.update(source="r2e_gym.parquet", train=4500, heldout=100)
    c.eval.update(episodes=100, temperature=1.0)
    c.train.update(checkpoint_every=2, keep_checkpoints=20)
    return c
