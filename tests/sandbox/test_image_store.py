"""Images against a real registry and a real docker daemon: pulled, refused, evicted, made ready."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import docker as docker_sdk
import pytest
from aiohttp import web

from skyrl_jax.core.errors import ImageError, InfraError
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.image_store import ImageOptions
from tests.sandbox.conftest import CACHE
from tests.sandbox.registry import Door, running_registry

pytestmark = pytest.mark.xdist_group("sandbox")
WORKDIR = "/testbed"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture
def door(registry: str) -> Iterator[Door]:
    with Door(registry).open() as opened:
        yield opened


@pytest.fixture
def client(daemon: str) -> Iterator[Any]:
    made = docker_sdk.APIClient(base_url=daemon, timeout=60)
    yield made
    made.close()


def publish(client: Any, registry: str, image: str, name: str, mark: str, size: int = 0) -> None:
    """Push an image with one file of its own under a name; nothing of it stays on this machine."""
    container = client.create_container(image, ["true"])["Id"]
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        text = (mark + "\n").encode() + bytes(size)
        member = tarfile.TarInfo("mark")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    client.put_archive(container, "/", data.getvalue())
    there = f"{registry}/{name}"
    client.commit(container, repository=there, tag="latest")
    client.remove_container(container, force=True)
    for line in client.push(there, tag="latest", stream=True, decode=True):
        assert "error" not in line, line
    client.remove_image(f"{there}:latest")


@contextlib.asynccontextmanager
async def provider(daemon: str, tmp_path: Path, said: list[str], **options: Any) -> AsyncIterator:
    made = DockerProvider(
        run_id="images",
        cache_dir=CACHE,
        host=daemon,
        images=ImageOptions(**options),
        say=said.append,
    )
    made.images._shelf._path = tmp_path / "images.json"  # not that of other tests
    async with made:
        yield made


def spec(image: str, **changes: Any) -> SandboxSpec:
    values = {"memory_mb": 256, "pids": 64, "disk_mb": 64, "best_effort": True, "workdir": "/"}
    return SandboxSpec(image=image, **{**values, **changes})


def removed(client: Any, *names: str) -> None:
    for name in names:
        with contextlib.suppress(docker_sdk.errors.APIError):
            client.remove_image(name, force=True)


def test_a_missing_image_is_pulled_from_the_mirror_once(
    client: Any, daemon: str, docker_image: str, door: Door, registry: str, tmp_path: Path
) -> None:
    name = "swebench/sweb.eval.x86_64.some_1776_row-1"
    publish(client, registry, docker_image, name, "pulled")
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "more").write_text("more\n")
    said: list[str] = []

    async def run() -> None:
        async with provider(daemon, tmp_path, said, mirror=door.address) as made:
            boxes = await asyncio.gather(
                made.create(spec(name)),
                made.create(spec(name, layers=(str(layer),))),
                made.create(spec(name)),
            )
            for box in boxes:
                assert (await box.exec("cat /mark")).output == "pulled\n"
            assert (await boxes[1].exec("cat /more")).output == "more\n"
        assert [item.name for item in made.images._shelf.kept()] == [f"{name}:latest"]

    asyncio.run(run())
    assert sum("pulling" in line for line in said) == 1
    assert f"HEAD /v2/{name}/manifests/latest" in door.asked
    assert client.inspect_image(f"{name}:latest")
    removed(client, f"{name}:latest")


def test_an_image_that_is_nowhere_is_told_and_not_asked_for_again(
    daemon: str, door: Door, tmp_path: Path
) -> None:
    async def run() -> None:
        async with provider(daemon, tmp_path, [], mirror=door.address) as made:
            for _ in range(3):
                with pytest.raises(ImageError, match=r"nobody/none:latest is not there .* 404"):
                    await made.create(spec("nobody/none"))
            assert len(door.asked) == 1
            assert list(made.images.quarantine) == ["nobody/none"]
            with pytest.raises(ImageError, match="docker image not found"):
                await made.create(spec("skyrl-none:1"))  # ours: no registry is asked
            assert len(door.asked) == 1

    asyncio.run(run())


def test_a_429_is_waited_for_as_long_as_it_says(
    client: Any, daemon: str, docker_image: str, door: Door, registry: str, tmp_path: Path
) -> None:
    """The registry refuses our question twice and the daemon's own request once."""
    publish(client, registry, docker_image, "a/limited", "at last")
    left = {"HEAD": 2, "GET": 1}
    times: list[float] = []

    def answer(request: web.Request) -> web.Response | None:
        if "/manifests/" not in request.path:
            return None
        if request.method == "HEAD" and "docker" not in request.headers.get("User-Agent", ""):
            times.append(time.monotonic())
        if left.get(request.method, 0) > 0:
            left[request.method] -= 1
            body = '{"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}'
            return web.Response(status=429, headers={"Retry-After": "1"}, text=body)
        return None

    door.answer = answer
    said: list[str] = []

    async def run() -> None:
        async with provider(daemon, tmp_path, said, mirror=door.address) as made:
            assert await made.images.ensure("a/limited") == "a/limited:latest"

    asyncio.run(run())
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert len(waits) >= 2 and min(waits[:2]) >= 1.0
    assert any("429 and asks for 1 s" in line for line in said), said
    removed(client, "a/limited:latest")


