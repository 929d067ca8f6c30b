"""What this version can train: a recipe that needs more is refused before anything starts."""

from __future__ import annotations

from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import ConfigError


def check_trainable(config: RunConfig) -> RunConfig:
    """Return ``config`` if a run of it can train what it says.

    Raises:
        ConfigError: names the key whose part is not built yet, and what can be used instead.
    """
    if config.tasks.source != "synthetic":
        raise ConfigError(
            f"tasks.source = {config.tasks.source!r}: training draws from 'synthetic' tasks; rows "
            "of a file can be graded with launchers/evaluate.py"
        )
    if config.model.checkpoint:
        raise ConfigError(
            f"model.checkpoint = {config.model.checkpoint!r}: starting from pretrained weights and "
            "their tokenizer is not built yet; '' trains from fresh weights"
        )
    if config.model.family != "qwen3":
        raise ConfigError(
            f"model.family = {config.model.family!r}: a run trains 'qwen3' alone; other "
            "families load, score and are served, but no run of one was made yet"
        )
    if config.objective.kl_coef:
        raise ConfigError(
            f"objective.kl_coef = {config.objective.kl_coef}: the reference policy that a KL "
            "penalty needs is not built yet; use 0"
        )
    if len(config.engine.servers) > 1:
        raise ConfigError("engine.servers: one server; a fleet is not built yet")
    return config
