"""Start the embedded engine server as a child process and stop it again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.sandbox.cgroup import run_name, sweep_folders
from skyrl_jax.serve.process import ServeOptions

_TAIL = 2000
_PREFIX = "skyrl-serve-"
_ROOT = Path(__file__).resolve().parents[2]


class ServerChild:
    """A generation server of our own, as an async context manager.

    Args:
        options: what to serve; ``port_file`` and ``parent_pid`` are replaced by our own.
        start_timeout_s: how long the child may take till /health answers 200.
        log: where the child's output goes ("" = a temporary file, removed at the end).
        env: environment of the child (default: this process's).
    """

    def __init__(
        self,
        options: ServeOptions,
        *,
        start_timeout_s: float = 120.0,
        log: Path | str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._options = options
        self._start_timeout_s = start_timeout_s
        self._log = str(log)
        self._env = dict(os.environ if env is None else env)
        paths = [str(_ROOT), self._env.get("PYTHONPATH", "")]
        self._env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self._process: asyncio.subprocess.Process | None = None
        self.base_url = ""

    async def __aenter__(self) -> ServerChild:
        """Start the server and wait until it is healthy.

        Raises:
            GenerationError: it ended or did not answer in time; the end of its log is quoted.
        """
        await asyncio.to_thread(sweep_folders, _PREFIX)
        suffix = f".{run_name('child')}"
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, suffix=suffix)
        port_file = Path(self._folder.name) / "port"
        self._log_path = Path(self._log or Path(self._folder.name) / "log")
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv(port_file), stdout=log, stderr=log, env=self._env
            )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._ready(port_file)
        except TimeoutError:
            text = f"the server was not ready after {self._start_timeout_s:g} s: {self._tail()}"
            await self._stop()
            raise GenerationError(text) from None
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End the server: SIGTERM, then SIGKILL."""
        await self._stop()

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How the server ended, ``None`` while it runs."""
        return None if self._process is None else self._process.returncode

    async def died(self) -> str:
        """Wait, with no deadline but the caller's, for the server's end; say how it ended.

        Call it inside the context; cancel it before a stop that is meant.
        """
        assert self._process is not None
        code = await self._process.wait()
        return f"the server ended with code {code}: {self._tail()}"

    def _argv(self, port_file: Path) -> Sequence[str]:
        options = dataclasses.replace(
            self._options, port_file=str(port_file), parent_pid=os.getpid()
        )
        text = json.dumps(dataclasses.asdict(options))
        return [sys.executable, "-m", "skyrl_jax.serve.process", text]

    async def _ready(self, port_file: Path) -> None:
        assert self._process is not None
        while not port_file.exists():
            if self._process.returncode is not None:
                raise GenerationError(await self.died())
            await asyncio.sleep(0.02)
        self.base_url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        async with aiohttp.ClientSession() as session:
            while not await _healthy(session, self.base_url):
                await asyncio.sleep(0.05)

    def _tail(self) -> str:
        try:
            text = self._log_path.read_text(errors="replace")[-_TAIL:].strip()
        except OSError as error:  # somebody removed the log, or the stop did
            return f"its log cannot be read: {error}"
        return text or "it printed nothing"

    async def _stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(5.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._folder.cleanup()


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with session.get(f"{url}/health", timeout=timeout) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
