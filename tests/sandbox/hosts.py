"""Sandbox hosts in processes of their own, for tests."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.sandbox.dockerd import REPO

TOKEN = "a-token-of-the-tests"
_READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class HostProcess:
    """A sandbox host that runs."""

    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait(timeout=20)


def start_host(
    *flags: str, port: int = 0, before: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> HostProcess:
    """Start a host; ``before`` is put in front of its command (nsenter ...)."""
    command = [*before, sys.executable, str(REPO / "launchers" / "sandbox_host.py")]
    command += [f"--cache_dir={REPO / '.cache'}", f"--port={port}", *flags]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(env or {}), "SKYRL_SANDBOX_TOKEN": TOKEN},
            start_new_session=True,
        )
        line = _first_line(process)
        if not line.startswith("sandbox host: "):
            process.kill()
            process.wait(timeout=20)
            errors.seek(0)
            raise RuntimeError(f"the sandbox host did not start: {line!r} {errors.read()[-2000:]}")
    return HostProcess(url=line.removeprefix("sandbox host: ").strip(), process=process)


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    until = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < until:
        if select.select([process.stdout], [], [], 0.2)[0]:
            return process.stdout.readline()
    return ""


def stop_host(host: HostProcess) -> None:
    """End it in order, or else by force."""
    host.process.terminate()
    try:
        host.process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        host.kill()
    if host.process.stdout is not None:
        host.process.stdout.close()


@contextlib.contextmanager
def host_process(*flags: str, port: int = 0) -> Iterator[HostProcess]:
    """A host that ends with the block."""
    host = start_host(*flags, port=port)
    try:
        yield host
    finally:
        stop_host(host)
