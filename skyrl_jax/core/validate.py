"""Checks that span several keys of a configuration: combinations that make no sense are refused."""

from __future__ import annotations

import math
import re

from skyrl_jax.core.config import OWN_LOOP, RunConfig, flatten_config
from skyrl_jax.core.errors import ConfigError

_INF = float("inf")
_MOST = 2**31 - 1  # sizes and indices are int32 on a device
_TINY = 1e-12  # stands for "above 0"
# Lowest and highest sensible value of every number; the tests ask that none is forgotten.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, _MOST),
    "model.vocab_size": (256, _MOST),
    "model.hidden_size": (1, _MOST),
    "model.num_layers": (1, 1024),
    "model.num_heads": (1, _MOST),
    "model.num_kv_heads": (1, _MOST),
    "model.head_dim": (2, _MOST),
    "model.intermediate_size": (1, _MOST),
    "model.rope_theta": (1, _INF),
    "model.rms_norm_eps": (_TINY, 1),
    "model.max_position": (1, _MOST),
    "model.rope_factor": (1, _INF),
    "model.rope_low_freq_factor": (_TINY, _INF),
    "model.rope_high_freq_factor": (_TINY, _INF),
    "model.rope_original_position": (0, _MOST),
    "model.num_experts": (0, _MOST),
    "model.experts_per_token": (0, _MOST),
    "model.moe_intermediate_size": (0, _MOST),
    "mesh.data": (-1, _MOST),
    "mesh.fsdp": (-1, _MOST),
    "mesh.tensor": (-1, _MOST),
    "mesh.context": (-1, _MOST),
    "mesh.expert": (-1, _MOST),
    "learner.lr": (0, 1),
    "learner.warmup_steps": (0, _MOST),
    "learner.decay_steps": (0, _MOST),
    "learner.min_lr_fraction": (0, 1),
    "learner.weight_decay": (0, 1),
    "learner.beta1": (0, 0.999999),
    "learner.beta2": (0, 0.999999),
    "learner.max_grad_norm": (0, _INF),  # 0 = no clip
    "learner.row_length": (1, _MOST),
    "learner.micro_rows": (1, _MOST),
    "learner.updates_per_batch": (1, _MOST),
    "learner.epochs_per_batch": (1, _MOST),
    "learner.logprob_chunk": (1, _MOST),
    "learner.lora_rank": (0, _MOST),
    "learner.lora_alpha": (_TINY, _INF),
    "objective.clip_low": (0, 1),
    "objective.clip_high": (0, _INF),
    "objective.dual_clip": (0, _INF),
    "objective.kl_coef": (0, _INF),
    "objective.entropy_coef": (0, _INF),
    "objective.balance_coef": (0, _INF),
    "objective.reduction_norm": (0, _INF),
    "rollout.tasks_per_step": (1, _MOST),
    "rollout.samples_per_task": (2, _MOST),
    "rollout.revisit_fraction": (0, 1),
    "rollout.temperature": (_TINY, 100),
    "rollout.top_p": (_TINY, 1),
    "rollout.top_k": (-1, _MOST),
    "rollout.max_turns": (1, _MOST),
    "rollout.max_prompt_tokens": (1, _MOST),
    "rollout.max_new_tokens": (1, _MOST),
    "rollout.max_episode_tokens": (2, _MOST),
    "rollout.live_sandboxes": (1, _MOST),
    "rollout.init_concurrency": (1, _MOST),
    "rollout.grade_concurrency": (1, _MOST),
    "rollout.create_timeout_s": (1, _INF),
    "rollout.init_timeout_s": (1, _INF),
    "rollout.run_timeout_s": (1, _INF),
    "rollout.grade_timeout_s": (1, _INF),
    "rollout.destroy_timeout_s": (1, _INF),
    "rollout.breaker": (1, _MOST),
    "agent.observation_tokens": (1, _MOST),
    "engine.slots": (1, _MOST),
    "engine.max_context": (2, _MOST),
    "engine.prefill_chunk": (1, _MOST),
    "engine.prefill_rows": (1, _MOST),
    "engine.decode_steps": (1, _MOST),
    "engine.request_timeout_s": (0.1, _INF),
    "engine.start_timeout_s": (1, _INF),
    "sandbox.cpus": (0.01, _INF),
    "sandbox.memory_mb": (16, _MOST),
    "sandbox.pids": (4, _MOST),
    "sandbox.disk_mb": (1, _MOST),
    "sandbox.command_timeout_s": (0.1, _INF),
    "sandbox.lifetime_s": (1, _INF),
    "sandbox.warm": (0, 4096),
    "sandbox.warm_creates": (1, 256),
    "sandbox.docker_connections": (1, 1024),
    "sandbox.docker_timeout_s": (1, _INF),
    "sandbox.image_disk_gb": (0, _INF),
    "sandbox.image_pulls": (1, 64),
    "sandbox.image_pull_timeout_s": (1, _INF),
    "actor.ray_hosts": (0, _MOST),
    "actor.ray_workers": (0, _MOST),
    "actor.host_capacity": (1, _MOST),
    "actor.host_lease_s": (1, _INF),
    "tasks.train": (1, _MOST),
    "tasks.heldout": (0, _MOST),
    "tasks.unseen": (0, _MOST),
    "tasks.templates": (0, _MOST),
    "tasks.seed": (0, _MOST),
    "sft.max_steps": (0, _MOST),
    "sft.lr": (0, 1),
    "sft.warmup_steps": (0, _MOST),
    "sft.batch_size": (4, _MOST),
    "sft.played": (1, _MOST),
    "sft.openings": (1, _MOST),
    "sft.rewrite_steps": (0, _MOST),
    "sft.prompt_loss_weight": (0, 1),
    "sft.target_success": (0, 1),
    "sft.probe_from": (1, _MOST),
    "sft.probe_every": (1, _MOST),
    "sft.probe_episodes": (1, _MOST),
    "eval.every": (0, _MOST),
    "eval.episodes": (0, _MOST),
    "eval.unseen_episodes": (0, _MOST),
    "eval.temperature": (0, 100),
    "train.steps": (0, _MOST),
    "train.time_limit_s": (0, _INF),
    "train.checkpoint_every": (1, _MOST),
    "train.keep_checkpoints": (1, _MOST),
    "train.keep_weight_versions": (1, _MOST),
}
_REASONS = ("turns", "context", "time", "loop", "agent")  # of truncation; "agent:<cause>" too
_CHOICES = {
    "objective.advantage": ("grpo", "rloo"),
    "objective.kl_kind": ("k1", "k2", "k3"),
    "objective.reduction": ("token_mean", "sequence_mean", "sequence_sum_norm"),
    "objective.abandoned": ("drop", "train"),
    "learner.compute_dtype": ("float32", "bfloat16"),
    "learner.moment_dtype": ("float32", "bfloat16"),
    "learner.remat": ("none", "full", "attn_out", "dots"),
    "learner.schedule": ("constant", "cosine"),
    "learner.reference_dtype": ("float32", "bfloat16"),
    "sandbox.backend": ("bwrap", "docker", "process", "remote", "kubernetes"),
    "actor.runtime": ("local", "ray"),
    "agent.kind": (OWN_LOOP, "mini_swe_agent", "openhands"),
    "agent.prompt_style": ("compact", "full"),
    "model.family": ("llama", "qwen2", "qwen3", "qwen3_moe"),
}


