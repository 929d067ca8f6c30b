"""A session's unix socket: that session alone, for one uid."""

import asyncio
import gc
import json
import os
import stat
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import aiohttp
import pytest
import uvloop

from skyrl_jax.core.errors import ConfigError, InfraError
from skyrl_jax.core.types import SamplingParams
from skyrl_jax.gateway.front import Limits
from tests.gateway.world import SAMPLING, chat, gateway, says

ME = os.getuid()
OTHER = 54321
# What a command could do: it has the socket's path and a Python, and no package of ours.
ASK = """
import os, socket, sys
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(sys.argv[1])
body = sys.argv[2].encode()
s.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n"
          b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
data = b""
while part := s.recv(65536):
    data += part
print(data.split(b" ", 2)[1].decode(), data.split(b"\\r\\n\\r\\n", 1)[1].decode())
"""


@pytest.fixture
def folder():
    """A short path that every uid may walk."""
    with tempfile.TemporaryDirectory(prefix="gw-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def play(
    action,
    generator,
    folder,
    uid=ME,
    *,
    need_key=False,
    sampling=SAMPLING,
    limits=None,
    runner=asyncio.run,
):
    async def inside():
        async with asyncio.timeout(60), gateway(generator, limits=limits) as gate:
            session = await gate.open("task/0", sampling=sampling)
            path = await session.socket(
                folder / "door" / "v1.sock", allow_uid=uid, need_key=need_key
            )
            outcome = await action(path, session, gate)
            return outcome, await session.close(), path

    return runner(inside())


async def post(path, body, url="http://agent/v1/chat/completions", **headers):
    connector = aiohttp.UnixConnector(path=str(path))
    async with aiohttp.ClientSession(connector=connector) as http:
        async with http.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_the_agent_needs_no_key_and_reaches_its_session_alone(folder, runner):
    async def action(path, session, gate):
        other = await gate.open("other", sampling=SAMPLING)
        modes = stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)
        return modes, [
            await post(path, chat("hi")),
            await post(path, chat("hi"), **{"x-api-key": session.key}),
            await post(path, chat("hi"), "http://agent/s/task%2F0/v1/chat/completions"),
            await post(path, chat("hi"), "http://agent/s/other/v1/chat/completions"),
            await post(path, chat("hi"), **{"x-api-key": other.key}),
            await post(path, chat("hi"), "http://agent/metrics"),
        ]

    (modes, answers), recorded, path = play(action, says("ok"), folder, runner=runner)
    assert modes == (0o600, 0o700)
    assert [status for status, _ in answers] == [200, 200, 200, 404, 401, 404]
    assert len(recorded.turns) == 1
    assert not path.exists()
    assert not path.parent.exists()


def test_a_key_can_be_required(folder):
    async def action(path, session, gate):
        return [
            (await post(path, chat("hi")))[0],
            (await post(path, chat("hi"), Authorization=f"Bearer {session.key}"))[0],
        ]

    assert play(action, says("ok"), folder, need_key=True)[0] == [401, 200]


@pytest.mark.skipif(ME != 0, reason="only root has a second uid")
def test_a_process_of_another_uid_is_refused_and_counted(folder):
    """The agent's uid gets its answer; a command's, which gets past the modes, gets 403."""

    def ask_as(uid, path):
        body = json.dumps(chat("hi"))
        command = [sys.executable, "-S", "-E", "-c", ASK, str(path), body, str(uid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    async def action(path, session, gate):
        agent = await asyncio.to_thread(ask_as, OTHER, path)
        shut = await asyncio.to_thread(ask_as, OTHER + 1, path)
        path.parent.chmod(0o755)
        path.chmod(0o666)
        command = await asyncio.to_thread(ask_as, OTHER + 1, path)
        root = await post(path, chat("hi"))
        return agent, shut, command, root

    (agent, shut, command, root), recorded, _ = play(action, says("ok"), folder, uid=OTHER)
    assert agent.stdout.startswith("200"), agent.stderr
    assert shut.returncode != 0 and "Permission" in shut.stderr
    status, _, body = command.stdout.partition(" ")
    assert status == "403"
    assert json.loads(body)["error"]["code"] == "permission_denied"
    assert root[0] == 403
    assert recorded.counts["refused_peers"] == 2
    assert len(recorded.turns) == 1


def test_folders_and_paths_that_cannot_be(folder):
    async def inside():
        async with gateway(says()) as gate:
            session = await gate.open("s", sampling=SAMPLING)
            with pytest.raises(ConfigError, match="a socket's may have 107"):
                await session.socket(folder / ("x" * 120), allow_uid=ME)
            open_to_all = folder / "open"
            open_to_all.mkdir()
            open_to_all.chmod(0o777)
            with pytest.raises(ConfigError, match="written by others"):
                await session.socket(open_to_all / "s", allow_uid=ME)
            if ME == 0:
                strangers = folder / "strangers"
                strangers.mkdir(mode=0o700)
                os.chown(strangers, OTHER, OTHER)
                with pytest.raises(ConfigError, match="written by others"):
                    await session.socket(strangers / "s", allow_uid=ME)
            taken = folder / "taken"
            taken.mkdir(mode=0o700)
            (taken / "s").write_text("a file")
            with pytest.raises(InfraError, match="socket"):
                await session.socket(taken / "s", allow_uid=ME)

    asyncio.run(inside())


def test_a_folder_that_was_there_stays(folder):
    (folder / "door").mkdir(mode=0o755)

    async def action(path, session, gate):
        return stat.S_IMODE(path.parent.stat().st_mode)

    mode, _, path = play(action, says(), folder)
    assert mode == 0o755
    assert path.parent.exists() and not path.exists()


def test_a_folder_that_went_takes_no_record_with_it(folder, caplog):
    async def inside():
        async with gateway(says("ok")) as gate:
            session = await gate.open("s", sampling=SAMPLING)
            path = await session.socket(folder / "door" / "s", allow_uid=ME)
            status, _ = await post(path, chat("hi"))
            path.unlink()
            path.parent.rmdir()
            recorded = await session.close()
            return status, len(recorded.turns), session._listeners

    assert asyncio.run(inside()) == (200, 1, [])
    assert "a socket did not close" in caplog.text


def test_a_closed_session_with_a_socket_leaves_memory_without_the_collector(folder):
    async def inside():
        async with gateway(says("ok")) as gate:
            session = await gate.open("s", sampling=SAMPLING)
            path = await session.socket(folder / "door" / "s", allow_uid=ME)
            assert (await post(path, chat("hi")))[0] == 200
            assert len((await session.close()).turns) == 1
            left = weakref.ref(session)
            del session
            for _ in range(20):  # the server's own tasks end
                await asyncio.sleep(0.01)
            return left()

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(inside()) is None
    finally:
        gc.enable()


def test_a_client_that_does_not_read_is_let_go(folder):
    """Its answer fills the socket; the connection ends, the episode goes on."""

    async def action(path, session, gate):
        reader, writer = await asyncio.open_unix_connection(str(path), limit=1024)
        body = json.dumps(chat("hi", stream=True)).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await asyncio.sleep(1.5)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            while True:
                await reader.readexactly(1 << 16)
        writer.close()
        return await post(path, chat("hi"))

    sampling = SamplingParams(max_new_tokens=1 << 20, stop_token_ids=(257,))
    limits = Limits(write_s=0.3)
    (status, _), recorded, _ = play(
        action, says("x" * 1_000_000), folder, sampling=sampling, limits=limits
    )
    assert status == 200
    assert recorded.fault is None
