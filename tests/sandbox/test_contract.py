"""The sandbox contract: the same tests on bwrap, docker and process; the fake where it can."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from skyrl_jax.core.errors import AgentCausedError, CapacityError, DataError, SandboxGone
from skyrl_jax.core.protocols import ExecResult, SandboxSpec
from skyrl_jax.sandbox.fake import FakeProvider
from skyrl_jax.sandbox.snapshot import FileSnapshots
from skyrl_jax.sandbox.wire import pack_files, unpack_files
from tests.sandbox.conftest import Backend

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes


def nap(number: int) -> str:
    """A sleep that no other test process runs."""
    return f"sleep {number}.{os.getpid()}"


def sleepers(mark: str) -> list[str]:
    """Command lines on the host that hold the mark (a sleep of an unusual length)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if mark in line and "pytest" not in line:
                found.append(line)
    return found


def test_commands(backend: Backend) -> None:
    async def run() -> None:
        async with backend.box(env={"COLOUR": "blue"}) as box:
            done = await box.exec("exit 3")
            assert (done.returncode, done.output, done.timed_out) == (3, "", False)
            done = await box.exec("echo out; echo err >&2; echo out2")
            assert done.output == "out\nerr\nout2\n"
            assert (await box.exec(["printf", "%s", "a b;$c"])).output == "a b;$c"
            assert (await box.exec("kill -9 $$")).returncode == 137
            missing = await box.exec(["no-such-program"])
            assert missing.returncode == 127 and "no-such-program" in missing.output
            assert (await box.exec("cat a.txt")).output == "one\n"
            assert (await box.exec("pwd", cwd="/")).returncode == 0
            assert (await box.exec("cd /nowhere-at-all")).returncode != 0
            assert (await box.exec("true", cwd="/nowhere-at-all")).returncode == 126
            done = await box.exec("echo $COLOUR $SHAPE", env={"SHAPE": "round"})
            assert done.output == "blue round\n"

    asyncio.run(run())


def test_output_is_bytes_of_any_kind_and_any_amount(backend: Backend) -> None:
    async def run() -> None:
        async with backend.box() as box:
            assert (await box.exec(r"printf 'a\377b'")).output == "a\N{REPLACEMENT CHARACTER}b"
            began = time.monotonic()
            done = await box.exec("head -c 20000000 /dev/zero | tr '\\0' x", max_output_bytes=100)
            took = time.monotonic() - began
            assert done.truncated and done.returncode == 0
            assert done.output.startswith("x" * 50 + "\n[... 19999900 bytes cut ...]\n")
            assert done.output.endswith("x" * 50)
            assert took < 1.0, took
            done = await box.exec("seq 1 20", max_output_bytes=20)
            assert done.output == "1\n2\n3\n4\n5\n\n[... 31 bytes cut ...]\n\n18\n19\n20\n"
            exact = await box.exec("printf 0123456789", max_output_bytes=10)
            assert (exact.output, exact.truncated) == ("0123456789", False)

    asyncio.run(run())


def test_stdin(backend: Backend) -> None:
    async def run() -> None:
        async with backend.box() as box:
            assert (await box.exec("cat", stdin=b"hello")).output == "hello"
            assert (await box.exec("cat; echo end", timeout_s=10)).output == "end\n"
            big = await box.exec("wc -c", stdin=b"x" * 3_000_000)
            assert big.output.strip() == "3000000"
            assert (await box.exec("exit 4", stdin=b"x" * 3_000_000)).returncode == 4

    asyncio.run(run())


def test_nothing_outlives_a_command(backend: Backend) -> None:
    async def run() -> None:
        async with backend.box() as box:
            began = time.monotonic()
            done = await box.exec(f"setsid {nap(98761)} & nohup {nap(98762)} & echo hi")
            assert done.output == "hi\n" and done.returncode == 0
            assert not any(sleepers(nap(number)) for number in range(98761, 98765))
            done = await box.exec(f"setsid {nap(98763)} & {nap(98764)}", timeout_s=0.3)
            assert done.timed_out and done.returncode == 137
            assert not any(sleepers(nap(number)) for number in range(98761, 98765))
            done = await box.exec("(setsid yes & ) ; echo over", max_output_bytes=64)
            assert "over" in done.output or done.truncated
            assert time.monotonic() - began < 5
            assert (await box.exec("echo again")).output == "again\n"

    asyncio.run(run())


