"""What this version can train: a recipe that needs more is refused before anything starts."""

from __future__ import annotations

from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models.families import check_config


def check_trainable(config: RunConfig) -> RunConfig:
    """Return ``config`` if a run of it can train what it says.

    Raises:
        ConfigError: names the key whose part is not built yet, and what can be used instead; or a
            key of the model whose value is none that the decoder computes.
    """
    check_config(config.model)
    if config.tasks.source != "synthetic":
        raise ConfigError(
            f"tasks.source = {config.tasks.source!r}: training draws from 'synthetic' tasks; rows "
            "of a file can be graded with launchers/evaluate.py"
        )
    if len(config.engine.servers) > 1:
        raise ConfigError("engine.servers: one server; a fleet is not built yet")
    return config
