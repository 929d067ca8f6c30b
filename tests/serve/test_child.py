"""A server and the process that starts it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.serve.child import ServerChild
from skyrl_jax.serve.process import ServeOptions
from tests.serve import running


def test_a_server_whose_starter_is_gone_does_not_start(tmp_path):
    """The starter was killed before the kernel was told to end the server with it."""
    with subprocess.Popen(["true"]) as starter:
        pass
    flags = (f"--parent_pid={starter.pid}", "--port=0")
    process = running.launch(tmp_path / "absent", *flags, port_file=tmp_path / "port")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"--parent_pid={starter.pid} is not the parent" in output.strip().splitlines()[-1]


def test_a_child_server_knows_its_starter(tmp_path):
    child = ServerChild(ServeOptions(model="m"))
    options = json.loads(child._argv(tmp_path / "port")[-1])
    assert options["parent_pid"] == os.getpid()


@pytest.fixture
def stub(monkeypatch):
    """A server of few lines in place of the engine's: it says hello, is healthy, and waits."""
    script = (
        "import http.server, pathlib, sys\n"
        "class Ok(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), Ok)\n"
        "print('hello from the stub', flush=True)\n"
        "part = pathlib.Path(sys.argv[1] + '.part')\n"
        "part.write_text(str(server.server_port)); part.rename(sys.argv[1])\n"
        "server.serve_forever()\n"
    )
    argv = lambda self, port_file: [sys.executable, "-c", script, str(port_file)]  # noqa: E731
    monkeypatch.setattr(ServerChild, "_argv", argv)


def test_died_tells_how_the_server_ended_and_waits_till_then(stub):
    async def run():
        async with asyncio.timeout(30), ServerChild(ServeOptions(model="m")) as child:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(child.died(), 0.2)
            assert child.returncode is None, "a watcher that is cancelled leaves the server alone"
            os.kill(child.pid, signal.SIGKILL)
            return await child.died(), await child.died()

    first, again = asyncio.run(run())
    assert first == again
    assert first.startswith("the server ended with code -9: ")
    assert "hello from the stub" in first


def test_a_server_that_ends_at_once_is_quoted(tmp_path):
    async def run():
        async with asyncio.timeout(60), ServerChild(ServeOptions(model=str(tmp_path / "absent"))):
            pass

    with pytest.raises(GenerationError, match=r"ended with code 2: .*cannot read"):
        asyncio.run(run())


def test_folders_of_dead_starters_are_removed(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / "skyrl-serve-abc.child.4194304.1.abcdef"
    (dead / "deep").mkdir(parents=True)
    (tmp_path / "skyrl-serve-plain").mkdir()

    async def run():
        async with asyncio.timeout(30), contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(ServerChild(ServeOptions(model="m")))
            assert not dead.exists()
            (ours,) = set(os.listdir(tmp_path)) - {"skyrl-serve-plain"}
            assert str(os.getpid()) in ours.split(".")
            await stack.enter_async_context(ServerChild(ServeOptions(model="m")))
            assert (tmp_path / ours / "port").exists(), "its starter lives"

    asyncio.run(run())
    assert os.listdir(tmp_path) == ["skyrl-serve-plain"]
