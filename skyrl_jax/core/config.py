"""The configuration of a run: frozen dataclasses, parsed once from a nested mapping.

Unknown and missing keys are refused by dotted path. Only launchers/ and configs/ know absl flags
and ml_collections; everything else receives these values.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_jax.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only language model in the field's usual names (HF config.json)."""

    family: str  # "llama" | "qwen2" | "qwen3" | "qwen3_moe" (models/families.py)
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    max_position: int
    checkpoint: str  # HF directory to start from; "" = random init
    # Rope scaling in Llama 3's form (formula: models/rope.py); factor 1.0 = none, and then the
    # other three stay as they are here. A file of a run names all keys; only code may leave out
    # these, and manifests written before they existed do.
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_position: int = 0  # positions the model was trained on before scaling
    num_experts: int = 0  # routed experts of a layer; 0 = dense
    experts_per_token: int = 0
    moe_intermediate_size: int = 0  # ffn of one expert
    norm_topk_prob: bool = False  # the chosen experts' weights sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Devices per mesh axis; -1 = all that remain. The axes: models/sharding.py."""

    data: int
    fsdp: int
    tensor: int
    context: int
    expert: int = 1  # a file of a run names it; only code may leave it out, as in ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Optimizer and train step."""

    lr: float
    schedule: str  # after the warm-up: "constant" | "cosine"
    warmup_steps: int
    decay_steps: int  # cosine: updates, warm-up included, until the lr is min_lr_fraction x lr
    min_lr_fraction: float
    weight_decay: float
    beta1: float
    beta2: float
    moment_dtype: str  # of Adam's first moment: "float32" | "bfloat16"
    max_grad_norm: float
    compute_dtype: str  # "float32" | "bfloat16"
    row_length: int  # tokens per packed row
    micro_rows: int  # rows per micro-batch
    updates_per_batch: int  # optimizer updates (mini-batches) over each batch
    epochs_per_batch: int
    logprob_chunk: int  # tokens per chunk of the head
    remat: str  # "none" | "full" | "attn_out" | "dots" (models/decoder.py)
    # A file of a run names all keys; only code may leave out these.
    reference_dtype: str = "float32"  # of a KL penalty's frozen policy: "float32" | "bfloat16"
    lora_rank: int = 0  # 0 = RL trains every parameter (the warm start always does)
    lora_alpha: float = 16.0  # adapters count lora_alpha / lora_rank times
    lora_targets: tuple[str, ...] = ()  # matrices of a layer: q, k, v, o, gate, up, down
    # The moments lie in the host's memory between updates (learner/state.py). Only code may leave
    # this out, as in ModelConfig.
    offload_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What is maximised."""

    advantage: str  # "grpo" | "rloo"
    normalize_std: bool
    clip_low: float
    clip_high: float
    dual_clip: float  # 0 = off
    kl_coef: float
    kl_kind: str  # "k3"
    entropy_coef: float
    reduction: str  # "token_mean" | "sequence_mean" | "sequence_sum_norm"
    reduction_norm: float  # the constant of sequence_sum_norm, tokens
    permute_rewards: bool  # control run: rewards shuffled over the batch
    # Of truncated episodes; reasons: turns, context, time, loop, agent or agent:<cause>
    masked_reasons: tuple[str, ...]  # kept in the statistics, not in the loss
    zeroed_reasons: tuple[str, ...]  # their reward counts as 0 in training
    # Only code may leave out these three, as in ModelConfig.
    balance_coef: float = 0.0  # of the routers' load-balance loss (models/moe.py); 0 = metric alone
    on_policy: bool = False  # the ratio is 1: one update a batch, on what the policy itself sampled
    abandoned: str = "drop"  # samples left for another of the same prompt: "drop" | "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How episodes are collected."""

    tasks_per_step: int
    samples_per_task: int
    revisit_fraction: float  # share of a step that may be played again (train/curriculum.py)
    temperature: float
    top_p: float
    top_k: int
    max_turns: int
    max_prompt_tokens: int
    max_new_tokens: int  # per turn
    max_episode_tokens: int  # prompt + everything after it
    live_sandboxes: int  # one semaphore
    init_concurrency: int
    grade_concurrency: int
    # Budgets of one episode, each with its own end (actor/blame.py says whose fault it is).
    create_timeout_s: float  # one sandbox, each time one is made
    init_timeout_s: float  # the set-up: creation, waiting for room and what the world needs
    run_timeout_s: float  # the agent
    grade_timeout_s: float
    destroy_timeout_s: float  # closing the world
    breaker: int  # host failures in a row that stop the run
    # The learner sends each token through the experts that the engine sent it through (the server
    # must tell them). Only code may leave this out, as in ModelConfig.
    replay_routing: bool = False


