"""From the configuration to a sandbox provider."""

from __future__ import annotations

from pathlib import Path

from skyrl_jax.core.config import SandboxConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.docker_daemon import DockerOptions
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.sandbox.pool import OpenProvider, WarmPool
from skyrl_jax.sandbox.process import ProcessProvider

DOCKER_IMAGE = "skyrl-sandbox:latest"  # made by the two commands in sandbox/images.py
AnyProvider = OpenProvider


def make_provider(cfg: SandboxConfig, *, run_id: str, cache_dir: Path) -> OpenProvider:
    """Return the provider named by ``cfg.backend``; enter it with ``async with``.

    With ``cfg.warm`` it is a warm pool around that provider.

    Raises:
        ConfigError: unknown backend.
    """
    provider = _backend(cfg, run_id, cache_dir)
    if not cfg.warm:
        return provider
    return WarmPool(provider, size=cfg.warm, creates=cfg.warm_creates)


def _backend(cfg: SandboxConfig, run_id: str, cache_dir: Path) -> OpenProvider:
    if cfg.backend == "bwrap":
        return BwrapProvider(run_id=run_id, cache_dir=cache_dir)
    if cfg.backend == "docker":
        options = DockerOptions(
            runtime=cfg.docker_runtime,
            read_only=cfg.docker_read_only,
            connections=cfg.docker_connections,
            call_timeout_s=cfg.docker_timeout_s,
        )
        return DockerProvider(run_id=run_id, cache_dir=cache_dir, options=options)
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
