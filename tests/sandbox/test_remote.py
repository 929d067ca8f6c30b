"""Sandbox hosts: what a network, a lease and another machine's death add to the contract."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from skyrl_jax.core.errors import (
    AgentCausedError,
    CapacityError,
    ConfigError,
    DataError,
    HostError,
    ImageError,
    InfraError,
    SandboxGone,
    SandboxTimeout,
    SkyrlError,
)
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox import host_wire
from skyrl_jax.sandbox.host import MissingLayers, SandboxHost, execute
from skyrl_jax.sandbox.host_client import UNREACHABLE, HostLink
from skyrl_jax.sandbox.host_layers import LayerStore, layer_digest, write_layer
from skyrl_jax.sandbox.host_process import read_token
from skyrl_jax.sandbox.remote import RemoteProvider
from tests.sandbox.conftest import CACHE
from tests.sandbox.dockerd import REPO
from tests.sandbox.hosts import TOKEN, HostProcess, host_process, start_host, stop_host
from tests.sandbox.test_contract import nap, sleepers

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes


@pytest.fixture(scope="module")
def quick_host(image: Path) -> Iterator[HostProcess]:
    """A host with room for three sandboxes."""
    with host_process("--capacity=3", "--creates=2") as host:
        yield host


def spec_of(layer: Path, **changes: Any) -> SandboxSpec:
    values: dict[str, Any] = {"memory_mb": 128, "pids": 32, "disk_mb": 16, "workdir": "/testbed"}
    return SandboxSpec(image="", layers=(str(layer),), **{**values, **changes})


async def live(url: str) -> int:
    """How many sandboxes a host says it has."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(f"{url}/health") as answer:
            return int((await answer.json())["live"])


async def until(check: Callable[[], Any], seconds: float = 15.0) -> None:
    """Wait until ``check`` (which may be a coroutine function) holds."""
    limit = time.monotonic() + seconds
    while True:
        found = check()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert time.monotonic() < limit
        await asyncio.sleep(0.05)


# -- token ---------------------------------------------------------------------------------------


def test_without_the_token_nothing_but_the_bare_health_is_told(quick_host: HostProcess) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{quick_host.url}/health") as answer:
                assert await answer.json() == {"status": "ok"}
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer é"}):
                path = f"{quick_host.url}/owners/{'a' * 32}/lease"
                async with session.post(path, headers=headers) as answer:
                    assert answer.status == 401
                    assert "Authorization: Bearer" in await answer.text()
        with pytest.raises(
            InfraError, match=r"refuses the token.*/secrets/token must hold"
        ) as told:
            async with RemoteProvider(quick_host.url, token="no", token_name="/secrets/token"):
                pass
        assert told.value.cause == "token"

    asyncio.run(run())


def test_a_token_is_read_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" secret\n")
    file.chmod(0o600)
    assert read_token(str(file), "other") == "secret"
    assert read_token("", " from-the-environment ") == "from-the-environment"
    with pytest.raises(ConfigError, match="openssl rand"):
        read_token("", "  ")
    with pytest.raises(ConfigError, match="cannot read the token file"):
        read_token(str(tmp_path / "none"))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644"):
        read_token(str(file))
    file.chmod(0o600)
    for text in ("\n", "two\nlines"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="one line of printable text"):
            read_token(str(file))


def test_the_token_is_in_no_command_line(quick_host: HostProcess) -> None:
    line = Path(f"/proc/{quick_host.process.pid}/cmdline").read_bytes()
    assert b"sandbox_host.py" in line and TOKEN.encode() not in line


def test_a_host_without_a_token_does_not_start() -> None:
    command = [sys.executable, str(REPO / "launchers" / "sandbox_host.py"), "--port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: a sandbox host and its clients need a token")


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        InfraError("x", cause="stuck"),
        InfraError("x"),
        CapacityError("x"),
        ImageError("x", cause="pull"),
        HostError("x", cause="other"),
        SandboxGone("x", certain=False),
        SandboxGone("x"),
        SandboxTimeout("x"),
        AgentCausedError("x"),
        DataError("x"),
    ],
)
def test_an_error_keeps_its_type_cause_and_blame(error: SkyrlError) -> None:
    _, values = host_wire.error_to_json(error)
    (values,) = (host_wire.unpack(host_wire.pack(values))[0],)
    back = host_wire.error_from_json(values, "http://h")
    assert type(back) is type(error)
    for name in ("cause", "certain"):
        assert getattr(back, name, None) == getattr(error, name, None)
    assert str(back).startswith("x")