def test_a_cancelled_command_is_ended_and_the_next_one_works(backend: Backend) -> None:
    async def run() -> None:
        async with backend.box() as box:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.exec(f"echo stale; {nap(98765)}"), 0.3)
            assert (await box.exec("echo fresh")).output == "fresh\n"
            assert sleepers(nap(98765)) == []
            first, second = await asyncio.gather(box.exec("echo 1"), box.exec("echo 2"))
            assert (first.output, second.output) == ("1\n", "2\n")

    asyncio.run(run())


def test_put_and_get(backend: Backend) -> None:
    async def run() -> None:
        async with backend.box() as box:
            files = {"x/deep/b.bin": bytes(range(256)), "a.txt": b"two\n"}
            await box.put("/testbed", pack_files(files, mode=0o755))
            assert (await box.exec("cat a.txt; test -x a.txt && echo yes")).output == "two\nyes\n"
            await box.exec("ln -s b.bin x/deep/link")
            tar = await box.get("/testbed/x")
            assert unpack_files(tar) == {"x/deep/b.bin": bytes(range(256))}
            names = {m.name: m.linkname for m in tarfile.open(fileobj=io.BytesIO(tar))}
            assert names["x/deep/link"] == "b.bin"
            assert unpack_files(await box.get("/testbed/a.txt")) == {"a.txt": b"two\n"}
            with pytest.raises(AgentCausedError, match="no such path"):
                await box.get("/testbed/none")
            with pytest.raises(AgentCausedError, match="more than 10 bytes"):
                await box.get("/testbed/x", max_bytes=10)

    asyncio.run(run())


def _tar(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member in members:
            archive.addfile(member)
    return out.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


ESCAPES = {
    "parent": _tar(_member("../evil")),
    "inner parent": _tar(_member("a/../../evil")),
    "absolute": _tar(_member("/etc/evil")),
    "link out": _tar(_member("l", tarfile.SYMTYPE, "../../etc")),
    "absolute link": _tar(_member("l", tarfile.SYMTYPE, "/etc")),
    "through a link": _tar(_member("l", tarfile.SYMTYPE, "d"), _member("l/x")),
    "hard link out": _tar(_member("h", tarfile.LNKTYPE, "../x")),
    "hard link to nothing": _tar(_member("h", tarfile.LNKTYPE, "nowhere")),
    "device": _tar(_member("d", tarfile.CHRTYPE)),
    "no tar": b"this is not a tar stream, whatever its length may be" * 20,
}


@pytest.mark.parametrize("case", sorted(ESCAPES))
def test_a_tar_that_leaves_its_target_is_refused(case: str, bwrap: Backend) -> None:
    async def run() -> None:
        async with bwrap.box() as box:
            with pytest.raises(DataError):
                await box.put("/testbed", ESCAPES[case])
            assert (
                await box.exec("ls; test -e /etc/evil || echo clean")
            ).output == "a.txt\nclean\n"
        with pytest.raises(DataError):
            fake = await FakeProvider().create(SandboxSpec(image=""))
            await fake.put("/testbed", ESCAPES[case])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("command", "timeout_s", "text"),
    [
        ((), 5.0, "must name a program"),
        ("true", float("nan"), "timeout_s must be a finite number"),
        ("true", float("inf"), "timeout_s must be a finite number"),
    ],
)
def test_what_is_no_command_is_refused_before_it_is_sent(
    command: str | tuple[str, ...], timeout_s: float, text: str, backend: Backend
) -> None:
    async def run() -> None:
        async with backend.box() as box:
            with pytest.raises(DataError, match=text):
                await box.exec(command, timeout_s=timeout_s)
            assert (await box.exec("echo alive")).output == "alive\n"
        fake = await FakeProvider().create(SandboxSpec(image=""))
        with pytest.raises(DataError, match=text):
            await fake.exec(command, timeout_s=timeout_s)

    asyncio.run(run())


def test_destroy_is_idempotent_and_final(backend: Backend) -> None:
    async def run() -> None:
        async with backend.make() as provider:
            box = await provider.create(backend.spec())
            other = await provider.create(backend.spec())
            assert provider.live == 2
            running = asyncio.ensure_future(box.exec(nap(98766)))
            await asyncio.sleep(0.2)
            await asyncio.gather(box.destroy(), box.destroy())
            await box.destroy()
            with pytest.raises(SandboxGone):
                await running
            with pytest.raises(SandboxGone):
                await box.exec("true")
            assert provider.live == 1
            assert (await other.exec("echo alive")).output == "alive\n"
        assert provider.live == 0
        assert sleepers(nap(98766)) == []

    asyncio.run(run())


