"""Real providers for the sandbox tests: images and a docker daemon are made once per session."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox.bwrap import BwrapProvider, prepare_layer
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.sandbox.process import ProcessProvider
from skyrl_jax.sandbox.remote import RemoteProvider
from tests.sandbox.dockerd import REPO, build_image, docker_host
from tests.sandbox.hosts import TOKEN, host_process

CACHE = REPO / ".cache"


@pytest.fixture(scope="session")
def image() -> Path:
    """The base root filesystem."""
    return base_image(CACHE)


@pytest.fixture(scope="session")
def daemon() -> Iterator[str]:
    """The address of a docker daemon."""
    with docker_host() as host:
        yield host


@pytest.fixture(scope="session")
def docker_image(daemon: str, image: Path) -> str:
    """The tag of the sandbox image."""
    return build_image(daemon, image)


@pytest.fixture(scope="session")
def sandbox_host(image: Path) -> Iterator[str]:
    """The URL of a sandbox host with bwrap, in a process of its own."""
    with host_process() as host:
        yield host.url


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A layer with one file in /testbed, owned by the commands' uid."""
    testbed = tmp_path / "layer" / "testbed"
    testbed.mkdir(parents=True)
    (testbed / "a.txt").write_text("one\n")
    prepare_layer(tmp_path / "layer")
    return tmp_path / "layer"


class Backend:
    """How to make a provider of one kind, and a spec that fits it."""

    def __init__(self, kind: str, make: Callable[[], Any], image: str, layer: Path) -> None:
        self.kind = kind
        self.make = make
        self._image = image
        self._layer = layer

    def spec(self, **changes: Any) -> SandboxSpec:
        values: dict[str, Any] = {
            "image": self._image,
            "layers": (str(self._layer),),
            "workdir": "/testbed",
            "memory_mb": 256,
            "pids": 64,
            "disk_mb": 64,
            "best_effort": self.kind == "docker",
        }
        return SandboxSpec(**{**values, **changes})

    @contextlib.asynccontextmanager
    async def box(self, **changes: Any) -> Any:
        async with self.make() as provider:
            box = await provider.create(self.spec(**changes))
            yield box
            await box.destroy()
            assert provider.live == 0


def quiet_process_provider() -> ProcessProvider:
    """The process backend without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ProcessProvider(run_id="tests", cache_dir=CACHE)


def _backend(kind: str, request: pytest.FixtureRequest, layer: Path) -> Backend:
    if kind == "bwrap":
        root = str(request.getfixturevalue("image"))
        return Backend(kind, lambda: BwrapProvider(run_id="tests", cache_dir=CACHE), root, layer)
    if kind == "docker":
        tag = request.getfixturevalue("docker_image")
        host = request.getfixturevalue("daemon")
        make = lambda: DockerProvider(run_id="tests", cache_dir=CACHE, host=host)  # noqa: E731
        return Backend(kind, make, tag, layer)
    if kind == "remote":
        url = request.getfixturevalue("sandbox_host")
        return Backend(kind, lambda: RemoteProvider(url, token=TOKEN), "", layer)
    return Backend(kind, quiet_process_provider, "", layer)


@pytest.fixture(params=["bwrap", "docker", "process", "remote"])
def backend(request: pytest.FixtureRequest, layer: Path) -> Backend:
    """Every backend that runs real commands."""
    return _backend(request.param, request, layer)


@pytest.fixture(params=["bwrap", "docker", "remote"])
def isolated(request: pytest.FixtureRequest, layer: Path) -> Backend:
    """The backends that isolate."""
    return _backend(request.param, request, layer)


@pytest.fixture(params=["bwrap", "docker", "process"])
def local(request: pytest.FixtureRequest, layer: Path) -> Backend:
    """The backends whose sandboxes end with this very process."""
    return _backend(request.param, request, layer)


@pytest.fixture(params=["bwrap", "docker"])
def sharing(request: pytest.FixtureRequest, layer: Path) -> Backend:
    """The backends that isolate and can share a directory of this machine."""
    return _backend(request.param, request, layer)


@pytest.fixture
def bwrap(request: pytest.FixtureRequest, layer: Path) -> Backend:
    """The bwrap backend alone."""
    return _backend("bwrap", request, layer)


@pytest.fixture
def docker(request: pytest.FixtureRequest, layer: Path) -> Backend:
    """The docker backend alone."""
    return _backend("docker", request, layer)
