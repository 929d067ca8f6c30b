# ruff: noqa: F811
"""The twenty faults of sandboxes that users of other systems hit: one test each, by their number.

The symptom is in our words at the top of each test. Rows that a whole test file is about have a
short test here that drives the same code, so that none of the twenty can go missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import docker as docker_sdk
import pytest

from skyrl_jax.batching.advantages import group_advantages
from skyrl_jax.core.errors import HostError, ImageError, InfraError, SandboxGone
from skyrl_jax.core.types import Status
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.reaper import LABEL_HOST, LABEL_RUN, LABEL_UID, boot_id
from skyrl_jax.tasks.swe.diffs import change_diff, new_file_diff
from skyrl_jax.tasks.swe.suite import hidden_files, task_row
from tests.actor.fakes import FakeSuite, raising
from tests.actor.fakes import run as collect_fakes
from tests.sandbox.conftest import (  # noqa: F401
    CACHE,
    Backend,
    backend,
    bwrap,
    daemon,
    docker,
    docker_image,
    image,
    isolated,
    layer,
    sandbox_host,
)
from tests.sandbox.daemon_proxy import DaemonProxy
from tests.sandbox.dockerd import PrivateDaemon, build_image
from tests.sandbox.test_contract import nap, sleepers
from tests.tasks.worlds import in_bwrap, make_suite

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes

CGROUPS = Path("/sys/fs/cgroup")
DEAD = "dead.4194304.1.abcdef"  # a run whose owner cannot live: pids end below


def in_box(backend: Backend, work, **changes) -> None:
    """Run ``work(box)`` in a sandbox; it must be gone afterwards."""

    async def run() -> None:
        async with asyncio.timeout(60), backend.box(**changes) as box:
            await work(box)

    asyncio.run(run())


def labelled(host: str, run: str) -> list[str]:
    """Ids of the containers of a run."""
    client = docker_sdk.APIClient(base_url=host, timeout=30)
    with contextlib.closing(client):
        found = client.containers(all=True, filters={"label": f"{LABEL_RUN}={run}"})
    return [item["Id"] for item in found]


def test_row_1_a_command_past_its_time_goes_on_inside(isolated: Backend) -> None:
    async def work(box) -> None:
        done = await box.exec(f"echo begun; {nap(77011)}", timeout_s=0.4)
        assert done.timed_out and done.returncode == 137 and done.output == "begun\n"
        assert sleepers(nap(77011)) == []
        assert (await box.exec("echo next")).output == "next\n"

    in_box(isolated, work)


def test_row_2_children_in_their_own_session_outlive_their_command(isolated: Backend) -> None:
    daemon_of_two_forks = (
        "import os\n"
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        f"  os.execvp('sleep', ['sleep', '77022.{os.getpid()}'])\n"
    )

    async def work(box) -> None:
        done = await box.exec(f"setsid {nap(77021)} & nohup {nap(77023)} >/dev/null & echo on")
        assert done.output == "on\n"
        assert (await box.exec(["python3", "-S", "-c", daemon_of_two_forks])).returncode == 0
        done = await box.exec(
            f"setsid {nap(77024)} & timeout -s KILL 9 {nap(77025)}", timeout_s=0.3
        )
        assert done.timed_out
        assert not any(sleepers(nap(number)) for number in range(77021, 77026))

    in_box(isolated, work)


def test_row_3_kill_of_everything_stops_the_container(isolated: Backend) -> None:
    async def work(box) -> None:
        done = await box.exec("sleep 60 & kill -9 -1; kill -9 1; kill -TERM 1; echo survived")
        assert "survived" in done.output
        assert (await box.exec("echo next")).output == "next\n"

    in_box(isolated, work)


def test_row_4_a_kill_for_memory_is_a_bare_137(isolated: Backend) -> None:
    async def work(box) -> None:
        done = await box.exec(["python3", "-S", "-c", "x = bytearray(300 << 20)"])
        assert done.returncode == 137 and done.oom_killed
        done = await box.exec("kill -9 $$")
        assert done.returncode == 137 and not done.oom_killed

    in_box(isolated, work, memory_mb=64)


def test_row_5_a_fork_bomb_takes_the_host(isolated: Backend) -> None:
    async def work(box) -> None:
        before = len(os.listdir("/proc"))
        running = asyncio.ensure_future(
            box.exec(["bash", "-c", "b() { b | b & }; b 2>/dev/null; sleep 9"], timeout_s=1.0)
        )
        await asyncio.sleep(0.5)
        assert len(os.listdir("/proc")) < before + 400  # other tests' processes come and go
        await running
        assert int((await box.exec("ls -d /proc/[0-9]* | wc -l")).output) <= 5

    in_box(isolated, work, pids=32)


def test_row_6_output_of_megabytes_without_a_newline(isolated: Backend) -> None:
    async def work(box) -> None:
        for size in (2_000_000, 20_000_000):
            began = time.monotonic()
            done = await box.exec(f"head -c {size} /dev/zero | tr '\\0' x", max_output_bytes=100)
            assert done.truncated and done.output.startswith("x" * 50 + "\n[... ")
            assert f"{size - 100} bytes cut" in done.output and done.output.endswith("x" * 50)
            assert time.monotonic() - began < 8  # test_contract has the second; here: not for ever

    in_box(isolated, work)


def test_row_7_output_that_is_no_text(isolated: Backend) -> None:
    async def work(box) -> None:
        done = await box.exec(r"printf '\377\376\0a\200'; head -c 4096 /dev/urandom")
        assert done.returncode == 0 and done.output.startswith("\ufffd\ufffd\0a\ufffd")
        assert (await box.exec("echo next")).output == "next\n"

    in_box(isolated, work)


def test_row_8_a_command_that_reads_its_input(isolated: Backend) -> None:
    async def work(box) -> None:
        began = time.monotonic()
        for command in ("cat", "read -r line; echo $?", "python3 -S -c 'print(input())'"):
            assert not (await box.exec(command, timeout_s=20)).timed_out
        assert time.monotonic() - began < 10

    in_box(isolated, work)


def test_row_9_a_shell_that_is_left_or_hardened_is_lost(isolated: Backend) -> None:
    async def work(box) -> None:
        for command, code in (("exit 3", 3), ("exec true", 0), ("set -e; false; echo no", 1)):
            assert (await box.exec(command)).returncode == code
            assert (await box.exec("false; echo next")).output == "next\n"
        await box.exec("cd /; export A=1; alias ls=false")
        assert (await box.exec("pwd; echo $A")).output == "/testbed\n\n"

    in_box(isolated, work)


def test_row_10_a_full_disk(isolated: Backend) -> None:
    full = "File size limit|File too large" if isolated.kind == "docker" else "No space left"

    async def work(box) -> None:
        done = await box.exec("head -c 20000000 /dev/zero > big")
        assert done.returncode != 0 and (re.search(full, done.output) or done.returncode == 153)
        done = await box.exec("head -c 100000000 /dev/zero > /dev/shm/big; rm -f big /dev/shm/big")
        assert (await box.exec("echo ok > small && cat small")).output == "ok\n"
        assert await box.get("/testbed/small")

    in_box(isolated, work, disk_mb=8)


def test_row_11_a_container_is_removed_while_a_command_runs(docker: Backend, daemon: str) -> None:
    async def work(box) -> None:
        running = asyncio.ensure_future(box.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.2)
        argv = ["docker", "-H", daemon, "rm", "-f", box._container]
        began = time.monotonic()
        await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=60)
        with pytest.raises(SandboxGone) as caught:
            await running
        assert not caught.value.certain and time.monotonic() - began < 15
        with pytest.raises(SandboxGone):
            await box.exec("true")

    in_box(docker, work)


def test_row_12_a_daemon_that_hangs(docker: Backend, daemon: str, tmp_path: Path) -> None:
    """Every call has a deadline, also that of removal; what it could not do is done at the end."""

    async def run() -> str:
        proxy = DaemonProxy(daemon.removeprefix("unix://"))
        host = f"unix://{tmp_path}/d.sock"
        provider = DockerProvider(run_id="row12", cache_dir=CACHE, host=host, call_timeout_s=1.5)
        async with proxy.serve(f"{tmp_path}/d.sock"), provider:
            box = await provider.create(docker.spec())
            proxy.mode = "hang"
            for call in (lambda: provider.create(docker.spec()), box.destroy):
                began = time.monotonic()
                with pytest.raises(InfraError, match="docker at"):
                    await call()
                assert time.monotonic() - began < 8
            while labelled(daemon, provider._run):  # its input ended: it removes itself
                assert time.monotonic() - began < 15
                await asyncio.sleep(0.1)
            proxy.mode = "pass"
        return provider._run

    assert labelled(daemon, asyncio.run(run())) == []


@pytest.mark.timeout(240)
def test_row_12_a_daemon_that_is_restarted(docker: Backend, image: Path) -> None:
    private = PrivateDaemon()

    async def run() -> str:
        made = DockerProvider(
            run_id="row12r", cache_dir=CACHE, host=private.host, call_timeout_s=20.0
        )
        async with made as provider:
            for kill in (False, True):
                box = await provider.create(docker.spec())
                running = asyncio.ensure_future(box.exec("sleep 60", timeout_s=60))
                await asyncio.sleep(0.2)
                await asyncio.to_thread(private.stop, kill=kill)
                with pytest.raises((HostError, SandboxGone)) as caught:
                    await asyncio.wait_for(running, 30)
                assert not getattr(caught.value, "certain", False)
                with contextlib.suppress(HostError):
                    await box.destroy()
                await asyncio.to_thread(private.start)
            box = await provider.create(docker.spec())
            assert (await box.exec("echo back")).output == "back\n"
            await box.destroy()
        return provider._run

    try:
        private.start()
        build_image(private.host, image)
        run_name = asyncio.run(run())
        assert labelled(private.host, run_name) == []
    finally:
        private.close()


def test_row_13_creation_breaks_half_way(docker: Backend, daemon: str) -> None:
    """A layer that is missing leaves no container; nor does an owner killed before its start."""
    dead = {LABEL_RUN: DEAD, LABEL_HOST: boot_id(), LABEL_UID: str(os.geteuid())}
    client = docker_sdk.APIClient(base_url=daemon, timeout=30)

    async def run() -> None:
        async with docker.make() as provider:
            with pytest.raises(ImageError, match="no-such"):
                await provider.create(docker.spec(layers=("/no-such",)))
            assert labelled(daemon, provider._run) == []
            alive = await provider.create(docker.spec())
            client.create_container(docker.spec().image, ["true"], labels=dead)
            foreign = client.create_container(
                docker.spec().image, ["true"], labels={**dead, LABEL_UID: "12345"}
            )["Id"]
            assert len(labelled(daemon, DEAD)) == 2
            async with docker.make():  # the next run starts
                assert labelled(daemon, DEAD) == [foreign]  # another user's: hands off
            client.remove_container(foreign)
            assert (await alive.exec("echo alive")).output == "alive\n"

    with contextlib.closing(client):
        asyncio.run(run())


def test_row_14_zombies_pile_up(isolated: Backend) -> None:
    orphans = "for i in 1 2 3 4 5 6 7 8; do (sh -c 'sleep 0.05 & exit' &) ; done; sleep 0.4"
    states = "cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -c1"

    async def work(box) -> None:
        for _ in range(3):
            done = await box.exec(f"{orphans}; {states}")
            assert "Z" not in done.output.split(), done.output
        assert "Z" not in (await box.exec(states)).output.split()

    in_box(isolated, work, pids=40)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("manner", ["mute", "cut", "slow"])
def test_row_15_the_server_is_lost_while_it_makes_a_sandbox(
    docker: Backend, daemon: str, tmp_path: Path, manner: str, first: bool
) -> None:
    """The daemon made the container and its answer is lost: it is found by its name and removed.

    ``first``: the container is that in which the image with the task's layers is made.
    """
    layer = tmp_path / "mine"
    (layer / "testbed").mkdir(parents=True)
    (layer / "testbed" / "new").write_text(f"{manner} {first} {time.time()}")
    spec = docker.spec(layers=(str(layer),))

    async def run() -> None:
        proxy = DaemonProxy(daemon.removeprefix("unix://"))
        host = f"unix://{tmp_path}/d.sock"
        provider = DockerProvider(run_id="row15", cache_dir=CACHE, host=host, call_timeout_s=4.0)
        async with proxy.serve(f"{tmp_path}/d.sock"), provider:
            if not first:
                await provider.layered(spec)
                proxy.requests.clear()
            proxy.mode, proxy.match = manner, "/containers/create"
            began = time.monotonic()
            if manner == "slow":
                box = await provider.create(spec)
                assert (await box.exec("echo here")).output == "here\n"
                await box.destroy()
            else:
                with pytest.raises(InfraError, match="docker at"):
                    await provider.create(spec)
            assert time.monotonic() - began < 10
            while labelled(daemon, provider._run):
                assert time.monotonic() - began < 15
                await asyncio.sleep(0.1)
            made = len([line for line in proxy.requests if proxy.match in line])
            assert made == (2 if first and manner == "slow" else 1)

    asyncio.run(run())


def test_row_16_a_storm_of_starts() -> None:
    """Forty episodes at once: no more are made at a time than the gate lets through."""
    now, most = 0, 0

    async def init(_: str) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1

    suite = FakeSuite(hooks={"init": init})
    collected, _ = collect_fakes(
        suite, tasks=20, samples=2, init_concurrency=3, live_sandboxes=12, grade_concurrency=3
    )
    assert most == 3 and suite.most_open <= 12
    assert not collected.failures and len(collected.groups) == 20


def test_row_17_the_tests_are_forged(tmp_path: Path) -> None:
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    row = task_row(task)
    path, before = row.extra["path"], row.extra["files"][row.extra["path"]]
    (hidden,) = hidden_files(row)
    lines = "".join(f"PASSED {name}\\n" for name in (*row.fail_to_pass, *row.pass_to_pass))
    names = [name.partition("::")[2] for name in (*row.fail_to_pass, *row.pass_to_pass)]
    diffs = [
        change_diff(path, before, f'import os\nos.write(1, b"{lines}")\n' + before),
        change_diff(path, before, f'import os\nos.write(1, b"{lines}")\nos._exit(0)\n' + before),
        new_file_diff(hidden, "\n".join(f"def {name}(): pass" for name in names) + "\n"),
    ]

    async def work(provider):
        return [await suite.reward(task, diff, provider) for diff in (row.patch, *diffs)]

    scores = in_bwrap(work)
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0]


def test_row_18_patches_that_are_no_patches(tmp_path: Path) -> None:
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    row = task_row(task)
    (tmp_path / "b.bin").write_bytes(bytes(range(256)))
    argv = ["git", "diff", "--no-index", "--binary", "/dev/null", "b.bin"]
    made = subprocess.run(argv, cwd=tmp_path, capture_output=True, timeout=30, text=True)
    binary = made.stdout
    assert "GIT binary patch" in binary
    wanted = {
        "": "empty",
        " \n": "empty",
        "this is no diff\n": "no_apply",
        row.patch.replace(row.extra["buggy_line"], "not in the file"): "no_apply",
        row.patch.replace("\n", "\r\n"): "no_apply",
        binary: "unresolved",
        row.patch + binary: "resolved",
    }

    async def work(provider):
        return [await suite.reward(task, diff, provider) for diff in wanted]

    assert [score.verdict for score in in_bwrap(work)] == list(wanted.values())


@pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups")
def test_row_19_a_crash_leaves_mounts_and_cgroups(bwrap: Backend) -> None:
    """A cgroup of a dead run with a process in it; mounts end with their namespace."""
    roots = [CGROUPS] if (CGROUPS / "cgroup.controllers").exists() else [CGROUPS / "pids"]
    left = [root / "skyrl" / f"{DEAD}.0" for root in roots]
    for path in left:
        path.mkdir(parents=True)
    sleeper = subprocess.Popen(["sleep", "60"])
    (left[0] / "cgroup.procs").write_text(str(sleeper.pid))

    async def run() -> None:
        async with bwrap.make() as provider:
            assert sleeper.wait(timeout=10) == -signal.SIGKILL
            assert not any(path.exists() for path in left)
            box = await provider.create(bwrap.spec())
            assert "skyrl-stage" not in Path("/proc/self/mountinfo").read_text()
            os.kill(box._pid, signal.SIGKILL)  # the launcher
            await box.destroy()
            own = f"{provider._cgroups.run}.*"
            assert not [*CGROUPS.glob(f"*/skyrl/{own}"), *CGROUPS.glob(f"skyrl/{own}")]

    asyncio.run(run())


def test_row_20_a_fault_of_the_host_becomes_reward_0() -> None:
    suite = FakeSuite(hooks={"run": raising(InfraError("daemon gone", cause="docker"), times=1)})
    collected, _ = collect_fakes(suite, samples=3, live_sandboxes=1)
    (group,) = collected.groups
    failed = [item for item in group.trajectories if item.episode.status is Status.FAILED]
    assert len(failed) == 1 and failed[0].score is None
    assert failed[0].episode.reason == "infra:docker" and collected.failures == {"infra:docker": 1}
    advantages = group_advantages(group, "grpo")
    assert len(advantages) == 2 and set(advantages.values()) == {0.0}


def test_none_of_the_twenty_is_missing() -> None:
    rows = {
        int(match[1])
        for name in dir(sys.modules[__name__])
        if (match := re.match(r"test_row_(\d+)_", name))
    }
    assert rows == set(range(1, 21))
