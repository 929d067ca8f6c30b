"""What a cluster adds: one host a node, a node killed in the middle, its host placed anew."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_jax.core.errors import InfraError
from skyrl_jax.sandbox.factory import make_provider
from skyrl_jax.sandbox.ray_hosts import RayProvider
from tests.lanes.ray.conftest import actor_config, add_node, provider
from tests.sandbox.conftest import CACHE
from tests.sandbox.test_contract import nap, sleepers
from tests.sandbox.test_missing_parts import CONFIG
from tests.sandbox.test_remote import spec_of, until


def host_pids(fleet: RayProvider) -> list[int]:
    """The processes of the hosts' actors."""
    return [ray.get(placed.actor.ping.remote()) for placed in fleet._placed.values()]


def test_a_killed_node_fails_its_sandboxes_and_its_host_is_placed_anew(
    cluster: Any, layer: Path
) -> None:
    spare = add_node(cluster)  # three nodes, two hosts
    assert spare

    async def run() -> None:
        async with provider(ray_hosts=2) as fleet:
            assert list(fleet.hosts.values()) == ["", ""]
            boxes = [await fleet.create(spec_of(layer)) for _ in range(4)]
            assert sorted(Counter(box.host for box in boxes).values()) == [2, 2]
            running = [
                asyncio.ensure_future(box.exec(f"{nap(98791)}; echo no", timeout_s=600))
                for box in boxes
            ]
            await until(lambda: len(sleepers(nap(98791))) >= 4)
            (node,) = [
                found
                for found in cluster.worker_nodes
                if found.node_id == next(iter(fleet._placed))
            ]
            lost = fleet._placed[node.node_id].url
            began = time.monotonic()
            await asyncio.to_thread(cluster.remove_node, node, False)  # not gracefully
            failed = [task for task, box in zip(running, boxes, strict=True) if box.host == lost]
            done, _ = await asyncio.wait(failed, timeout=30)
            assert len(done) == 2
            for task in done:
                with pytest.raises(InfraError):
                    task.result()
            print(f"blamed after {time.monotonic() - began:.1f} s")
            await until(lambda: len(fleet.hosts) == 2 and lost not in fleet.hosts, 60)
            print(f"placed anew after {time.monotonic() - began:.1f} s")
            kept = [task for task, box in zip(running, boxes, strict=True) if box.host != lost]
            assert not any(task.done() for task in kept)
            more = [await fleet.create(spec_of(layer)) for _ in range(2)]
            fresh = set(fleet.hosts) - {box.host for box in boxes}
            assert {box.host for box in more} == fresh  # the emptiest
            assert (await more[0].exec("cat a.txt")).output == "one\n"
            for task in kept:
                task.cancel()

    asyncio.run(run())
    asyncio.run(until(lambda: sleepers(nap(98791)) == []))


def test_a_killed_actor_is_replaced_on_its_node(cluster: Any, layer: Path) -> None:
    async def run() -> None:
        async with provider(ray_hosts=1) as fleet:
            box = await fleet.create(spec_of(layer))
            (pid,) = host_pids(fleet)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(InfraError):
                await box.exec("sleep 5")
            await until(
                lambda: list(fleet.hosts.values()) == [""] and box.host not in fleet.hosts, 60
            )
            assert (await (await fleet.create(spec_of(layer))).exec("echo hi")).output == "hi\n"

    asyncio.run(run())


def test_a_new_node_gets_a_host_and_the_end_leaves_none(cluster: Any, layer: Path) -> None:
    async def run() -> None:
        async with provider() as fleet:  # one on every node that can
            before = len(fleet.hosts)
            add_node(cluster)  # Ray sets signal handlers: in this thread
            await until(lambda: len(fleet.hosts) == before + 1, 60)
            await fleet.create(spec_of(layer))
            pids = host_pids(fleet)
        assert fleet.live == 0
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

    asyncio.run(run())
    assert ray.is_initialized()  # it was not ours to leave


def test_no_node_that_can_and_no_cluster(cluster: Any) -> None:
    async def enter(made: RayProvider) -> None:
        async with made:
            pass

    with pytest.raises(InfraError, match="no living node has the resource 'gold'"):
        asyncio.run(enter(provider(ray_resource="gold")))
    with pytest.raises(
        InfraError, match="no node .* took a sandbox host: .*no such backend|--backend"
    ):
        broken = RayProvider(
            actor_config(), backend="no such backend", run_id="lane", cache_dir=CACHE
        )
        asyncio.run(enter(broken))


def test_the_configuration_makes_it(cluster: Any) -> None:
    made = make_provider(CONFIG, run_id="r", cache_dir=CACHE, actor=actor_config())
    assert isinstance(made, RayProvider) and made.program_uid is None