def validate_config(config: RunConfig) -> RunConfig:
    """Return ``config`` if its values make sense together.

    Raises:
        ConfigError: names the keys that disagree, and what would be right.
    """
    for path, choices in _CHOICES.items():
        section, key = path.split(".")
        value = getattr(getattr(config, section), key)
        if value not in choices:
            raise ConfigError(f"{path} = {value!r}; known: {', '.join(choices)}")
    _check_ranges(config)
    _check_sandbox(config)
    _check_sampling(config)
    _check_lengths(config)
    _check_mesh(config)
    _check_counts(config)
    _check_budgets(config)
    _check_reasons(config)
    _check_agent(config)
    _check_hosts(config)
    _check_objective(config)
    return config


def _check_ranges(config: RunConfig) -> None:
    flat = flatten_config(config)
    for path, (low, high) in RANGES.items():
        if not low <= flat[path] <= high:
            open_ended = high == _INF or (high == _MOST and flat[path] < low)
            limit = f"at least {low:g}" if open_ended else f"between {low:g} and {high:.10g}"
            extra = ": group statistics need 2 samples" if path.endswith("samples_per_task") else ""
            raise ConfigError(f"{path} must be {limit}, got {flat[path]:.10g}{extra}")


def _check_sampling(config: RunConfig) -> None:
    r = config.rollout
    if r.top_p != 1.0 or r.top_k != -1:
        raise ConfigError(
            f"rollout.top_p = {r.top_p}, rollout.top_k = {r.top_k}: training samples the whole "
            "distribution (top_p 1, top_k -1), since an engine's log-probs are taken before "
            "truncation and would not be those of the distribution drawn from"
        )