def test_a_429_that_does_not_end_is_the_hosts_fault_and_no_quarantine(
    daemon: str, door: Door, tmp_path: Path
) -> None:
    door.answer = lambda request: web.Response(status=429, headers={"Retry-After": "30"})

    async def run() -> None:
        async with provider(daemon, tmp_path, [], mirror=door.address, pull_timeout_s=2.0) as made:
            began = time.monotonic()
            with pytest.raises(InfraError, match=r"given up after 1 tries.*429") as caught:
                await made.images.ensure("a/limited2")
            assert caught.value.cause == "registry" and time.monotonic() - began < 2
            assert made.images.quarantine == {}

    asyncio.run(run())


def test_nobody_listens(daemon: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with provider(daemon, tmp_path, [], mirror="127.0.0.1:9", pull_timeout_s=3.0) as made:
            with pytest.raises(InfraError, match=r"a/b:latest from 127\.0\.0\.1:9"):
                await made.images.ensure("a/b")

    asyncio.run(run())


def test_a_login_is_used_and_never_told(
    client: Any, daemon: str, docker_image: str, door: Door, registry: str, tmp_path: Path
) -> None:
    publish(client, registry, docker_image, "a/private", "secret")
    seen: list[str] = []

    def answer(request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") == "Basic bWU6cGFzc3dvcmQ=":  # me:password
            seen.append(request.method)
            return None
        return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})

    door.answer = answer
    file = tmp_path / "logins.json"
    file.write_text(json.dumps({"auths": {door.address: {"auth": "bWU6cGFzc3dvcmQ="}}}))

    async def run() -> None:
        name = f"{door.address}/a/private"
        async with provider(daemon, tmp_path, [], login_file=str(file)) as made:
            assert await made.images.ensure(name)
        removed(client, f"{name}:latest")
        async with provider(daemon, tmp_path, []) as made:
            with pytest.raises(ImageError, match=r"401: it needs a login .*image_login_file"):
                await made.images.ensure(name)

    asyncio.run(run())
    assert "HEAD" in seen and "GET" in seen