def test_many_at_once_do_not_see_each_other(backend: Backend) -> None:
    async def run() -> None:
        async with backend.make() as provider:

            async def one(n: int) -> str:
                box = await provider.create(backend.spec())
                await box.exec(f"echo {n} >> a.txt")
                done = await box.exec("cat a.txt")
                await box.destroy()
                return done.output

            outputs = await asyncio.gather(*(one(n) for n in range(6)))
            assert outputs == [f"one\n{n}\n" for n in range(6)]

    asyncio.run(run())


def test_the_lifetime_ends_a_sandbox(backend: Backend) -> None:
    async def run() -> None:
        async with backend.make() as provider:
            box = await provider.create(backend.spec(lifetime_s=1.0))
            with pytest.raises(AgentCausedError):
                await box.exec(nap(98767), timeout_s=20)
            with pytest.raises(AgentCausedError):
                await box.exec("true")
            await box.destroy()
        assert sleepers(nap(98767)) == []

    asyncio.run(run())


def test_upper_layers_win_and_writes_stay_inside(backend: Backend, tmp_path: Path) -> None:
    from skyrl_jax.sandbox.bwrap import prepare_layer

    top = tmp_path / "top"
    (top / "testbed").mkdir(parents=True)
    (top / "testbed" / "a.txt").write_text("top\n")
    (top / "testbed" / "b.txt").write_text("b\n")
    prepare_layer(top)

    async def run() -> None:
        layers = (str(top), *backend.spec().layers)
        async with backend.box(layers=layers) as box:
            assert (await box.exec("cat a.txt b.txt; rm a.txt; echo > c.txt")).output == "top\nb\n"

    asyncio.run(run())
    assert sorted(os.listdir(top / "testbed")) == ["a.txt", "b.txt"]
    assert os.listdir(backend.spec().layers[0] + "/testbed") == ["a.txt"]


def test_snapshots(backend: Backend) -> None:
    """What was written, removed, linked and made executable comes back, in as many as one likes."""
    change = (
        "echo two > b.txt; rm a.txt; mkdir -p d/e; ln -s ../b.txt d/link; printf x > 'd/a b'; "
        "chmod 750 'd/a b'; mkfifo d/pipe; head -c 300000 /dev/urandom > big"
    )
    look = "find . -printf '%p %y %m %l\n' | sort; cat b.txt d/link; sha256sum big"

    async def run() -> None:
        spec = backend.spec()
        async with backend.make() as provider:
            snapshots = FileSnapshots(provider)
            box = await provider.create(spec)
            done = await box.exec(change)
            assert done.returncode == 0, done
            before = (await box.exec(look)).output
            taken = await snapshots.snapshot(box, spec)
            await box.exec("rm -rf ./*")  # what comes later is not in it
            await box.destroy()
            one, other = [await snapshots.restore(taken) for _ in "ab"]
            assert (await one.exec(look)).output == before.replace("./d/pipe p 644 \n", "")
            await one.exec("echo mine > b.txt")
            assert (await other.exec("cat b.txt")).output == "two\n"
            with pytest.raises(AgentCausedError, match="more than 1000 bytes"):
                await FileSnapshots(provider, max_bytes=1000).snapshot(other, spec)

    asyncio.run(run())


def test_the_fake_keeps_the_contract(layer: Path) -> None:
    def script(command: object, files: dict[str, bytes]) -> ExecResult:
        files["/testbed/made"] = b"yes"
        return ExecResult(returncode=3, output=str(command))

    async def run() -> None:
        provider = FakeProvider(script, create_errors=[CapacityError("full"), None])
        async with provider:
            with pytest.raises(CapacityError):
                await provider.create(SandboxSpec(image=""))
            box = await provider.create(SandboxSpec(image="", layers=(str(layer),)))
            assert box.files == {"/testbed/a.txt": b"one\n"} and provider.live == 1
            assert (await box.exec("exit 3")).returncode == 3 and box.commands == ["exit 3"]
            await box.put("/testbed", pack_files({"x/b": b"1"}))
            assert unpack_files(await box.get("/testbed/x")) == {"x/b": b"1"}
            assert "testbed/made" in unpack_files(await box.get("/testbed"))
            with pytest.raises(AgentCausedError):
                await box.get("/none")
            with pytest.raises(AgentCausedError):
                await box.get("/testbed", max_bytes=2)
            await box.destroy()
            await box.destroy()
            assert provider.live == 0
            with pytest.raises(SandboxGone):
                await box.exec("true")

    asyncio.run(run())