def test_an_error_that_is_not_ours_is_the_hosts() -> None:
    class OwnGone(SandboxGone):
        """A finer kind than the wire knows."""

    _, values = host_wire.error_to_json(OwnGone("x", certain=False))
    assert type(host_wire.error_from_json(values, "h")) is SandboxGone
    for error in (KeyError("a bug"), ConfigError("x")):
        back = host_wire.error_from_json(host_wire.error_to_json(error)[1], "h")
        assert type(back) is InfraError
    assert type(host_wire.error_from_json({"type": "Unheard", "message": "x"}, "h")) is InfraError
    assert type(host_wire.error_from_json("text", "h")) is InfraError


def test_messages_hold_any_bytes_and_text() -> None:
    header = {"command": "a\udcff\N{SNOWMAN}"}
    assert host_wire.unpack(host_wire.pack(header, b"\0\xff")) == (header, b"\0\xff")
    for bad in (b"", b"\x01", b"\xff\xff\xff\xffx", b"\x02\0\0\0[]", b"\x01\0\0\0{"):
        with pytest.raises(DataError, match="not a message"):
            host_wire.unpack(bad)


def test_a_spec_of_another_version_is_refused() -> None:
    values = host_wire.spec_to_json(SandboxSpec(image="i", env={"A": "b"}), ("d",))
    assert host_wire.spec_from_json(values) == SandboxSpec(image="i", env={"A": "b"}, layers=("d",))
    for change, text in (({"gpus": 1}, "'gpus'"), ({"pids": "9"}, "pids must be int")):
        with pytest.raises(DataError, match=text):
            host_wire.spec_from_json({**values, **change})
    with pytest.raises(DataError, match="no spec"):
        host_wire.spec_from_json(None)


# -- once ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def lossy(url: str, lost: Callable[[bytes], bool]) -> AsyncIterator[str]:
    """A proxy that passes a request on, waits for its answer, and drops it where ``lost``."""
    port = int(url.rpartition(":")[2])

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = _length(head)
                back.write(head + (await reader.readexactly(length)))
                answer = await there.readuntil(b"\r\n\r\n")
                answer += await there.readexactly(_length(answer))
                if lost(head):
                    break
                writer.write(answer)
        back.close()
        writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def test_a_lost_answer_makes_no_second_sandbox_and_no_second_run(
    quick_host: HostProcess, layer: Path
) -> None:
    dropped: list[bytes] = []

    def lost(head: bytes) -> bool:
        line = head.split(b"\r\n")[0]
        lose = b"/sandboxes/" in line and line not in dropped
        dropped.extend([line] if lose else [])
        return lose

    async def run() -> None:
        async with lossy(quick_host.url, lost) as url:
            async with RemoteProvider(url, token=TOKEN) as provider:
                box = await provider.create(spec_of(layer))
                assert await live(quick_host.url) == 1
                for _ in range(3):
                    await box.exec("echo more >> a.txt")
                assert (await box.exec("cat a.txt")).output == "one\n" + 3 * "more\n"
                await box.destroy()
                assert await live(quick_host.url) == 0
        # create twice (the host lacks the layer at first), four commands, one destroy
        assert len(dropped) >= 6

    asyncio.run(run())


class SlowBox:
    """A sandbox whose commands last until they are told to end."""

    def __init__(self) -> None:
        self.runs = self.cancelled = 0
        self.release = asyncio.Event()
        self.destroyed = False

    async def exec(self, command: str, **_: Any) -> Any:
        from skyrl_jax.core.protocols import ExecResult

        self.runs += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ExecResult(returncode=0, output=f"run {self.runs}")

    async def destroy(self) -> None:
        self.destroyed = True


class SlowProvider:
    """Makes one such sandbox after another; ``gate`` holds back what is being made."""

    def __init__(self) -> None:
        self.boxes: list[SlowBox] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.making = self.most = 0

    async def create(self, spec: SandboxSpec) -> Any:
        self.making += 1
        self.most = max(self.most, self.making)
        try:
            await self.gate.wait()
        finally:
            self.making -= 1
        self.boxes.append(SlowBox())
        return self.boxes[-1]


