"""kill -9 of the owner: within 15 s, with no restart, nothing is left; and what a restart reaps."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_jax.core.errors import InfraError, SandboxGone
from skyrl_jax.sandbox import bwrap as bwrap_backend
from skyrl_jax.sandbox import wire
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.cgroup import (
    CgroupTree,
    OomCounter,
    find_cgroups,
    oom_kills,
    open_cgroups,
    owner_alive,
    run_name,
)
from skyrl_jax.sandbox.docker import DockerProvider, DockerSandbox
from tests.sandbox.conftest import CACHE, Backend, quiet_process_provider
from tests.sandbox.dockerd import REPO
from tests.sandbox.test_contract import sleepers

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes

CGROUPS = Path("/sys/fs/cgroup")
Owners = list[subprocess.Popen[bytes]]


def naps_of(owner: int) -> list[str]:
    """The commands that an owner's sandboxes run."""
    return sleepers(f"sleep 87651.{owner}") + sleepers(f"sleep 87652.{owner}")


def leftovers(owner: int) -> list[str]:
    """Processes, mounts and cgroup directories of a dead owner's sandboxes."""
    found = naps_of(owner) + sleepers(f"-p {owner} -t")
    found += [
        line for line in Path("/proc/mounts").read_text().splitlines() if "skyrl-stage" in line
    ]
    found += [str(path) for path in CGROUPS.glob(f"*/skyrl/owner.{owner}.*")]
    found += [str(path) for path in CGROUPS.glob(f"skyrl/owner.{owner}.*")]
    return found


@pytest.fixture
def owners() -> Iterator[Owners]:
    """The owners a test starts: none outlives it, whatever the test finds."""
    started: Owners = []
    yield started
    for owner in started:
        owner.kill()
        owner.wait(timeout=10)


def start_owner(backend: Backend, host: str, owners: Owners) -> subprocess.Popen[bytes]:
    spec = backend.spec()
    command = [sys.executable, "-W", "ignore", "-m", "tests.sandbox.owner", backend.kind]
    command += [spec.image, str(CACHE), spec.layers[0], host]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, start_new_session=True)
    owners.append(owner)
    assert owner.stdout is not None and owner.stdout.readline() == b"running\n"
    assert len(naps_of(owner.pid)) >= 6
    return owner


