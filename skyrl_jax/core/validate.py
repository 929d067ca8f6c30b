"""Checks that span several keys of a configuration: combinations that make no sense are refused."""

from __future__ import annotations

from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import ConfigError

_CHOICES = {
    "objective.advantage": ("grpo", "rloo"),
    "objective.kl_kind": ("k1", "k2", "k3"),
    "objective.reduction": ("token_mean", "sequence_mean", "sequence_sum_norm"),
    "learner.compute_dtype": ("float32", "bfloat16"),
    "learner.remat": ("none", "full"),
    "sandbox.backend": ("bwrap", "docker", "process"),
    "agent.kind": ("codeact",),
    "agent.prompt_style": ("compact", "full"),
    "model.family": ("qwen3", "llama"),
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
    _check_sampling(config)
    _check_lengths(config)
    _check_counts(config)
    return config


def _check_sampling(config: RunConfig) -> None:
    r = config.rollout
    if r.top_p != 1.0 or r.top_k != -1:
        raise ConfigError(
            f"rollout.top_p = {r.top_p}, rollout.top_k = {r.top_k}: training samples the whole "
            "distribution (top_p 1, top_k -1), since an engine's log-probs are taken before "
            "truncation and would not be those of the distribution drawn from"
        )
    if r.temperature <= 0:
        raise ConfigError("rollout.temperature must be above 0: a greedy policy has no gradient")


def _check_lengths(config: RunConfig) -> None:
    r, m = config.rollout, config.model
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


def _check_counts(config: RunConfig) -> None:
    positive = {
        "rollout.tasks_per_step": config.rollout.tasks_per_step,
        "rollout.max_turns": config.rollout.max_turns,
        "rollout.live_sandboxes": config.rollout.live_sandboxes,
        "learner.micro_rows": config.learner.micro_rows,
        "learner.updates_per_batch": config.learner.updates_per_batch,
        "learner.epochs_per_batch": config.learner.epochs_per_batch,
        "train.checkpoint_every": config.train.checkpoint_every,
        "train.keep_checkpoints": config.train.keep_checkpoints,
    }
    for path, value in positive.items():
        if value < 1:
            raise ConfigError(f"{path} must be at least 1, got {value}")
    if config.rollout.samples_per_task < 2:
        raise ConfigError(
            f"rollout.samples_per_task = {config.rollout.samples_per_task}: group statistics need "
            "at least 2 samples of each task"
        )
    if config.rollout.tasks_per_step < config.learner.updates_per_batch:
        raise ConfigError(
            f"learner.updates_per_batch = {config.learner.updates_per_batch} needs at least as "
            f"many tasks per step (rollout.tasks_per_step = {config.rollout.tasks_per_step})"
        )
