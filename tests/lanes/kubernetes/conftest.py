"""A provider of pods at a fake API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_jax.sandbox.images import base_image
from skyrl_jax.sandbox.kubernetes import KubernetesProvider
from tests.lanes.kubernetes.fake_api import FakeApi, kubeconfig
from tests.sandbox.conftest import CACHE, Backend, layer  # noqa: F401


@pytest.fixture(scope="session")
def image() -> Path:
    """The base root filesystem."""
    return base_image(CACHE)


@pytest.fixture
def cluster(image: Path, tmp_path: Path) -> Iterator[FakeApi]:
    """A fake cluster."""
    with FakeApi(image).serve() as served:
        served.config = str(kubeconfig(tmp_path / "kubeconfig", served.address))
        yield served
        assert served.pods == {}, "pods are left"


def provider(cluster: FakeApi, **changes) -> KubernetesProvider:
    """A provider of a fake cluster."""
    values = {"run_id": "tests", "cache_dir": CACHE, "config_file": cluster.config}
    return KubernetesProvider(**{**values, **changes})


@pytest.fixture
def backend(cluster: FakeApi, layer: Path) -> Backend:  # noqa: F811
    """Pods, for the contract suite."""

    class Pods(Backend):
        def spec(self, **changes):
            return super().spec(**{"best_effort": True, **changes})

    return Pods("kubernetes", lambda: provider(cluster), "an-image", layer)