OWN_LOOP = "codeact"  # agent.kind of agents/loop.py; any other names a foreign scaffold


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The scaffold."""

    kind: str  # OWN_LOOP | "mini_swe_agent" | "openhands" (agents/scaffolds.py)
    prompt_style: str  # "compact" (tiny policies) | "full"
    observation_tokens: int  # cut of one observation


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The generation servers."""

    servers: tuple[str, ...]  # base URLs; () = start the embedded engine as a child
    slots: int
    max_context: int
    prefill_chunk: int
    prefill_rows: int
    decode_steps: int  # tokens per device dispatch
    request_timeout_s: float
    start_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """Where commands run."""

    backend: str  # "bwrap" | "docker" | "process" | "remote"; with Ray: of the hosts
    image: str  # "" = the base image made on this machine
    cpus: float
    memory_mb: int
    pids: int
    disk_mb: int
    command_timeout_s: float
    lifetime_s: float
    best_effort: bool
    warm: int  # sandboxes kept ready beside rollout.live_sandboxes; 0 = off
    warm_creates: int  # of them made at a time
    docker_runtime: str  # "" = the daemon's default; "runsc", ...
    docker_read_only: bool  # tmpfs of disk_mb for the working directory and /tmp
    docker_connections: int  # to the daemon, at a time
    docker_timeout_s: float  # of one call to the daemon
    # Only code may leave out these, as in ModelConfig.
    kubernetes_namespace: str = "default"
    kubernetes_context: str = ""  # of the kubeconfig; "" = the current one
    image_mirror: str = ""  # "host[:port][/prefix]" that is asked in place of Docker Hub
    image_login_file: str = ""  # in the form of docker's config.json; "" = nobody in particular
    image_disk_gb: float = 0.0  # of all images pulled; the longest unused go; 0 = no limit
    image_pulls: int = 2  # at a time
    image_pull_timeout_s: float = 1800.0  # of one image, all tries together
    hosts: tuple[str, ...] = ()  # backend "remote": URLs of launchers/sandbox_host.py
    token_file: str = ""  # what they were started with; "" = the variable SKYRL_SANDBOX_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """Where sandbox hosts run."""

    runtime: str  # "local" (this process, or sandbox.hosts) | "ray"
    ray_address: str  # of the cluster; "auto" = the one that this node belongs to
    ray_hosts: int  # sandbox hosts, at most one a node; 0 = one on every node that can
    ray_resource: str  # what a node must have one of for a host, e.g. "sandbox_host"; "" = nothing
    ray_workers: int  # processes that play the episodes; 0 = this one does
    host_capacity: int  # sandboxes at once on a host
    host_lease_s: float  # an owner silent for so long loses its sandboxes