@contextlib.asynccontextmanager
async def slow_host(**changes: Any) -> AsyncIterator[tuple[SandboxHost, SlowProvider]]:
    provider, layers = SlowProvider(), LayerStore(1 << 20)
    values = {"capacity": 4, "creates": 2, "lease_s": 60.0, "gone_s": 0.1, **changes}
    host = SandboxHost(provider, layers, resolve_image=lambda name: name or "own", **values)
    try:
        async with host:
            yield host, provider
    finally:
        layers.close()


KEY, OTHER, OWNER = "1" * 32, "2" * 32, "a" * 32
COMMAND = {"command": "x", "timeout_s": 5, "cwd": None, "env": None, "max_output_bytes": 9}


def test_equal_requests_share_what_the_first_one_makes() -> None:
    async def run() -> None:
        async with slow_host() as (host, provider):
            provider.gate.clear()
            spec = SandboxSpec(image="")
            first, again = (asyncio.ensure_future(host.create(OWNER, KEY, spec)) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()  # its client's connection is lost; the sandbox is made all the same
            provider.gate.set()
            await again
            await host.create(OWNER, KEY, spec)
            assert len(provider.boxes) == 1
            (box,) = provider.boxes
            work = lambda found: execute(found, COMMAND, b"")  # noqa: E731
            both = [asyncio.ensure_future(host.operate(KEY, 1, work)) for _ in range(2)]
            await asyncio.sleep(0.01)
            both[0].cancel()
            await asyncio.sleep(0.2)  # longer than gone_s, but one still waits
            box.release.set()
            answer = await both[1]
            assert await host.operate(KEY, 1, work) == answer and box.runs == 1
            for number in range(2, 7):
                await host.operate(KEY, number, work)
            with pytest.raises(InfraError, match="not kept") as told:
                await host.operate(KEY, 1, work)  # an error, never a second run
            assert told.value.cause == "lost_answer" and box.runs == 6

    asyncio.run(run())


def test_a_command_whose_client_is_gone_is_ended() -> None:
    async def run() -> None:
        async with slow_host() as (host, provider):
            await host.create(OWNER, KEY, SandboxSpec(image=""))
            work = lambda found: execute(found, COMMAND, b"")  # noqa: E731
            request = asyncio.ensure_future(host.operate(KEY, 1, work))
            await asyncio.sleep(0.01)
            request.cancel()
            await asyncio.sleep(0.3)
            assert provider.boxes[0].cancelled == 1
            told = asyncio.ensure_future(host.operate(KEY, 2, work))
            await asyncio.sleep(0.01)
            await host.cancel(KEY, 2)
            assert provider.boxes[0].cancelled == 2
            with pytest.raises(InfraError, match="ended by its client"):
                await told
            await host.cancel(KEY, 3)  # overtook its own request
            with pytest.raises(InfraError, match="done or ended before"):
                await host.operate(KEY, 3, work)
            assert provider.boxes[0].runs == 2

    asyncio.run(run())


def test_admission_and_the_bound_on_concurrent_creates() -> None:
    async def run() -> None:
        async with slow_host() as (host, provider):
            provider.gate.clear()
            spec = SandboxSpec(image="")
            keys = [f"{n:032x}" for n in range(4)]
            made = [asyncio.ensure_future(host.create(OWNER, key, spec)) for key in keys]
            await asyncio.sleep(0.01)
            with pytest.raises(CapacityError, match="holds 4"):
                await asyncio.wait_for(host.create(OWNER, OTHER, spec), 0.5)  # at once
            await host.destroy(keys[3])  # while it waits for its turn
            provider.gate.set()
            done = await asyncio.gather(*made, return_exceptions=True)
            assert [type(item) for item in done[:3]] == [type(None)] * 3
            assert isinstance(done[3], asyncio.CancelledError | InfraError)
            assert provider.most == 2 and host.status()["live"] == 3
            with pytest.raises(InfraError, match="destroyed before"):
                await host.create(OWNER, keys[3], spec)  # a request that was overtaken
            await host.destroy(keys[0])
            await host.destroy(keys[0])
            await host.create(OWNER, OTHER, spec)
        assert all(box.destroyed for box in provider.boxes)

    asyncio.run(run())


# -- leases and deaths ---------------------------------------------------------------------------


@pytest.fixture
def forgetful(image: Path) -> Iterator[HostProcess]:
    """A host with a lease of 3 s."""
    with host_process("--lease_s=3") as host:
        yield host


def test_a_killed_owner_loses_its_sandboxes_after_the_lease(
    forgetful: HostProcess, layer: Path
) -> None:
    command = [sys.executable, "-m", "tests.sandbox.owner", "remote", "", str(CACHE), str(layer)]
    owner = subprocess.Popen(
        [*command, forgetful.url], stdout=subprocess.PIPE, cwd=REPO, start_new_session=True
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"running\n"
        time.sleep(3.5)  # more than the lease: the heartbeat holds it
        assert asyncio.run(live(forgetful.url)) == 3
        assert sleepers(f"sleep 87651.{owner.pid}")
    finally:
        owner.kill()
        owner.wait(timeout=10)

    async def none() -> bool:
        return await live(forgetful.url) == 0

    asyncio.run(until(none))
    assert sleepers(f"sleep 87651.{owner.pid}") == []


def test_a_lease_does_not_run_while_the_host_itself_stands_still() -> None:
    async def run() -> None:
        async with slow_host(lease_s=10.0) as (host, provider):
            await host.create(OWNER, KEY, SandboxSpec(image=""))
            host.renew(OWNER)
            now = time.monotonic()
            host.expire(now + 9.0, 0.0)
            host.expire(now + 109.0, 100.0)  # it was stopped: nobody could have renewed
            await asyncio.sleep(0.05)
            assert host.status()["live"] == 1
            host.expire(now + 111.0, 0.0)
            await until(lambda: host.status()["live"] == 0)
            assert provider.boxes[0].destroyed

    asyncio.run(run())


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_host_that_dies_is_blamed_and_at_once(how: str, layer: Path) -> None:
    host = start_host("--lease_s=4")

    async def run() -> None:
        async with RemoteProvider(host.url, token=TOKEN) as provider:
            box = await provider.create(spec_of(layer))
            running = asyncio.ensure_future(box.exec(nap(98771), timeout_s=600))
            await until(lambda: bool(sleepers(nap(98771))))
            began = time.monotonic()
            if how == "killed":
                host.kill()
            else:
                os.kill(host.process.pid, signal.SIGSTOP)  # no reset comes: as with a power cut
            with pytest.raises(InfraError) as told:
                await running
            assert told.value.cause == UNREACHABLE and time.monotonic() - began < 12
            with pytest.raises(InfraError):
                await box.exec("true")
            with pytest.raises(InfraError):
                await provider.create(spec_of(layer))
            with pytest.raises(InfraError) as told:
                await box.destroy()
            assert told.value.cause == "destroy" and provider.live == 0

    try:
        asyncio.run(run())
    finally:
        host.kill()
    asyncio.run(until(lambda: sleepers(nap(98771)) == []))


def test_a_host_that_was_started_again_has_other_sandboxes(layer: Path) -> None:
    host = start_host("--lease_s=4")
    again: list[HostProcess] = []

    async def run() -> None:
        async with RemoteProvider(host.url, token=TOKEN) as provider:
            box = await provider.create(spec_of(layer))
            host.kill()
            port = int(host.url.rpartition(":")[2])
            again.append(await asyncio.to_thread(start_host, "--lease_s=4", port=port))
            await until(lambda: not provider.link.down)
            with pytest.raises(InfraError, match="started again") as told:
                await box.exec("true")
            assert told.value.cause == host_wire.UNKNOWN_SANDBOX
            await box.destroy()
            fresh = await provider.create(spec_of(layer))
            assert (await fresh.exec("cat a.txt")).output == "one\n"

    try:
        asyncio.run(run())
    finally:
        host.kill()
        for other in again:
            stop_host(other)


def test_leaving_the_provider_destroys_all_and_sigterm_too(layer: Path) -> None:
    host = start_host()

    async def run() -> None:
        async with RemoteProvider(host.url, token=TOKEN) as provider:
            boxes = [await provider.create(spec_of(layer)) for _ in range(2)]
            assert await live(host.url) == 2 and len(boxes) == 2
            made = asyncio.ensure_future(provider.create(spec_of(layer)))
            await asyncio.sleep(0.005)
            made.cancel()
        assert await live(host.url) == 0
        provider = RemoteProvider(host.url, token=TOKEN)
        await provider.__aenter__()
        box = await provider.create(spec_of(layer))
        task = asyncio.ensure_future(box.exec(nap(98772)))
        await until(lambda: bool(sleepers(nap(98772))))
        host.process.terminate()
        assert await asyncio.to_thread(host.process.wait, 20) == 0
        with pytest.raises((InfraError, SandboxGone)):
            await task
        assert sleepers(nap(98772)) == []
        await provider.__aexit__(None, None, None)

    try:
        asyncio.run(run())
    finally:
        host.kill()


def test_nobody_there(tmp_path: Path) -> None:
    async def run() -> None:
        began = time.monotonic()
        with pytest.raises(InfraError, match="nobody listens there"):
            async with RemoteProvider("http://127.0.0.1:9", token=TOKEN):
                pass
        assert time.monotonic() - began < 5

        async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            writer.close()

        async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(InfraError, match="no sandbox host of ours: 'hello'"):
                async with RemoteProvider(f"http://127.0.0.1:{port}", token=TOKEN):
                    pass

    asyncio.run(run())


def test_too_few_files_are_not_the_hosts_death(quick_host: HostProcess) -> None:
    async def run() -> None:
        async with RemoteProvider(quick_host.url, token=TOKEN) as provider:
            held = [os.open("/", os.O_RDONLY)]
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, hard))
            try:
                calls = [provider.link.call("DELETE", f"/sandboxes/{KEY}") for _ in range(3)]
                done = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                os.close(held[0])
            failed = [str(item) for item in done if isinstance(item, CapacityError)]
            assert failed and all("ulimit -n" in text for text in failed)
            assert not provider.link.down

    asyncio.run(run())