def test_the_disk_budget_takes_the_longest_unused(
    client: Any, daemon: str, docker_image: str, registry: str, tmp_path: Path
) -> None:
    names = [f"{registry}/a/big{n}" for n in range(3)]
    for number, name in enumerate(names):
        publish(client, registry, docker_image, name.partition("/")[2], str(number))
    base = client.inspect_image(docker_image)["Size"]
    said: list[str] = []

    def here() -> list[int]:
        return [n for n, name in enumerate(names) if client.images(name=f"{name}:latest")]

    async def run() -> None:
        budget = 2.5 * base / 1e9
        async with provider(daemon, tmp_path, said, disk_gb=budget) as made:
            layer = tmp_path / "layer"
            layer.mkdir()
            first = await made.create(spec(names[0], layers=(str(layer),)))
            await first.destroy()  # a layered image was made of it: it goes along
            await made.images.ensure(names[1])
            await made.images.ensure(names[2])
            assert here() == [1, 2]
            box = await made.create(spec(names[1]))  # in use: stays, though it is the oldest
            made.images._shelf.note(f"{names[2]}:latest", base)
            await made.images.ensure(names[0])
            assert here() == [0, 1]
            assert (await box.exec("cat /mark")).output == "1\n"
            assert client.inspect_image(docker_image), "not pulled by us: never removed"

    asyncio.run(run())
    assert sum("disk budget" in line for line in said) == 2
    removed(client, *(f"{name}:latest" for name in names))


GIT = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"
HISTORY = f"""set -e
mkdir -p {WORKDIR} && cd {WORKDIR}
{GIT} init -q . && echo one > a.py && git add . && {GIT} commit -qm base && git rev-parse HEAD
echo future > a.py && {GIT} commit -qam 'the repair of tomorrow' && {GIT} tag v2
git checkout -q HEAD~1 2>/dev/null && echo env > built.txt
"""


def with_history(client: Any, image: str, tag: str) -> str:
    """Make an image whose repository knows its future; return the base commit."""
    container = client.create_container(image, ["sh", "-c", HISTORY], user="0:0")["Id"]
    client.start(container)
    assert client.wait(container)["StatusCode"] == 0, client.logs(container)
    client.commit(container, repository=tag.partition(":")[0], tag=tag.partition(":")[2])
    commit = client.logs(container, stderr=False).decode().split()[0]
    client.remove_container(container, force=True)
    return commit


def test_an_image_is_made_ready_once(
    client: Any, daemon: str, docker_image: str, tmp_path: Path
) -> None:
    """No commit of tomorrow is left; what the image built is a commit; uid 1 owns the tree."""
    commit = with_history(client, docker_image, "history:1")

    async def run() -> None:
        async with provider(daemon, tmp_path, []) as made:
            ready, same = await asyncio.gather(
                *(made.images.prepare("history:1", workdir=WORKDIR, commit=commit) for _ in "ab")
            )
            assert ready == same
            box = await made.create(spec(ready.image, workdir=WORKDIR))
            look = "git log --all --format=%s; git tag; cat a.py built.txt; git status --short"
            env = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory"}
            env["GIT_CONFIG_VALUE_0"] = "*"
            done = await box.exec(look, env=env)
            assert done.output == "Environment of the image\nbase\none\nenv\n"
            done = await box.exec("git rev-parse HEAD; echo more >> a.py && echo ok", env=env)
            assert done.output == f"{ready.commit}\nok\n"
            client.remove_image(ready.image, force=True)  # as the disk budget would
            await box.destroy()
            again = await made.create(spec(ready.image, workdir=WORKDIR))
            assert (await again.exec("cat a.py")).output == "one\n"
            with pytest.raises(ImageError, match=r"history:1.* does not have the base commit"):
                await made.images.prepare("history:1", workdir=WORKDIR, commit="0" * 40)
            with pytest.raises(ImageError, match="no folder /nowhere"):
                await made.images.prepare("history:1", workdir="/nowhere", commit=commit)
            assert len(made.images.quarantine) == 2
        async with provider(daemon, tmp_path, []) as made:  # another process: only looked up
            began = time.monotonic()
            assert await made.images.prepare("history:1", workdir=WORKDIR, commit=commit) == ready
            assert time.monotonic() - began < 1.0

    asyncio.run(run())
    removed(client, "history:1")
