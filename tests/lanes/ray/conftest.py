"""A Ray cluster on this machine: a head without hosts and nodes that may take one each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # before ray is imported: no token file
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.cluster_utils import Cluster

from skyrl_jax.core.config import LOCAL_ACTOR, ActorConfig
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.sandbox.ray_hosts import RayProvider
from tests.sandbox.conftest import CACHE, Backend, layer  # noqa: F401

RESOURCE = "sandbox_host"


@pytest.fixture(scope="session")
def image() -> Path:
    """The base root filesystem."""
    return base_image(CACHE)


@pytest.fixture(scope="session")
def cluster(image: Path) -> Iterator[Any]:
    """A head and two nodes for hosts; this process has joined it."""
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": 100 << 20,
            "include_dashboard": False,
        },
    )
    for _ in range(2):
        add_node(made)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def add_node(cluster: Any) -> Any:
    """A node that may take one host."""
    return cluster.add_node(
        num_cpus=2, resources={RESOURCE: 1}, object_store_memory=100 << 20, wait=True
    )


def actor_config(**changes: Any) -> ActorConfig:
    """What the tests' providers are made with."""
    values = {"runtime": "ray", "ray_resource": RESOURCE, "host_capacity": 8, "host_lease_s": 5.0}
    return dataclasses.replace(LOCAL_ACTOR, **{**values, **changes})


def provider(**changes: Any) -> RayProvider:
    """A provider of bwrap sandboxes over the cluster."""
    return RayProvider(actor_config(**changes), backend="bwrap", run_id="lane", cache_dir=CACHE)


@pytest.fixture
def backend(cluster: Any, layer: Path) -> Backend:  # noqa: F811
    """The contract suite's only backend here."""
    return Backend("ray", lambda: provider(ray_hosts=1), "", layer)


@pytest.fixture
def bwrap(backend: Backend) -> Backend:
    """What the contract suite asks of bwrap alone holds of bwrap behind Ray."""
    return backend