# -- images and layers ---------------------------------------------------------------------------


def test_what_another_machine_cannot_have_is_refused(
    quick_host: HostProcess, layer: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        async with RemoteProvider(quick_host.url, token=TOKEN) as provider:
            assert provider.program_uid is None
            with pytest.raises(InfraError, match="cannot share a directory"):
                await provider.create(spec_of(layer, shared=str(tmp_path), user=2))
            for image in ("/", "..", "name"):
                with pytest.raises(ImageError, match="a bwrap host knows images by"):
                    await provider.create(
                        SandboxSpec(image=image, layers=(str(layer),), workdir="/testbed")
                    )
            with pytest.raises(ImageError, match="is not a directory"):
                await provider.create(spec_of(tmp_path / "none"))
            assert provider.live == 0
        assert await live(quick_host.url) == 0

    asyncio.run(run())


def test_a_layer_travels_once(quick_host: HostProcess, layer: Path) -> None:
    sent: list[bytes] = []

    def watch(head: bytes) -> bool:
        sent.extend([head] if head.startswith(b"PUT /layers/") else [])
        return False

    async def run() -> None:
        (layer / "testbed" / "unique").write_text(os.urandom(8).hex())
        async with lossy(quick_host.url, watch) as url:
            for _ in range(2):  # the second client finds it there
                async with RemoteProvider(url, token=TOKEN) as provider:
                    boxes = await asyncio.gather(
                        *(provider.create(spec_of(layer)) for _ in range(3))
                    )
                    done = await boxes[0].exec("stat -c '%u %a' a.txt; echo >> a.txt && echo mine")
                    assert done.output == "1 644\nmine\n"
        assert len(sent) == 1

    asyncio.run(run())


def _tree(folder: Path, name: str, content: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "file").write_text(content)
    os.utime(folder / name / "file", (1, 1))
    os.utime(folder / name, (1, 1))
    return folder / name


def test_a_layers_digest_is_of_its_content(tmp_path: Path) -> None:
    one = _tree(tmp_path, "one", "x")
    assert layer_digest(one) == layer_digest(_tree(tmp_path, "two", "x"))
    assert layer_digest(one) != layer_digest(_tree(tmp_path, "three", "y"))
    (one / "file").chmod(0o755)
    assert layer_digest(one) != layer_digest(tmp_path / "two")
    os.mkfifo(one / "pipe")
    with pytest.raises(ImageError, match="cannot travel"):
        layer_digest(one)


def test_the_store_keeps_what_is_used_and_drops_the_oldest(tmp_path: Path) -> None:
    async def run() -> None:
        store = LayerStore(25_000)
        tars = {}
        for name in ("one", "two", "three", "four"):
            path = tmp_path / f"{name}.tar"
            with open(path, "wb") as file:
                write_layer(_tree(tmp_path, name, name), file)
            tars[name] = (layer_digest(tmp_path / name), path, path.stat().st_size)
        assert all(size == 10_240 for _, _, size in tars.values())
        (one, *_), (two, *_), (three, *_), (four, *_) = tars.values()
        await store.add(*tars["one"])
        await store.add(*tars["two"])
        (folder,) = store.pin([one])
        assert (Path(folder) / "file").read_text() == "one"
        await store.add(*tars["three"])
        assert store.missing([one, two, three]) == [two]
        store.pin([three])
        with pytest.raises(CapacityError, match="no room for a layer of 10240 bytes"):
            await store.add(*tars["four"])
        store.unpin([one])
        await store.add(*tars["four"])
        assert store.missing([one, three, four]) == [one]
        store.close()
        assert not Path(folder).parent.exists()

    asyncio.run(run())


def test_a_layer_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        store = LayerStore(1 << 20)
        for name, kind in (("../evil", tarfile.REGTYPE), ("d", tarfile.CHRTYPE)):
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode="w") as archive:
                member = tarfile.TarInfo(name)
                member.type = kind
                archive.addfile(member)
            path = tmp_path / "bad.tar"
            path.write_bytes(out.getvalue())
            with pytest.raises(DataError):
                await store.add("0" * 64, path, 10)
        assert store.digests == ()
        store.close()

    asyncio.run(run())