def check_micro_batch(rows: int, tokens: int) -> None:
    """Refuse a micro-batch whose tokens a device could not number.

    Raises:
        ConfigError: names both sizes and how many tokens there may be.
    """
    if rows * tokens > _MOST:
        raise ConfigError(
            f"learner.micro_rows = {rows} rows of learner.row_length = {tokens} tokens are "
            f"{rows * tokens:.3g} tokens in a micro-batch; there may be {_MOST}, and memory for "
            "far fewer"
        )


def _check_lengths(config: RunConfig) -> None:
    r, m = config.rollout, config.model
    check_micro_batch(config.learner.micro_rows, config.learner.row_length)
    if config.learner.row_length < r.max_episode_tokens:
        raise ConfigError(
            f"learner.row_length = {config.learner.row_length} is shorter than "
            f"rollout.max_episode_tokens = {r.max_episode_tokens}: such episodes cannot be packed"
        )
    if r.max_prompt_tokens >= r.max_episode_tokens:
        raise ConfigError(
            f"rollout.max_prompt_tokens = {r.max_prompt_tokens} leaves no room within "
            f"rollout.max_episode_tokens = {r.max_episode_tokens}"
        )
    if r.max_episode_tokens > config.engine.max_context:
        raise ConfigError(
            f"engine.max_context = {config.engine.max_context} is below "
            f"rollout.max_episode_tokens = {r.max_episode_tokens}"
        )
    if r.max_episode_tokens > m.max_position:
        raise ConfigError(
            f"model.max_position = {m.max_position} is below rollout.max_episode_tokens = "
            f"{r.max_episode_tokens}"
        )
    if m.num_heads % m.num_kv_heads:
        raise ConfigError(
            f"model.num_heads = {m.num_heads} must be a multiple of model.num_kv_heads = "
            f"{m.num_kv_heads}"
        )


def check_tensor_axis(num_heads: int, num_kv_heads: int, tensor: int) -> None:
    """Refuse a ``mesh.tensor`` that would cut a head in two.

    Raises:
        ConfigError: names the axis, the tensor that it does not divide, and what would.
    """
    for key, size, leaf in (
        ("num_heads", num_heads, "layers.q"),
        ("num_kv_heads", num_kv_heads, "layers.k"),
    ):
        if size % tensor:
            raise ConfigError(
                f"mesh.tensor = {tensor} does not divide model.{key} = {size} (leaf {leaf}): a "
                "device holds whole heads; make mesh.tensor a divisor of "
                f"{math.gcd(num_heads, num_kv_heads)}"
            )


def check_expert_axis(family: str, num_experts: int, expert: int) -> None:
    """Refuse a ``mesh.expert`` that would cut an expert in two, or spread experts of none.

    Raises:
        ConfigError: names the axis, the tensor that it does not divide, and what would.
    """
    if expert > 1 and not num_experts:
        raise ConfigError(
            f"mesh.expert = {expert}, but family {family!r} has no experts: use 1, and "
            "mesh.fsdp for the devices"
        )
    if num_experts % expert:
        raise ConfigError(
            f"mesh.expert = {expert} does not divide model.num_experts = {num_experts} (leaf "
            f"layers.expert_gate): make it a divisor of {num_experts}"
        )


def _check_mesh(config: RunConfig) -> None:
    """Look at the axes that are named; -1 is known once jax has its devices (models/sharding)."""
    mesh, model = config.mesh, config.model
    if mesh.tensor > 0:
        check_tensor_axis(model.num_heads, model.num_kv_heads, mesh.tensor)
    if mesh.expert > 0:
        check_expert_axis(model.family, model.num_experts, mesh.expert)


def _check_objective(config: RunConfig) -> None:
    objective, learner = config.objective, config.learner
    if objective.balance_coef and not config.model.num_experts:
        raise ConfigError(
            f"objective.balance_coef = {objective.balance_coef}: only routed experts can be out of "
            f"balance, and model.num_experts is 0 (family {config.model.family!r}); use 0"
        )
    if config.rollout.replay_routing and not (config.model.num_experts and config.engine.servers):
        raise ConfigError(
            "rollout.replay_routing = True needs a model with experts (model.num_experts = "
            f"{config.model.num_experts}) and a server that tells its routing (engine.servers = "
            f"{list(config.engine.servers)}; the embedded engine tells none)"
        )
    if objective.on_policy and (learner.updates_per_batch, learner.epochs_per_batch) != (1, 1):
        raise ConfigError(
            "objective.on_policy = True holds for the first update of a batch alone; it needs "
            f"learner.updates_per_batch = 1 (now {learner.updates_per_batch}) and "
            f"learner.epochs_per_batch = 1 (now {learner.epochs_per_batch})"
        )


