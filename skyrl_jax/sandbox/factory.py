"""From the configuration to a sandbox provider."""

from __future__ import annotations

from pathlib import Path

from skyrl_jax.core.config import SandboxConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.sandbox.process import ProcessProvider

DOCKER_IMAGE = "skyrl-sandbox:latest"  # made by the two commands in sandbox/images.py
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


def resolve_image(cfg: SandboxConfig, cache_dir: Path) -> str:
    """Return the image for a ``SandboxSpec``: the configured one, or the backend's default.

    bwrap's default is made on this machine when it is missing (seconds): call this in a thread.
    """
    if cfg.image:
        return cfg.image
    if cfg.backend == "bwrap":
        return str(base_image(cache_dir))
    return DOCKER_IMAGE if cfg.backend == "docker" else ""
