"""Several sandbox hosts as one provider: placement, a host's death, its return."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_jax.core.config import LOCAL_ACTOR
from skyrl_jax.core.errors import CapacityError, ConfigError, ImageError, InfraError
from skyrl_jax.sandbox.factory import make_provider, resolve_image
from skyrl_jax.sandbox.fleet import FleetProvider
from skyrl_jax.sandbox.ray_hosts import RayProvider
from skyrl_jax.sandbox.remote import RemoteSandbox
from tests.sandbox.conftest import CACHE
from tests.sandbox.hosts import TOKEN, HostProcess, start_host, stop_host
from tests.sandbox.test_contract import nap, sleepers
from tests.sandbox.test_missing_parts import CONFIG
from tests.sandbox.test_remote import spec_of, until

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes


@pytest.fixture
def hosts(image: Path, tmp_path: Path) -> Iterator[list[HostProcess]]:
    """A host with room for two sandboxes and one with room for four, which alone has an image."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "rare").symlink_to(image)
    started = [start_host("--lease_s=8", "--capacity=2")]
    started.append(start_host("--lease_s=8", "--capacity=4", f"--images={tmp_path / 'images'}"))
    yield started
    for host in started:
        stop_host(host)


def urls(hosts: list[HostProcess]) -> list[str]:
    return [host.url for host in hosts]


def homes(boxes: list[RemoteSandbox]) -> Counter[str]:
    return Counter(box.host for box in boxes)


def test_sandboxes_go_where_there_is_most_room(hosts: list[HostProcess], layer: Path) -> None:
    small, large = urls(hosts)

    async def run() -> None:
        async with FleetProvider([small, large + "/", small], token=TOKEN) as fleet:
            assert fleet.hosts == {small: "", large: ""} and fleet.program_uid is None
            boxes = [await fleet.create(spec_of(layer)) for _ in range(3)]
            assert homes(boxes) == {small: 1, large: 2}
            more = [fleet.create(spec_of(layer)) for _ in range(4)]
            made = await asyncio.gather(*more, return_exceptions=True)
            full = [box for box in made if isinstance(box, BaseException)]
            assert [type(error) for error in full] == [CapacityError] and fleet.live == 6
            boxes += [box for box in made if isinstance(box, RemoteSandbox)]
            assert homes(boxes) == {small: 2, large: 4}
            done = await asyncio.gather(*(box.exec("cat a.txt") for box in boxes))
            assert {result.output for result in done} == {"one\n"}
            await boxes[0].destroy()
            assert (await fleet.create(spec_of(layer))).host == boxes[0].host
        assert fleet.live == 0

    asyncio.run(run())


def test_a_host_that_has_the_image_is_preferred(hosts: list[HostProcess], layer: Path) -> None:
    small, large = urls(hosts)

    async def run() -> None:
        async with FleetProvider([small, large], token=TOKEN) as fleet:
            spec = dict(image="rare")
            boxes = [await fleet.create(_with(layer, **spec)) for _ in range(3)]
            assert homes(boxes) == {large: 3}  # though the other one is empty, and 75 % are in use
            with pytest.raises(ImageError):
                await fleet.create(_with(layer, image="nowhere"))
            with pytest.raises(InfraError, match="cannot share"):
                await fleet.create(_with(layer, shared="/tmp"))

    asyncio.run(run())


def _with(layer: Path, **changes: Any) -> Any:
    return dataclasses.replace(spec_of(layer), **changes)


