# ruff: noqa: F811
"""Faults of sandboxes that users of SkyRL hit (B), and two of other systems (C): one test a row.

The number is the issue's, or the row's of the list of such faults; the symptom is in our words.
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

from skyrl_jax.actor.collect import collect, healthy
from skyrl_jax.agents.scripted import SUBMIT
from skyrl_jax.agents.tools import format_call
from skyrl_jax.batching.advantages import group_advantages
from skyrl_jax.core.errors import (
    BreakerOpen,
    CapacityError,
    HostError,
    ImageError,
    InfraError,
    SandboxGone,
)
from skyrl_jax.core.protocols import StepResult
from skyrl_jax.core.types import Message, Status
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.sandbox.reaper import LABEL_RUN
from skyrl_jax.tasks.swe.diffs import change_diff, new_file_diff
from skyrl_jax.tasks.swe.suite import hidden_files, task_row
from tests.actor.fakes import (
    RENDERER,
    FakeSuite,
    TextGenerator,
    make_agent,
    make_rollout,
    make_task,
    raising,
)
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
    layer,
    sandbox_host,
)
from tests.sandbox.daemon_proxy import DaemonProxy
from tests.sandbox.dockerd import REPO
from tests.sandbox.test_contract import sleepers
from tests.sandbox.test_owner_death import naps_of
from tests.tasks.worlds import in_bwrap, make_suite

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes

LEAST = {"live_sandboxes": 1, "init_concurrency": 1, "grade_concurrency": 1}


def labelled(host: str, run: str) -> list[dict]:
    """The containers of a run, as the daemon describes them."""
    client = docker_sdk.APIClient(base_url=host, timeout=30)
    with contextlib.closing(client):
        found = client.containers(all=True, filters={"label": f"{LABEL_RUN}={run}"})
        return [client.inspect_container(item["Id"]) for item in found]


def test_9_starts_pile_up_until_all_of_them_time_out() -> None:
    """No room: typed, waited for with growing pauses within the set-up's budget, few at a time."""
    rooms, times = [0], []

    def init(_: str) -> None:
        times.append(time.monotonic())
        rooms[0] += 1
        if rooms[0] <= 2:
            raise CapacityError("the host is full")

    suite = FakeSuite(hooks={"init": init})
    collected, _ = collect_fakes(suite, tasks=3, samples=1, **LEAST)
    assert not collected.failures and suite.most_open == 1
    assert 0.2 < times[1] - times[0] < times[2] - times[1]  # and again later
    full = FakeSuite(hooks={"init": raising(CapacityError("full"))})
    collected, _ = collect_fakes(full, init_timeout_s=0.3)
    assert collected.failures == {"infra:init_deadline": 1}


