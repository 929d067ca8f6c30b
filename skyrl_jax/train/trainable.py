"""What this version can train: a recipe that needs more is refused before anything starts."""

from __future__ import annotations

from skyrl_jax.core.config import OWN_LOOP, RunConfig
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
    agent = config.agent
    taught = agent.kind == "mini_swe_agent" and agent.prompt_style == "compact"
    if agent.kind != OWN_LOOP and config.sft.max_steps and not taught:
        raise ConfigError(
            f"agent.kind = {agent.kind!r}, agent.prompt_style = {agent.prompt_style!r}: the warm "
            "start teaches 'codeact', and 'mini_swe_agent' in its compact style; or set "
            "sft.max_steps=0"
        )
    if len(config.engine.servers) > 1:
        raise ConfigError("engine.servers: one server; a fleet is not built yet")
    return config
