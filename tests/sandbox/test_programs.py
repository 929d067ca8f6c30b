"""A sandbox for an agent's program: another uid than commands have, and a folder with sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skyrl_jax.agents.external import GUEST
from skyrl_jax.core.errors import ImageError, InfraError
from skyrl_jax.core.protocols import SHARED, SandboxSpec
from skyrl_jax.gateway.sockets import peer_uid
from skyrl_jax.sandbox.bwrap import AGENT_UID, PROGRAM_UID, BwrapProvider
from skyrl_jax.sandbox.fake import FakeProvider
from tests.sandbox.conftest import CACHE, Backend, quiet_process_provider

pytestmark = pytest.mark.xdist_group("sandbox")

CALL = f"""
import socket
with socket.socket(socket.AF_UNIX) as channel:
    channel.connect({SHARED!r} + "/door.sock")
    print(channel.recv(100).decode())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on the host, closed to everybody but its owner."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "note.txt").write_text("hello\n")
        yield Path(name)


@asynccontextmanager
async def door(path: Path) -> AsyncIterator[list[int]]:
    """Listen on the folder's socket; note who calls and tell them their uid."""
    callers: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(peer_uid(writer.get_extra_info("socket")))
        writer.write(str(callers[-1]).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path=str(path / "door.sock"))
    (path / "door.sock").chmod(0o666)
    async with server:
        yield callers


def test_a_program_has_a_uid_of_its_own_on_the_host(sharing: Backend, folder: Path) -> None:
    async def run() -> None:
        async with sharing.make() as provider, door(folder) as callers:
            uid = provider.program_uid
            folder.chmod(0o755)
            program = await provider.create(sharing.spec(shared=str(folder), user=2))
            command = await provider.create(sharing.spec(shared=str(folder)))
            assert (await program.exec("id -u; id -g")).output == "2\n2\n"
            assert (await command.exec("id -u")).output == "1\n"
            for box in (program, command):
                done = await box.exec(["python3", "-S", "-c", CALL])
                assert done.returncode == 0, done.output
            assert callers[0] == uid and callers[1] != uid
            if sharing.kind == "bwrap":
                assert callers == [PROGRAM_UID, AGENT_UID]
            status = (await program.exec("grep -E 'Cap|NoNew' /proc/self/status")).output
            assert "NoNewPrivs:\t1" in status and status.count("0" * 16) >= 4
            await program.destroy()
            await command.destroy()

    asyncio.run(run())


def test_what_is_shared_can_be_read_and_not_written(sharing: Backend, folder: Path) -> None:
    async def run() -> None:
        folder.chmod(0o755)
        async with sharing.box(shared=str(folder), user=2) as box:
            assert (await box.exec(f"cat {SHARED}/note.txt")).output == "hello\n"
            done = await box.exec(f"echo x > {SHARED}/new; echo y > {SHARED}/note.txt")
            assert done.returncode != 0
            assert sorted(path.name for path in folder.iterdir()) == ["note.txt"]
            assert (folder / "note.txt").read_text() == "hello\n"
            (folder / "later.txt").write_text("later\n")  # it is the folder, not a copy
            assert (await box.exec(f"cat {SHARED}/later.txt")).output == "later\n"
        async with sharing.box() as box:  # and without it there is nothing to be seen
            assert (await box.exec(f"ls -A {SHARED} 2>/dev/null; true")).output == ""

    asyncio.run(run())


def test_a_folder_below_closed_ones_can_be_shared(bwrap: Backend, folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    inner.chmod(0o755)
    (inner / "note.txt").write_text("deep\n")
    assert folder.stat().st_mode & 0o077 == 0

    async def run() -> None:
        async with bwrap.box(shared=str(inner), user=2) as box:
            assert (await box.exec(f"cat {SHARED}/note.txt")).output == "deep\n"

    asyncio.run(run())


def test_other_uids_and_missing_folders_are_refused(sharing: Backend, folder: Path) -> None:
    async def run() -> None:
        async with sharing.make() as provider:
            with pytest.raises(InfraError, match="no uid 3"):
                await provider.create(sharing.spec(user=3))
            with pytest.raises(ImageError, match="nowhere"):
                await provider.create(sharing.spec(shared=str(folder / "nowhere")))
            assert provider.live == 0

    asyncio.run(run())


def test_backends_without_a_second_uid_say_so(folder: Path) -> None:
    async def run() -> None:
        for name, provider in (("process", quiet_process_provider()), ("fake", FakeProvider())):
            async with provider:
                assert provider.program_uid is None
                for changes in ({"user": 2}, {"shared": str(folder)}):
                    with pytest.raises(InfraError, match=f"{name} has neither .* bwrap or docker"):
                        await provider.create(SandboxSpec(image="", **changes))
                assert provider.live == 0

    asyncio.run(run())


def test_a_plain_user_has_no_second_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    provider = BwrapProvider(run_id="tests", cache_dir=CACHE)
    assert provider.program_uid is None
    with pytest.raises(InfraError, match="start as root"):
        asyncio.run(provider.create(SandboxSpec(image="", user=2)))


def test_a_client_speaks_http_through_the_shared_socket(sharing: Backend, folder: Path) -> None:
    """The forwarder (agents/guest/start.py) where it is used: loopback up, network off."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    fetch = (
        "import os, urllib.request as u; "
        "print(u.urlopen(os.environ['OPENAI_BASE_URL'] + '/models', timeout=9).read().decode())"
    )

    async def run() -> None:
        shutil.copyfile(GUEST / "start.py", folder / "start.py")
        (folder / "start.py").chmod(0o755)
        folder.chmod(0o755)
        server = await asyncio.start_unix_server(answer, path=str(folder / "v1.sock"))
        (folder / "v1.sock").chmod(0o666)
        async with server, sharing.box(shared=str(folder), user=2) as box:
            start = ["python3", "-S", "-E", f"{SHARED}/start.py", f"{SHARED}/v1.sock"]
            done = await box.exec([*start, "python3", "-c", fetch])
            assert (done.returncode, done.output) == (0, "hello\n")

    asyncio.run(run())