@pytest.mark.parametrize(("status", "text"), [(503, "Service Unavailable"), (401, "Unauthorized")])
def test_14_a_server_refuses_and_its_answer_looks_like_another_fault(
    tmp_path: Path, status: int, text: str
) -> None:
    """The daemon is asked as the run opens, and the error names it and what it said."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} {text}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(answer, f"{tmp_path}/d.sock")
        host = f"unix://{tmp_path}/d.sock"
        with pytest.raises(InfraError, match=rf"docker at .*d\.sock.*{status}") as caught:
            async with DockerProvider(run_id="b14", cache_dir=CACHE, host=host):
                pass
        assert caught.value.cause == "docker"
        server.close()

    asyncio.run(run())


def test_15_a_container_runs_and_its_client_cannot_reach_it(docker: Backend, daemon: str) -> None:
    """There is no port to reach: no network, nothing published, one channel by the daemon."""

    async def run() -> None:
        async with docker.make() as provider:
            box = await provider.create(docker.spec())
            (seen,) = labelled(daemon, provider._run)
            assert seen["HostConfig"]["NetworkMode"] == "none"
            assert not seen["HostConfig"]["PortBindings"] and not seen["NetworkSettings"]["Ports"]
            assert (await box.exec("echo here")).output == "here\n"
            await box.destroy()

    asyncio.run(run())


class KilledWorld:
    """An episode's world in a container; in the one of task-1 something happens from outside.

    Args:
        happens: "killed": its container is, the first time; "gone": the daemon is.
    """

    def __init__(self, task, provider, spec, host: str, happens: str, plays: list[str]) -> None:
        self.task, self.provider, self.spec, self.host = task, provider, spec, host
        self.happens, self.plays, self.box = happens, plays, None

    async def reset(self):
        self.box = await self.provider.create(self.spec)
        return (Message(role="user", content="Fix it"),)

    async def step(self, calls):
        self.plays.append(self.task.task_id)
        if self.task.task_id == "task-1" and self.happens == "gone":
            raise InfraError("docker at x: connection refused", cause="docker")
        if self.plays.count("task-1") == 1 and self.task.task_id == "task-1":
            argv = ["docker", "-H", self.host, "kill", self.box._container]
            await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=60)
        await self.box.exec("echo alive; sleep 0.2")
        return StepResult(messages=(), done=True, reason="submit")

    async def submission(self):
        return ""

    async def close(self):
        if self.box is not None:
            await self.box.destroy()


@pytest.mark.parametrize("happens", ["killed", "gone"], ids=["412", "413"])
def test_412_413_a_runtime_that_is_not_found_fails_the_run(
    docker: Backend, daemon: str, happens: str
) -> None:
    """Somebody kills an episode's container: that episode alone is played again, in a fresh one.

    Where the daemon itself is gone, that episode is a failure of the host and never a 0.
    """
    plays: list[str] = []

    class Suite(FakeSuite):
        def environment(self, task, provider):
            return KilledWorld(task, provider, docker.spec(), daemon, happens, plays)

    async def run():
        async with docker.make() as provider:
            collected = await collect(
                [make_task(number) for number in range(3)],
                1,
                suite=Suite(),
                provider=provider,
                generator=TextGenerator(RENDERER, lambda session, turn: SUBMIT),
                agent=make_agent(RENDERER),
                rollout=make_rollout(
                    init_timeout_s=60.0, create_timeout_s=30.0, run_timeout_s=30.0
                ),
            )
            assert provider.live == 0
            return collected

    collected = asyncio.run(run())
    members = [group.trajectories[0] for group in collected.groups]
    statuses = [member.episode.status for member in members]
    if happens == "gone":
        assert statuses == [Status.FINISHED, Status.FAILED, Status.FINISHED]
        assert members[1].score is None and collected.failures == {"infra:docker": 1}
    else:
        assert statuses == [Status.FINISHED] * 3 and not collected.failures
        assert plays.count("task-1") == 2


def test_221_a_failing_image_build_stops_the_training(
    docker: Backend, daemon: str, tmp_path: Path
) -> None:
    """No image is built or pulled while episodes run: a missing one is an error at once."""

    async def run() -> None:
        proxy = DaemonProxy(daemon.removeprefix("unix://"))
        host = f"unix://{tmp_path}/d.sock"
        provider = DockerProvider(run_id="b221", cache_dir=CACHE, host=host)
        async with proxy.serve(f"{tmp_path}/d.sock"), provider:
            began = time.monotonic()
            with pytest.raises(ImageError, match="skyrl-none"):
                await provider.create(docker.spec(image="skyrl-none:1"))
            assert time.monotonic() - began < 10 and provider.live == 0
            box = await provider.create(docker.spec())
            await box.destroy()
        assert not [line for line in proxy.requests if "/build" in line or "/images/create" in line]

    asyncio.run(run())

    def init(name: str) -> None:
        if name == "task-1":
            raise ImageError("bad image")

    one_bad = FakeSuite(hooks={"init": init})
    collected, _ = collect_fakes(one_bad, tasks=4, samples=1)
    assert collected.failures == {"infra:image": 1}  # the others are played


def test_228_all_fail_and_the_first_cause_is_hidden() -> None:
    """Our own bug outside every stage's code: told with its traceback, and the run stops."""

    class Broken(FakeSuite):
        def environment(self, task, provider):
            raise KeyError("the key that is missing")

    collected, _ = collect_fakes(Broken(), tasks=2, samples=2)
    with pytest.raises(HostError, match="4 of 4 episodes failed") as caught:
        healthy(collected)
    told = str(caught.value)
    assert "Traceback" in told and "the key that is missing" in told and "test_faults_b.py" in told
    with pytest.raises(BreakerOpen, match="the first: infra:bug_KeyError.*") as opened:
        collect_fakes(Broken(), tasks=3, samples=2, breaker=3)
    assert "the key that is missing" in str(opened.value)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_1194_sandboxes_leak_at_ctrl_c(
    backend: Backend, daemon: str, sandbox_host: str, ending: signal.Signals
) -> None:
    """Ctrl-C closes everything; SIGTERM without a handler kills the owner: nothing is left."""
    spec = backend.spec()
    command = [sys.executable, "-W", "ignore", "-m", "tests.sandbox.owner", backend.kind]
    address = {"docker": daemon, "remote": sandbox_host}.get(backend.kind, "")
    command += [spec.image, str(CACHE), spec.layers[0], address]
    owner = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPO, start_new_session=True
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"running\n"
        owner.send_signal(ending)
        owner.wait(timeout=30)
        deadline = time.monotonic() + 15
        while naps_of(owner.pid) or sleepers(f"-p {owner.pid} -t"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        owner.kill()
        owner.wait(timeout=10)


def test_1194_a_container_ends_itself_though_its_owner_is_stuck(
    docker: Backend, daemon: str
) -> None:
    """Labels say whose it is; PID 1 has the lifetime, whatever its owner does or does not do."""

    async def run() -> None:
        async with docker.make() as provider:
            box = await provider.create(docker.spec(lifetime_s=1.0))
            (seen,) = labelled(daemon, provider._run)
            labels = seen["Config"]["Labels"]
            assert labels["skyrl.run"] == provider._run
            assert labels["skyrl.uid"] == str(os.geteuid())
            box._timer.cancel()  # the owner forgets it
            with pytest.raises(SandboxGone) as caught:
                await box.exec("sleep 60", timeout_s=60)
            assert not caught.value.certain
            await box.destroy()
            while labelled(daemon, provider._run):  # the daemon is at it
                assert time.monotonic() - began < 20
                await asyncio.sleep(0.1)

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 20


SUICIDE = (
    "kill -9 -1; kill -9 1; rm -rf /usr/bin/* ./* .git; head -c 99000000 /dev/zero > /dev/shm/x"
)


def test_c41_a_policy_breaks_its_sandbox_when_it_loses(tmp_path: Path) -> None:
    """What its commands did is its own: reward 0 inside the group, no better than an honest 0."""
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    payload = task.payload
    right = format_call(
        "str_replace_editor",
        {"path": payload["path"], "old_str": payload["old_str"], "new_str": payload["new_str"]},
    )
    first = {
        0: right,
        1: format_call("bash", {"command": "echo tries"}),
        2: format_call("bash", {"command": SUICIDE}),
    }

    def answer(session: str, turn: int) -> str:
        return first[int(re.findall(r"/(\d+)", session)[0])] if turn == 0 else SUBMIT

    async def work(provider):
        rollout = make_rollout(
            init_timeout_s=60.0, create_timeout_s=30.0, run_timeout_s=60.0, grade_timeout_s=60.0
        )
        return await collect(
            [task],
            3,
            suite=suite,
            provider=provider,
            generator=TextGenerator(RENDERER, answer),
            agent=make_agent(RENDERER, max_new_tokens=400, max_episode_tokens=4000),
            rollout=rollout,
        )

    collected = in_bwrap(work)
    (group,) = collected.groups
    assert not collected.failures
    assert [item.score.value for item in group.trajectories] == [1.0, 0.0, 0.0]
    values = list(group_advantages(group, "grpo").values())
    assert values[1] == values[2] < 0 < values[0]
    # the sandbox is gone for certain by its own doing (OOM of PID 1): a 0 as well
    gone = FakeSuite(hooks={"run": raising(SandboxGone("from inside"), times=1)})
    collected, _ = collect_fakes(gone, samples=2, live_sandboxes=1)
    assert not collected.failures
    assert sorted(item.score.value for item in collected.groups[0].trajectories) == [0.0, 1.0]


def test_c43_a_verdict_is_forged(tmp_path: Path) -> None:
    """conftest alone, false stdout, a file where the tests will be, broken tests, a reward file."""
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    row = task_row(task)
    path, before = row.extra["path"], row.extra["files"][row.extra["path"]]
    (hidden,) = hidden_files(row)
    passed = "".join(f"PASSED {name}\\n" for name in (*row.fail_to_pass, *row.pass_to_pass))
    hook = "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n"
    forged = {
        "conftest alone": new_file_diff("conftest.py", hook),
        "conftest beside the tests": new_file_diff("tests/conftest.py", hook),
        "false stdout": change_diff(path, before, f'print("{passed}")\n' + before),
        "a file in the place of the tests": new_file_diff(hidden, "def test_all(): pass\n"),
        "broken tests": new_file_diff("tests/test_other.py", "def broken(:\n"),
        "a reward file": new_file_diff("reward.txt", "1\n"),
        "a report file": new_file_diff("report.json", '{"resolved": true}\n'),
    }

    async def work(provider):
        return [await suite.reward(task, diff, provider) for diff in (row.patch, *forged.values())]

    scores = in_bwrap(work)
    assert scores[0].value == 1.0
    found = {name: score.value for name, score in zip(forged, scores[1:], strict=True)}
    assert found == dict.fromkeys(forged, 0.0)


def test_no_row_is_missing() -> None:
    told = " ".join(name for name in dir(sys.modules[__name__]) if name.startswith("test_"))
    wanted = {"9", "14", "15", "412", "413", "221", "228", "1194", "c41", "c43"}
    assert wanted <= set(told.replace("test_", "").replace("_", " ").split())
