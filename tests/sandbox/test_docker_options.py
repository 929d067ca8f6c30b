"""The docker backend's options: where a daemon is found, read-only roots, runtimes, layers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from skyrl_jax.core.errors import ImageError, InfraError
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.docker_daemon import (
    DaemonFacts,
    DockerOptions,
    check_address,
    find_daemon,
)
from tests.sandbox.conftest import CACHE, Backend

pytestmark = pytest.mark.xdist_group("sandbox")


def _socket(path: Path) -> contextlib.closing[socket.socket]:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return contextlib.closing(made)


def test_a_daemon_is_found_by_name_or_by_its_socket(tmp_path: Path) -> None:
    root, user = str(tmp_path), tmp_path / "u"
    environ = {"XDG_RUNTIME_DIR": str(user)}
    with pytest.raises(InfraError, match=r"podman/podman\.sock.*podman system service"):
        find_daemon(environ, root)
    places = [
        tmp_path / "run/podman/podman.sock",
        user / "podman/podman.sock",
        user / "docker.sock",
        tmp_path / "var/run/docker.sock",
    ]
    with contextlib.ExitStack() as stack:
        for place in places:  # each goes before the ones that are there already
            stack.enter_context(_socket(place))
            assert find_daemon(environ, root) == f"unix://{place}"
        assert find_daemon({**environ, "DOCKER_HOST": "tcp://h:1"}, root) == "tcp://h:1"
        assert find_daemon({}, root) == f"unix://{places[3]}"
    with pytest.raises(InfraError, match=r"'ssh://h' must begin with one of unix://"):
        find_daemon({"DOCKER_HOST": "ssh://h"}, root)
    assert check_address("unix:///x") == "unix:///x"


def _open(daemon: str, **options: Any) -> DockerProvider:
    return DockerProvider(
        run_id="options", cache_dir=CACHE, host=daemon, options=DockerOptions(**options)
    )


def test_a_runtime_that_the_daemon_lacks_is_named_with_those_it_has(daemon: str) -> None:
    async def enter(runtime: str) -> None:
        async with _open(daemon, runtime=runtime):
            pass

    with pytest.raises(InfraError, match=r"no runtime 'runsc'; it has: .*runc.*docker_runtime"):
        asyncio.run(enter("runsc"))
    asyncio.run(enter("runc"))


def test_the_runtime_is_the_containers(docker: Backend, daemon: str) -> None:
    async def run() -> None:
        async with _open(daemon, runtime="runc", connections=2) as provider:
            box = await provider.create(docker.spec())
            found = await provider.call(provider._client.inspect_container, box._container)
            assert found["HostConfig"]["Runtime"] == "runc"
            assert found["HostConfig"]["LogConfig"]["Type"] == "none"
            await box.destroy()

    asyncio.run(run())


def test_a_sandbox_without_a_network_has_its_own_loopback_and_nothing_else(
    docker: Backend, daemon: str
) -> None:
    connect = (
        "import socket; s = socket.create_server(('localhost', 8123)); "
        "socket.create_connection(('localhost', 8123)); print('reached')"
    )

    async def run() -> None:
        async with docker.make() as provider:
            one, two = [await provider.create(docker.spec()) for _ in range(2)]
            devices = await one.exec("tail -n +3 /proc/net/dev | cut -d: -f1; hostname")
            assert devices.output.split() == ["lo", "sandbox"]
            # the same port at the same time: each has a loopback of its own
            both = await asyncio.gather(
                *(box.exec(["python3", "-c", connect]) for box in (one, two))
            )
            assert [done.output for done in both] == ["reached\n"] * 2, both
            spaces = [(await box.exec("readlink /proc/self/ns/net")).output for box in (one, two)]
            assert len({*spaces, os.readlink("/proc/self/ns/net") + "\n"}) == 3
            await asyncio.gather(one.destroy(), two.destroy())

    asyncio.run(run())


def test_a_read_only_sandbox_writes_in_two_sized_places_alone(docker: Backend, daemon: str) -> None:
    async def run() -> None:
        async with _open(daemon, read_only=True) as provider:
            spec = docker.spec(disk_mb=8, best_effort=False)  # the disk limit is enforced
            box = await provider.create(spec)
            done = await box.exec("cat a.txt; echo new > a.txt; echo b > b.txt; cat a.txt; ls")
            assert done.output == "one\nnew\na.txt\nb.txt\n"
            for place in ("/usr", "/etc", "/var/tmp", "/"):
                done = await box.exec(f"echo x > {place}/x")
                assert done.returncode != 0 and "Read-only" in done.output, (place, done)
            for place in (".", "/tmp"):
                done = await box.exec(f"head -c 6000000 /dev/zero > {place}/big; ls -s {place}/big")
                assert "No space left" in done.output
            await box.exec("rm -f big /tmp/big")
            assert (await box.exec("cp /bin/true /tmp/t && /tmp/t && echo ran")).output == "ran\n"
            await box.put("/testbed", b"\0" * 10240)  # an empty tar
            again = await provider.create(spec)  # a fresh one
            assert (await again.exec("cat a.txt")).output == "one\n"
            for workdir in ("/", "/tmp"):
                with pytest.raises(InfraError, match="cannot be made a tmpfs"):
                    await provider.create(docker.spec(workdir=workdir))
            with pytest.raises(ImageError, match="has files in /usr/bin, which .*read_only"):
                await provider.create(docker.spec(workdir="/usr/bin"))
            await asyncio.gather(box.destroy(), again.destroy())
            assert provider.live == 0

    asyncio.run(run())


def test_a_tree_that_does_not_fit_is_said(docker: Backend, daemon: str, tmp_path: Path) -> None:
    (tmp_path / "big" / "testbed").mkdir(parents=True)
    (tmp_path / "big" / "testbed" / "f").write_bytes(b"x" * 3_000_000)

    async def run() -> None:
        async with _open(daemon, read_only=True) as provider:
            with pytest.raises(ImageError, match="does not fit into /testbed"):
                await provider.create(docker.spec(layers=(str(tmp_path / "big"),), disk_mb=4))
            assert provider.live == 0

    asyncio.run(run())


def test_layers_are_made_an_image_once_and_again_when_it_is_gone(
    docker: Backend, daemon: str, tmp_path: Path
) -> None:
    import docker as sdk

    client = sdk.APIClient(base_url=daemon)

    async def run() -> None:
        async with docker.make() as provider:
            spec = docker.spec()
            boxes = await asyncio.gather(*(provider.create(spec) for _ in range(3)))
            tag = await provider.layered(spec)
            images = {client.inspect_container(box._container)["Config"]["Image"] for box in boxes}
            assert images == {tag} and len(provider._layered) == 1
            assert [(await box.exec("cat a.txt")).output for box in boxes] == ["one\n"] * 3
            await asyncio.gather(*(box.destroy() for box in boxes))
            await asyncio.sleep(0.3)
            client.remove_image(tag, force=True)
            box = await provider.create(spec)  # somebody removed it: made once more
            assert (await box.exec("cat a.txt")).output == "one\n"
            await box.destroy()
        layer = Path(spec.layers[0])
        (layer / "testbed" / "a.txt").write_text("two\n")
        async with docker.make() as provider:  # another content has another name
            assert await provider.layered(spec) != tag
            box = await provider.create(spec)
            assert (await box.exec("cat a.txt")).output == "two\n"
            await box.destroy()

    asyncio.run(run())
    client.close()


def test_limits_that_a_daemon_lacks_must_be_accepted(tmp_path: Path) -> None:
    async def run() -> None:
        provider = DockerProvider(
            run_id="r", cache_dir=tmp_path, options=DockerOptions(read_only=True)
        )
        provider._facts = DaemonFacts(missing_limits=("memory_mb", "cpus"), maps_ids=True)
        assert provider.program_uid is None  # ids are mapped: nobody knows to which
        spec = SandboxSpec(image="i", workdir="/w")
        with pytest.raises(InfraError, match="cannot limit memory_mb, cpus"):
            await provider.create(spec)
        provider.disconnect()

    asyncio.run(run())
