"""From the configuration to a sandbox provider."""

from __future__ import annotations

from pathlib import Path

from skyrl_jax.core.config import SandboxConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.process import ProcessProvider

AnyProvider = BwrapProvider | DockerProvider | ProcessProvider


def make_provider(cfg: SandboxConfig, *, run_id: str, cache_dir: Path) -> AnyProvider:
    """Return the provider named by ``cfg.backend``; enter it with ``async with``.

    Raises:
        ConfigError: unknown backend.
    """
    if cfg.backend == "bwrap":
        return BwrapProvider(run_id=run_id, cache_dir=cache_dir)
    if cfg.backend == "docker":
        return DockerProvider(run_id=run_id, cache_dir=cache_dir)
    if cfg.backend == "process":
        return ProcessProvider(run_id=run_id, cache_dir=cache_dir)
    raise ConfigError(f"sandbox.backend is {cfg.backend!r}: use bwrap, docker or process")