def test_a_dead_host_is_left_out_and_comes_back(hosts: list[HostProcess], layer: Path) -> None:
    small, large = urls(hosts)

    async def run() -> None:
        async with FleetProvider([small, large], token=TOKEN) as fleet:
            boxes = [await fleet.create(spec_of(layer)) for _ in range(3)]
            (lost,) = (box for box in boxes if box.host == small)
            kept = next(box for box in boxes if box.host == large)
            running = asyncio.ensure_future(lost.exec(nap(98781), timeout_s=600))
            other = asyncio.ensure_future(kept.exec("sleep 3; echo kept"))
            await until(lambda: bool(sleepers(nap(98781))))
            hosts[0].kill()
            with pytest.raises(InfraError):
                await asyncio.wait_for(running, 5)
            moved = [await fleet.create(spec_of(layer)) for _ in range(2)]
            assert homes(moved) == {large: 2}
            await until(lambda: bool(fleet.hosts[small]))
            with pytest.raises(CapacityError):
                await fleet.create(spec_of(layer))
            assert (await other).output == "kept\n"
            port = int(small.rpartition(":")[2])
            flags = ("--lease_s=8", "--capacity=2")
            hosts[0] = await asyncio.to_thread(start_host, *flags, port=port)
            await until(lambda: not fleet.hosts[small])
            assert (await fleet.create(spec_of(layer))).host == small
            with pytest.raises(InfraError):
                await lost.exec("true")  # the host is back, the sandbox is not

    asyncio.run(run())


def test_hosts_come_and_go(hosts: list[HostProcess], layer: Path) -> None:
    small, large = urls(hosts)

    async def run() -> None:
        async with FleetProvider([small], token=TOKEN) as fleet:
            box = await fleet.create(spec_of(layer))
            await fleet.add(large)
            assert (await fleet.create(spec_of(layer))).host == large
            running = asyncio.ensure_future(box.exec(nap(98782), timeout_s=600))
            await until(lambda: bool(sleepers(nap(98782))))
            fleet.remove(small, "its node was lost")
            with pytest.raises(InfraError, match="its node was lost"):
                await asyncio.wait_for(running, 5)
            assert list(fleet.hosts) == [large]
            with pytest.raises(InfraError):
                await fleet.add("http://127.0.0.1:9")
            assert list(fleet.hosts) == [large]

    asyncio.run(run())


def test_no_host_and_the_wrong_token(hosts: list[HostProcess], layer: Path) -> None:
    async def run() -> None:
        with pytest.raises(InfraError, match=r"no sandbox host answers: http://127.0.0.1:9: .*"):
            async with FleetProvider(["http://127.0.0.1:9", "http://127.0.0.1:7"], token=TOKEN):
                pass
        with pytest.raises(InfraError, match="FILE must hold"):
            async with FleetProvider(urls(hosts), token="wrong", token_name="FILE"):
                pass
        both = ["http://127.0.0.1:9", hosts[1].url]
        async with FleetProvider(both, token=TOKEN) as fleet:  # one of them is enough
            assert fleet.hosts[both[0]] and not fleet.hosts[both[1]]
            await fleet.create(spec_of(layer))
            hosts[1].kill()
            await until(lambda: all(fleet.hosts.values()))
            with pytest.raises(InfraError, match="no sandbox host is up: .*nobody listens"):
                await fleet.create(spec_of(layer))

    asyncio.run(run())


def test_the_factory_makes_a_fleet_and_names_its_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("wrong")
    file.chmod(0o600)
    config = dataclasses.replace(
        CONFIG, backend="remote", hosts=("http://127.0.0.1:9",), token_file=str(file)
    )
    made = make_provider(config, run_id="r", cache_dir=CACHE)
    assert isinstance(made, FleetProvider) and made.live == 0
    assert resolve_image(config, CACHE) == ""  # each host's own
    assert resolve_image(dataclasses.replace(config, image="rare"), CACHE) == "rare"
    with pytest.raises(ConfigError, match="SKYRL_SANDBOX_TOKEN"):
        make_provider(dataclasses.replace(config, token_file=""), run_id="r", cache_dir=CACHE)
    ray = dataclasses.replace(LOCAL_ACTOR, runtime="ray")
    assert isinstance(make_provider(CONFIG, run_id="r", cache_dir=CACHE, actor=ray), RayProvider)
    assert resolve_image(CONFIG, CACHE, ray) == ""