def test_nothing_is_left_when_the_owner_is_killed(
    local: Backend, daemon: str, owners: Owners
) -> None:
    owner = start_owner(local, daemon, owners)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(timeout=10)
    deadline = time.monotonic() + 15
    while (left := leftovers(owner.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    if local.kind == "docker":
        listed = ["docker", "-H", daemon, "ps", "-aq", "--filter", f"name=skyrl-owner-{owner.pid}-"]
        while subprocess.run(listed, capture_output=True, timeout=30).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_nothing_is_left_when_the_whole_process_group_is_killed(
    bwrap: Backend, owners: Owners
) -> None:
    owner = start_owner(bwrap, "", owners)
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait(timeout=10)
    deadline = time.monotonic() + 15
    while (left := leftovers(owner.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_supervisor_that_does_not_answer_is_ended_too(bwrap: Backend, owners: Owners) -> None:
    owner = start_owner(bwrap, "", owners)
    for run in (CGROUPS / "pids" / "skyrl").glob(f"owner.{owner.pid}.*/cgroup.procs"):
        for pid in run.read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/.skyrl/supervisor"):
                os.kill(int(pid), signal.SIGSTOP)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(timeout=10)
    deadline = time.monotonic() + 15
    while (left := leftovers(owner.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_killed_launcher_takes_its_sandbox_along_and_the_next_run_reaps(
    bwrap: Backend, owners: Owners
) -> None:
    owner = start_owner(bwrap, "", owners)
    os.kill(owner.pid, signal.SIGSTOP)  # or it would clean up itself
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            if line.startswith(b"launcher") and f"-p {owner.pid} -t".encode() in line:
                os.kill(int(entry.name), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while naps_of(owner.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert naps_of(owner.pid) == []
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(timeout=10)
    # cgroup directories are left: their watcher was killed (another run may reap them before us)

    async def next_run() -> None:
        async with BwrapProvider(run_id="next", cache_dir=CACHE):
            assert leftovers(owner.pid) == []

    asyncio.run(next_run())


def test_the_reaper_takes_dead_runs_only(tmp_path: Path) -> None:
    alive = run_name("r")
    ours = f"{alive}.7"
    for name in (ours, "r.4194304.1.abc.7", "something-else"):
        (tmp_path / "skyrl" / name / "inner").mkdir(parents=True)
    tree = CgroupTree(roots=(tmp_path,), version=1, run=alive)
    assert tree.reap() == 1
    assert {path.name for path in (tmp_path / "skyrl").iterdir()} == {ours, "something-else"}
    tree.close_run()
    assert [path.name for path in (tmp_path / "skyrl").iterdir()] == ["something-else"]


def test_run_names_tell_whether_their_owner_lives() -> None:
    name = run_name("my run/7")
    assert name.startswith("my-run-7.") and owner_alive(name)
    assert run_name("my run/7") != name  # two providers of one process
    label, pid, started, mark = name.split(".")
    assert not owner_alive(f"{label}.{pid}.{int(started) + 1}.{mark}")  # the pid was used again
    assert not owner_alive(f"{label}.4194304.1.{mark}")
    assert owner_alive("something-else")


def test_cgroup_files_of_both_versions(tmp_path: Path, bwrap: Backend) -> None:
    spec = bwrap.spec(memory_mb=2, pids=7, cpus=0.5)
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller).mkdir()
    tree = find_cgroups("r", tmp_path)
    assert tree is not None and tree.version == 1
    plan = tree.plan("3", spec)
    run = tree.run
    assert plan.directories == tuple(
        f"{tmp_path}/{c}/skyrl/{run}.3" for c in ("memory", "pids", "cpu")
    )
    values = {write.rsplit("/", 1)[1] for write in plan.writes}
    assert values == {"memory.limit_in_bytes=2097152", "pids.max=7", "cpu.cfs_quota_us=50000"}
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    tree = find_cgroups("r", tmp_path)
    assert tree is not None and tree.version == 2
    plan = tree.plan("3", spec)
    assert plan.directories == (f"{tmp_path}/skyrl/{tree.run}.3",)
    values = {write.rsplit("/", 1)[1] for write in plan.writes}
    assert values == {"memory.max=2097152", "pids.max=7", "cpu.max=50000 100000"}
    (tmp_path / "cgroup.controllers").write_text("cpuset io\n")
    assert find_cgroups("r", tmp_path) is None
    assert oom_kills(b"oom_kill_disable 0\nunder_oom 0\noom_kill 4\n") == 4
    assert oom_kills(b"low 0\noom 2\noom_kill 1\n") == 1


def test_who_is_to_blame_for_a_sandbox_that_ends(bwrap: Backend) -> None:
    """PID 1 killed (memory, say): the agent's doing. The launcher killed: the host's."""

    async def run() -> None:
        async with bwrap.make() as provider:
            for victim, blame in (("supervisor", SandboxGone), ("launcher", InfraError)):
                box = await provider.create(bwrap.spec())
                running = asyncio.ensure_future(box.exec("sleep 30"))
                await asyncio.sleep(0.2)
                (members,) = (CGROUPS / "pids" / "skyrl").glob(f"{provider._cgroups.run}.*/")
                pids = [int(pid) for pid in (members / "cgroup.procs").read_text().split()]
                lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
                supervisor = next(p for p in pids if lines[p].startswith(b"/.skyrl/supervisor"))
                os.kill(supervisor if victim == "supervisor" else box._pid, signal.SIGKILL)
                with pytest.raises(blame) as caught:
                    await running
                assert getattr(caught.value, "certain", True)
                with pytest.raises(blame):
                    await box.exec("true")
                await box.destroy()
                assert not members.exists()

    asyncio.run(run())


def test_a_sandbox_that_ends_without_a_word_is_not_surely_the_agents_doing(
    bwrap: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher gives no exit code: only the own OOM counter may say that it was the agent."""
    monkeypatch.setattr(bwrap_backend, "_VERDICT_TIMEOUT_S", 0.2)

    async def run() -> None:
        async with bwrap.make() as provider:
            for killed in (False, True):
                box = await provider.create(bwrap.spec())
                monkeypatch.setattr(box, "_reap", lambda: False)
                if killed:
                    monkeypatch.setattr(box._oom, "rose", lambda: True)
                box._channel.write_eof()
                await box._channel.closed
                with pytest.raises(SandboxGone) as caught:
                    await box.exec("true")
                assert caught.value.certain is killed
                monkeypatch.undo()
                await box.destroy()

    asyncio.run(run())


def test_a_container_that_ends_while_the_daemon_lives_is_not_surely_the_agents_doing(
    tmp_path: Path, bwrap: Backend
) -> None:
    """Somebody may have removed it; an OOM kill in its own cgroup is the agent's doing."""
    counter = tmp_path / "memory.events"

    async def run() -> None:
        provider = DockerProvider(run_id="r", cache_dir=tmp_path)
        provider._client = type("Client", (), {"ping": lambda self: True})()
        for kills in (0, 1):
            counter.write_text("oom_kill 0\n")
            box = DockerSandbox(provider, bwrap.spec(), lambda _: None)
            box._oom = OomCounter((str(counter),))
            counter.write_text(f"oom_kill {kills}\n")
            found = await box._end_cause()
            assert isinstance(found, SandboxGone) and found.certain is (kills == 1)
            box._oom.close()

    asyncio.run(run())


def test_a_removed_container_is_not_surely_the_agents_doing(docker: Backend, daemon: str) -> None:
    async def run() -> None:
        async with docker.make() as provider:
            box = await provider.create(docker.spec())
            running = asyncio.ensure_future(box.exec("sleep 30"))
            await asyncio.sleep(0.2)
            argv = ["docker", "-H", daemon, "rm", "-f", box._container]
            await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=60)
            with pytest.raises(SandboxGone) as caught:
                await running
            assert not caught.value.certain
            await box.destroy()

    asyncio.run(run())


def test_cgroups_that_refuse_are_no_cgroups(
    tmp_path: Path, bwrap: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v2 with processes beside the run's directory: EBUSY; the limits are best effort then."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    write = Path.write_text

    def busy(path: Path, text: str) -> int:
        if path.name == "cgroup.subtree_control":
            raise OSError(16, "Device or resource busy", str(path))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", busy)
    tree, why = open_cgroups("r", tmp_path)
    assert tree is None and why.endswith("cgroup.subtree_control: Device or resource busy")
    assert list((tmp_path / "skyrl").iterdir()) == []

    monkeypatch.setattr(bwrap_backend, "open_cgroups", lambda run_id: (tree, why))

    async def run() -> None:
        async with bwrap.make() as provider:
            with pytest.raises(InfraError, match="resource busy"):
                await provider.create(bwrap.spec())
            with pytest.warns(UserWarning, match="resource busy"):
                box = await provider.create(bwrap.spec(best_effort=True, memory_mb=1024))
            assert (await box.exec("echo hi")).output == "hi\n"
            await box.destroy()

    asyncio.run(run())


def test_a_sandbox_that_does_not_end_does_not_keep_the_others(
    bwrap: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        provider = bwrap.make()
        with pytest.raises(InfraError, match="will not end"):
            async with provider:
                bad, good = [await provider.create(bwrap.spec()) for _ in range(2)]
                end, slow = bad.destroy, good._destroy

                async def refuse() -> None:
                    await end()
                    raise InfraError("it will not end")

                async def later() -> None:
                    await asyncio.sleep(0.3)
                    await slow()

                monkeypatch.setattr(bad, "destroy", refuse)
                monkeypatch.setattr(good, "_destroy", later)
        assert provider.live == 0
        assert not list(CGROUPS.glob(f"*/skyrl/{provider._cgroups.run}*"))

    asyncio.run(run())


def test_processes_that_cannot_be_killed_are_the_hosts_fault(
    bwrap: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with bwrap.box() as box:
            parse = wire.parse_reply
            stuck = lambda data: dataclasses.replace(parse(data), flags=wire.STUCK)  # noqa: E731
            monkeypatch.setattr(wire, "parse_reply", stuck)
            with pytest.raises(InfraError, match="could not be killed") as caught:
                await box.exec("true")
            assert caught.value.cause == "stuck"

    asyncio.run(run())


def test_the_process_backend_removes_the_folders_of_dead_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / "skyrl-process-abc.run.4194304.1.abcdef"
    (dead / "testbed").mkdir(parents=True)
    others = {"skyrl-process-plain", "unrelated.run.4194304.1.abcdef"}
    for name in others:
        (tmp_path / name).mkdir()
    others.add(f"skyrl-sandboxes-{os.geteuid()}")
    backend = Backend("process", quiet_process_provider, "", layer)

    async def run() -> None:
        async with backend.make() as first:
            assert not dead.exists()
            await first.create(backend.spec())
            (ours,) = set(os.listdir(tmp_path)) - others - {"layer"}
            assert str(os.getpid()) in ours.split(".")
            async with backend.make():  # another run starts beside this one
                assert (tmp_path / ours / "testbed").is_dir()

    asyncio.run(run())
    assert set(os.listdir(tmp_path)) == others | {"layer"}


JOB = """
import asyncio, pathlib, sys
sys.argv = ["job"]
from launchers.common import run_async, run_main

async def work():
    try:
        print("running", flush=True)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.05)
        print("closed", flush=True)

run_main(lambda argv: run_async(work()))
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_stopped_closes_what_it_opened(ending: signal.Signals) -> None:
    """The launchers' jobs; SIGTERM is as good as Ctrl-C."""
    job = subprocess.Popen(
        [sys.executable, "-c", JOB], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPO,
        text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert job.stdout is not None and job.stdout.readline() == "running\n"
    job.send_signal(ending)
    out, errors = job.communicate(timeout=30)
    assert (out, errors, job.returncode) == ("closed\n", "stopped\n", 130)
