"""From the configuration to a sandbox provider."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from skyrl_jax.core.config import LOCAL_ACTOR, ActorConfig, SandboxConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.docker_daemon import DockerOptions
from skyrl_jax.sandbox.fleet import FleetProvider
from skyrl_jax.sandbox.host_process import TOKEN_VARIABLE, read_token
from skyrl_jax.sandbox.image_store import ImageOptions
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.sandbox.kubernetes import KubernetesProvider
from skyrl_jax.sandbox.pool import OpenProvider, WarmPool
from skyrl_jax.sandbox.process import ProcessProvider
from skyrl_jax.sandbox.ray_hosts import RayProvider

DOCKER_IMAGE = "skyrl-sandbox:latest"  # made by the two commands in sandbox/images.py
AnyProvider = OpenProvider


def make_provider(
    cfg: SandboxConfig, *, run_id: str, cache_dir: Path, actor: ActorConfig = LOCAL_ACTOR
) -> OpenProvider:
    """Return the provider named by ``cfg.backend``; enter it with ``async with``.

    With ``cfg.warm`` it is a warm pool around that provider.

    Raises:
        ConfigError: unknown backend, or no token for the hosts.
    """
    provider = _backend(cfg, run_id, cache_dir, actor)
    if not cfg.warm:
        return provider
    return WarmPool(provider, size=cfg.warm, creates=cfg.warm_creates)


def _backend(cfg: SandboxConfig, run_id: str, cache_dir: Path, actor: ActorConfig) -> OpenProvider:
    docker = DockerOptions(
        runtime=cfg.docker_runtime,
        read_only=cfg.docker_read_only,
        connections=cfg.docker_connections,
        call_timeout_s=cfg.docker_timeout_s,
    )
    images = ImageOptions(
        mirror=cfg.image_mirror,
        login_file=cfg.image_login_file,
        disk_gb=cfg.image_disk_gb,
        pulls=cfg.image_pulls,
        pull_timeout_s=cfg.image_pull_timeout_s,
    )
    here: dict[str, Any] = {"run_id": run_id, "cache_dir": cache_dir}
    if actor.runtime == "ray":
        return RayProvider(actor, backend=cfg.backend, docker=docker, images=images, **here)
    if cfg.backend == "remote":
        token = read_token(cfg.token_file, os.environ.get(TOKEN_VARIABLE, ""))
        name = cfg.token_file or f"the environment variable {TOKEN_VARIABLE}"
        return FleetProvider(cfg.hosts, token=token, token_name=name)
    if cfg.backend == "bwrap":
        return BwrapProvider(**here)
    if cfg.backend == "docker":
        return DockerProvider(options=docker, images=images, say=_say, **here)
    if cfg.backend == "process":
        return ProcessProvider(**here)
    if cfg.backend == "kubernetes":
        return KubernetesProvider(
            namespace=cfg.kubernetes_namespace, context=cfg.kubernetes_context, **here
        )
    raise ConfigError(
        f"sandbox.backend is {cfg.backend!r}: use bwrap, docker, process, remote or kubernetes"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def resolve_image(cfg: SandboxConfig, cache_dir: Path, actor: ActorConfig = LOCAL_ACTOR) -> str:
    """Return the image for a ``SandboxSpec``: the configured one, or the backend's default.

    bwrap's default is made on this machine when it is missing (seconds): call this in a thread.
    """
    if cfg.image or cfg.backend == "remote" or actor.runtime == "ray":
        return cfg.image  # "" = each host's own
    if cfg.backend == "bwrap":
        return str(base_image(cache_dir))
    return DOCKER_IMAGE if cfg.backend == "docker" else ""