def test_a_layer_is_what_its_digest_says(quick_host: HostProcess, layer: Path) -> None:
    async def run() -> None:
        link = HostLink(quick_host.url, token=TOKEN, token_name="t", owner=OWNER)
        await link.open()
        with pytest.raises(DataError, match="not what its digest says"):
            await link.send_layer("0" * 64, layer)
        with pytest.raises(DataError, match="hexadecimal"):
            await link.call("PUT", "/layers/..%2fx")
        await link.close()

    asyncio.run(run())


def test_a_missing_layer_is_asked_for() -> None:
    async def run() -> None:
        async with slow_host() as (host, _):
            with pytest.raises(MissingLayers) as asked:
                await host.create(OWNER, KEY, SandboxSpec(image="", layers=("0" * 64,)))
            assert asked.value.digests == ["0" * 64] and host.status()["live"] == 0

    asyncio.run(run())


def test_limits_hold_on_the_other_side(quick_host: HostProcess, layer: Path) -> None:
    async def run() -> None:
        async with RemoteProvider(quick_host.url, token=TOKEN) as provider:
            box = await provider.create(spec_of(layer, memory_mb=48))
            done = await box.exec(["python3", "-c", "x = b'1' * (200 << 20)"])
            assert done.oom_killed and done.returncode
            boxes = [await provider.create(spec_of(layer)) for _ in range(2)]
            with pytest.raises(CapacityError, match="holds 3 sandboxes"):
                await provider.create(spec_of(layer))
            with pytest.raises(SandboxGone):
                await boxes[0].exec("kill -9 -1; kill -9 1; exec sleep 0")
                await boxes[0].destroy()
                await boxes[0].exec("true")

    asyncio.run(run())


def test_a_host_of_containers(daemon: str, docker_image: str, layer: Path) -> None:
    host = start_host("--backend=docker", env={"DOCKER_HOST": daemon})

    async def run() -> None:
        async with RemoteProvider(host.url, token=TOKEN) as provider:
            spec = dataclasses.replace(spec_of(layer, best_effort=True), image=docker_image)
            box = await provider.create(spec)
            assert (await box.exec("cat a.txt; id -u")).output == "one\n1\n"
            await box.ping()
            await box.destroy()
            with pytest.raises(SandboxGone):
                await box.ping()
            with pytest.raises(ImageError):
                await provider.create(dataclasses.replace(spec, image="skyrl-none:never"))
            assert await live(host.url) == 0

    try:
        asyncio.run(run())
    finally:
        stop_host(host)
