"""The loopback port in front of a session's socket (guest/start.py)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from skyrl_jax.agents.external import GUEST
from skyrl_jax.agents.guest import start

FETCH = """
import os, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/models"
assert os.environ["OPENAI_API_BASE"] + "/models" == url
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1/models" == url
print(urllib.request.urlopen(url, timeout=10).read().decode())
"""
AS_ANOTHER = """
import os, socket
port = int(os.environ["ANTHROPIC_BASE_URL"].rpartition(":")[2])
child = os.fork()
if not child:
    os.setgid(65534)
    os.setuid(65534)
    try:
        with socket.socket() as door:
            door.settimeout(5)
            door.connect(("127.0.0.1", port))
            door.sendall(b"GET /v1/models HTTP/1.0\\r\\n\\r\\n")
            print(door.recv(100), flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     2        0 1 1 0 100 0 0 10 0
   1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     1        0 2 1 0 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     2        0 3 1 0 20 4 30 10 -1
   3: 0100007F:C351 0100007F:1F90 06 00000000:00000000 00:00000000 00000000     7        0 0 3 0
"""  # noqa: E501


def forward(tmp_path, code):
    """Run ``code`` behind the forwarder; return (what it said, the requests that came through)."""

    async def run():
        seen: list[bytes] = []

        async def answer(reader, writer):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
            await writer.drain()
            writer.close()

        path = str(tmp_path / "v1.sock")
        async with await asyncio.start_unix_server(answer, path=path):
            program = [sys.executable, "-c", code]
            line = [sys.executable, "-S", "-E", str(GUEST / "start.py"), path, *program]
            done = await asyncio.to_thread(
                subprocess.run, line, capture_output=True, text=True, timeout=30
            )
        return done, seen

    return asyncio.run(run())


def test_a_client_reaches_the_socket_by_http(tmp_path):
    done, seen = forward(tmp_path, FETCH)
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert len(seen) == 1 and seen[0].startswith(b"GET /v1/models HTTP/1.1\r\n")


def test_the_programs_exit_code_is_kept(tmp_path):
    assert forward(tmp_path, "import sys; sys.exit(7)")[0].returncode == 7
    assert forward(tmp_path, "import os; os.kill(os.getpid(), 9)")[0].returncode == 137


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another uid")
def test_a_peer_with_another_uid_is_refused(tmp_path):
    done, seen = forward(tmp_path, AS_ANOTHER)
    assert seen == [], done
    assert "HTTP" not in done.stdout
    assert "another uid was refused" in done.stderr


def test_the_owner_of_the_clients_end_is_looked_up(tmp_path):
    table = tmp_path / "tcp"
    table.write_text(TABLE)
    assert start.peer_uid(("127.0.0.1", 50000), 8080, table) == 1  # C350 -> 1F90, not its mirror
    assert start.peer_uid(("127.0.0.1", 50001), 8080, table) is None  # not established
    assert start.peer_uid(("127.0.0.1", 50002), 8080, table) is None