def _check_reasons(config: RunConfig) -> None:
    for key in ("masked_reasons", "zeroed_reasons"):
        for reason in getattr(config.objective, key):
            if reason not in _REASONS and not re.fullmatch(r"agent:\w+", reason):
                known = ", ".join(_REASONS)
                raise ConfigError(
                    f"objective.{key}: no episode is truncated for {reason!r}; known: {known}"
                )


def _check_agent(config: RunConfig) -> None:
    if config.agent.kind == OWN_LOOP:
        return
    if config.sandbox.backend == "process":
        raise ConfigError(
            f"agent.kind = {config.agent.kind!r} needs a second uid for the agent's program, and "
            "sandbox.backend = 'process' has none: use bwrap (as root) or docker"
        )
    if config.sandbox.backend in ("remote", "kubernetes") or config.actor.runtime == "ray":
        raise ConfigError(
            f"agent.kind = {config.agent.kind!r} shares a socket of this machine with the agent's "
            "program, which no other machine can (sandbox.backend = 'remote' or 'kubernetes', "
            "actor.runtime = 'ray'): use 'codeact', or sandbox.backend = 'bwrap' or 'docker' on "
            "this machine"
        )


def _check_hosts(config: RunConfig) -> None:
    sandbox = config.sandbox
    if (sandbox.backend == "remote") != bool(sandbox.hosts):
        raise ConfigError(
            f"sandbox.backend = {sandbox.backend!r} and sandbox.hosts = {list(sandbox.hosts)}: "
            "'remote' needs the URLs of its hosts (launchers/sandbox_host.py), and no other "
            "backend has any"
        )
    if config.actor.ray_workers and config.actor.runtime != "ray":
        raise ConfigError(
            f"actor.ray_workers = {config.actor.ray_workers} needs actor.runtime = 'ray'"
        )
    if sandbox.backend == "remote" and config.actor.runtime == "ray":
        raise ConfigError(
            "actor.runtime = 'ray' starts sandbox hosts itself: sandbox.backend is what they "
            "make sandboxes with ('bwrap' or 'docker'), not 'remote'"
        )
    for url in sandbox.hosts:
        if not re.fullmatch(r"http://[^/]+/?", url):
            raise ConfigError(
                f"sandbox.hosts: {url!r} is no http:// address (a sandbox host speaks no TLS)"
            )


def _check_budgets(config: RunConfig) -> None:
    r = config.rollout
    for key, value in (("init", r.init_timeout_s), ("grade", r.grade_timeout_s)):
        if r.create_timeout_s >= value:
            raise ConfigError(
                f"rollout.create_timeout_s = {r.create_timeout_s:g} must be below "
                f"rollout.{key}_timeout_s = {value:g}, which holds the making of a sandbox: or a "
                "slow host would pass for a slow submission"
            )


def _check_sandbox(config: RunConfig) -> None:
    sandbox = config.sandbox
    for key, value in (
        ("docker_runtime", sandbox.docker_runtime),
        ("docker_read_only", sandbox.docker_read_only),
    ):
        if value and sandbox.backend != "docker":
            raise ConfigError(
                f"sandbox.{key} = {value!r} is of docker alone; sandbox.backend is "
                f"{sandbox.backend!r}"
            )
    if sandbox.docker_read_only and sandbox.memory_mb <= sandbox.disk_mb:
        raise ConfigError(
            f"sandbox.docker_read_only keeps the sandbox's files in its memory: memory_mb = "
            f"{sandbox.memory_mb} must be above disk_mb = {sandbox.disk_mb}"
        )


def _check_counts(config: RunConfig) -> None:
    if config.rollout.tasks_per_step < config.learner.updates_per_batch:
        raise ConfigError(
            f"learner.updates_per_batch = {config.learner.updates_per_batch} needs at least as "
            f"many tasks per step (rollout.tasks_per_step = {config.rollout.tasks_per_step})"
        )
    learner = config.learner
    if learner.schedule == "cosine" and learner.decay_steps <= learner.warmup_steps:
        raise ConfigError(
            f"learner.decay_steps = {learner.decay_steps}: the cosine ends at this update, which "
            f"must be after learner.warmup_steps = {learner.warmup_steps}"
        )
    if not re.fullmatch(r"[\w.-]+", config.name) or set(config.name) == {"."}:
        raise ConfigError(f"name = {config.name!r}: letters, digits, '-', '_' and '.' only")
    if config.objective.reduction == "sequence_sum_norm" and config.objective.reduction_norm <= 0:
        raise ConfigError(
            f"objective.reduction_norm = {config.objective.reduction_norm}: sequence_sum_norm "
            "divides by it; it must be above 0 tokens"
        )
    for url in config.engine.servers:
        if not re.match(r"https?://[^/]+", url):
            raise ConfigError(f"engine.servers: {url!r} is no http:// or https:// address")