LOCAL_ACTOR = ActorConfig(
    runtime="local",
    ray_address="auto",
    ray_hosts=0,
    ray_resource="",
    ray_workers=0,
    host_capacity=64,
    host_lease_s=60.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksConfig:
    """Where tasks come from."""

    source: str  # "synthetic" | path of SWE-bench rows (JSON, JSONL, parquet)
    train: int
    heldout: int
    unseen: int
    templates: int  # function templates used, the shortest first (0 = all); a quarter more unseen
    seed: int  # of task making; the run's own seed does not change the tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Warm start on scripted repairs."""

    max_steps: int  # 0 = no warm start
    lr: float
    warmup_steps: int
    batch_size: int  # demonstrations per step
    played: int  # training tasks that the script repairs in a sandbox, at most
    openings: int  # instances that are only read: first edits and rewrites are made of them
    rewrite_steps: int  # first steps, on rewrites alone
    prompt_loss_weight: float
    target_success: float  # stop when the sampled success estimate reaches this
    probe_from: int  # first step after which the success is probed
    probe_every: int
    probe_episodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation before and after, and of the sampled held-out episodes in between."""

    every: int  # steps between evaluations during training (0 = only before and after)
    episodes: int
    unseen_episodes: int
    greedy: bool
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int
    time_limit_s: float  # 0 = none; no step begins after it (leave room to evaluate)
    checkpoint_every: int
    keep_checkpoints: int
    keep_weight_versions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run depends on; equal configs and seeds give equal runs."""

    name: str
    seed: int
    model: ModelConfig
    mesh: MeshConfig
    learner: LearnerConfig
    objective: ObjectiveConfig
    rollout: RolloutConfig
    agent: AgentConfig
    engine: EngineConfig
    sandbox: SandboxConfig
    tasks: TasksConfig
    sft: SftConfig
    eval: EvalConfig
    train: TrainConfig
    actor: ActorConfig = LOCAL_ACTOR  # only code may leave it out, as in ModelConfig


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Turn a nested mapping into a RunConfig.

    Raises:
        ConfigError: unknown key (with the nearest known one), missing key, or wrong type, each by
            dotted path.
    """
    return typing.cast(RunConfig, _parse(RunConfig, values, ""))


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return {dotted path: plain value} of a config, for fingerprints and diffs."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        path = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            flat.update(flatten_config(value, path + "."))
        else:
            flat[path] = list(value) if isinstance(value, tuple) else value
    return flat


def diff_config(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {dotted path: (before, after)} of the keys whose values differ."""
    keys = sorted(set(before) | set(after))
    return {
        key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    }


def known_keys(cls: type = RunConfig, prefix: str = "") -> list[str]:
    """Return every dotted leaf path of a config class."""
    hints = typing.get_type_hints(cls)
    keys: list[str] = []
    for item in dataclasses.fields(cls):
        kind = hints[item.name]
        path = f"{prefix}{item.name}"
        nested = dataclasses.is_dataclass(kind)
        keys += known_keys(typing.cast(type, kind), path + ".") if nested else [path]
    return keys


def unknown_key_message(path: str) -> str:
    """Say that ``path`` is no key and name the nearest one."""
    near = difflib.get_close_matches(path, known_keys(), n=1, cutoff=0.0)
    return f"unknown config key {path!r}; the nearest known key is {near[0]!r}"


def _parse(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"config section {prefix[:-1]!r} must be a mapping, got {values!r}")
    hints = typing.get_type_hints(cls)
    names = {item.name for item in dataclasses.fields(cls)}
    for key in values:
        if key not in names:
            raise ConfigError(unknown_key_message(f"{prefix}{key}"))
    missing = sorted(names - set(values))
    if missing:
        raise ConfigError(f"missing config key {prefix + missing[0]!r}")
    return cls(**{k: _value(hints[k], values[k], f"{prefix}{k}") for k in names})


def _value(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _parse(typing.cast(type, kind), value, path + ".")
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"config key {path!r} must be a list of strings, got {value!r}")
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wrong_bool = isinstance(value, bool) and kind is not bool
    if isinstance(kind, types.UnionType) or wrong_bool or not isinstance(value, kind):
        raise ConfigError(f"config key {path!r} must be {kind.__name__}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"config key {path!r} must be a finite number, got {value!r}")
    return value
