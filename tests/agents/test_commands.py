"""The socket of a foreign scaffold's commands, and the small programs that call it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from skyrl_jax.agents.commands import BadCall, CommandSocket, read_call
from skyrl_jax.agents.external import GUEST
from skyrl_jax.agents.guest import calls
from skyrl_jax.core.errors import DataError, SandboxGone
from skyrl_jax.core.protocols import ExecResult


class EchoShell:
    """Says what it was asked; ``sleep`` waits, ``gone`` and ``zero`` raise, ``slow`` timed out."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, ...], str, dict[str, str], bytes]] = []
        self.cancelled = 0

    async def shell(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        self.asked.append((tuple(argv), cwd, dict(env or {}), stdin))
        if argv[0] == "sleep":
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if argv[0] == "gone":
            raise SandboxGone("the sandbox ended from inside")
        if argv[0] == "zero":
            raise DataError("a command holds a NUL byte")
        if argv[0] == "slow":
            return ExecResult(returncode=137, output="half", timed_out=True)
        return ExecResult(returncode=3, output=" ".join(argv) + "\n")


def serve(tmp_path, talk, *, allow_uid=None):
    """Run ``talk(path, server)`` against a served EchoShell; return (its result, shell, server)."""

    async def run():
        shell = EchoShell()
        uid = os.getuid() if allow_uid is None else allow_uid
        path = tmp_path / "commands.sock"
        async with asyncio.timeout(20), CommandSocket(path, shell, allow_uid=uid) as server:
            result = await talk(str(path), server)
        assert not path.exists()
        return result, shell, server

    return asyncio.run(run())


def ask(*argv, **fields):
    async def talk(path, server):
        return await asyncio.to_thread(calls.run, argv, path=path, **fields)

    return talk


def test_a_call_runs_a_command(tmp_path):
    talk = ask("say", "hi there", cwd="/testbed", env={"A": "b"}, stdin="x\n")
    result, shell, server = serve(tmp_path, talk)
    assert result == (3, "say hi there\n")
    assert shell.asked == [(("say", "hi there"), "/testbed", {"A": "b"}, b"x\n")]
    assert (server.served, server.refused) == (1, 0)


def test_a_time_out_is_told(tmp_path):
    result, _, _ = serve(tmp_path, ask("slow"))
    assert result == (124, "half\n[stopped: it took too long]\n")


def test_a_peer_with_another_uid_gets_nothing_and_is_counted(tmp_path):
    async def talk(path, server):
        with pytest.raises((RuntimeError, ConnectionError)):
            await asyncio.to_thread(calls.run, ["say", "hi"], path=path)

    _, shell, server = serve(tmp_path, talk, allow_uid=os.getuid() + 1)
    assert (shell.asked, server.served, server.refused) == ([], 0, 1)


def test_hanging_up_ends_the_command(tmp_path):
    async def talk(path, server):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"argv": ["sleep"]}\n')
        await writer.drain()
        while not server.served:
            await asyncio.sleep(0.01)
        writer.close()
        await asyncio.sleep(0.2)
        return await asyncio.to_thread(calls.run, ["say", "next"], path=path)

    result, shell, _ = serve(tmp_path, talk)
    assert (result, shell.cancelled) == ((3, "say next\n"), 1)


def test_leaving_ends_what_still_runs(tmp_path):
    async def talk(path, server):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"argv": ["sleep"]}\n')
        while not server.served:
            await asyncio.sleep(0.01)

    _, shell, _ = serve(tmp_path, talk)
    assert shell.cancelled == 1


def test_the_end_of_the_sandbox_reaches_the_episode(tmp_path):
    async def talk(path, server):
        with pytest.raises(RuntimeError, match="gone"):
            await asyncio.to_thread(calls.run, ["gone"], path=path)
        with pytest.raises(SandboxGone):
            await server.failed

    serve(tmp_path, talk)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"nonsense\n", "line of JSON"),
        (b"[]\n", "JSON object"),
        (b"{}\n", "names a program"),
        (b'{"argv": []}\n', "names a program"),
        (b'{"argv": ["a", 1]}\n', "list of strings"),
        (b'{"argv": ["a"], "env": {"A": 1}}\n', "names to strings"),
        (b'{"argv": ["a"], "cwd": 1}\n', "must be strings"),
        (b"[" * 100_000 + b"\n", "line of JSON"),
        (b'{"argv": ["a", "\\ud800"]}\n', "must be text"),
        (b'{"argv": ["a"], "env": {"A": "\\udfff"}}\n', "must be text"),
        (b'{"argv": ["a"], "stdin": "\\ud800"}\n', "must be text"),
    ],
)
def test_what_is_no_call_is_told(tmp_path, line, text):
    with pytest.raises(BadCall, match=text):
        read_call(line)

    async def talk(path, server):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        answer = json.loads(await reader.read())
        writer.close()
        return answer

    answer, shell, _ = serve(tmp_path, talk)
    assert text in answer["error"] and shell.asked == []


def test_a_command_that_cannot_be_sent_is_an_answer(tmp_path):
    async def talk(path, server):
        with pytest.raises(RuntimeError, match="NUL byte"):
            await asyncio.to_thread(calls.run, ["zero"], path=path)
        assert not server.failed.done()

    serve(tmp_path, talk)


def docker(path, *arguments):
    env = {**os.environ, "SKYRL_COMMANDS": path}
    command = [sys.executable, str(GUEST / "docker.py"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)


def test_the_docker_command_of_a_scaffold(tmp_path):
    async def talk(path, server):
        out = {}
        lines = {
            "run": ("run", "-d", "--name", "x", "-w", "/t", "--rm", "image", "sleep", "2h"),
            "exec": ("exec", "-w", "/t", "-e", "A=b=c", "-e", "E=", "episode", "bash", "-c", "x y"),
            "none": ("exec", "--privileged", "episode", "true"),
            "stop": ("stop", "episode"),
            "rm": ("rm", "-f", "episode"),
            "pull": ("pull", "image"),
        }
        for name, line in lines.items():
            out[name] = await asyncio.to_thread(docker, path, *line)
        return out

    out, shell, _ = serve(tmp_path, talk)
    assert out["run"].stdout == "episode\n" and out["run"].returncode == 0
    assert (out["exec"].returncode, out["exec"].stdout) == (3, "bash -c x y\n")
    assert shell.asked == [(("bash", "-c", "x y"), "/t", {"A": "b=c", "E": ""}, b"")]
    assert {name: out[name].returncode for name in ("stop", "rm", "pull", "none")} == {
        "stop": 0, "rm": 0, "pull": 125, "none": 125,
    }  # fmt: skip
    assert "not supported" in out["none"].stderr


def test_docker_exec_says_when_nobody_listens(tmp_path):
    done = docker(str(Path(tmp_path) / "none.sock"), "exec", "episode", "true")
    assert done.returncode == 125 and "docker exec:" in done.stderr
