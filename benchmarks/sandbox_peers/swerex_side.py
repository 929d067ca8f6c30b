"""swe-rex's docker deployment as a side: a server in every container, commands over HTTP.

The daemon of this machine has no bridge, so each server listens on a port of its own on the host's
network, and the package is mounted instead of installed by pipx: both cost swe-rex nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import logging
import os
import pathlib
import tempfile
from collections.abc import Coroutine, Mapping
from typing import Any

os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "ERROR")

import side
import swerex
from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import Command

_PACKAGES = "/opt/swerex"
_START_TIMEOUT_S = 60.0
_START = '#!/bin/sh\nPYTHONPATH={at} exec python3 -m swerex.server --port "$SWEREX_PORT" "$@"\n'


class _Box:
    """A deployment with an event loop of its own: its start blocks the loop while it waits."""

    def __init__(self, deployment: DockerDeployment) -> None:
        self.deployment = deployment
        self._loop = asyncio.new_event_loop()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.do(self.deployment.stop())
        self._loop.close()


def prepare(job: Mapping[str, Any]) -> side.Side:
    """Write the start script; nothing else is shared between sandboxes."""
    logging.disable(logging.WARNING)
    packages = pathlib.Path(swerex.__file__).parents[1]
    start = pathlib.Path(tempfile.mkdtemp(prefix="swerex-")) / "swerex-remote"
    start.write_text(_START.format(at=_PACKAGES))
    start.chmod(0o755)
    ports = itertools.cycle(range(20_000, 28_000))  # in turn: two never get the same one

    def create() -> _Box:
        port = next(ports)
        box = _Box(
            DockerDeployment(
                image=job["image"],
                pull="never",
                port=port,
                startup_timeout=_START_TIMEOUT_S,
                docker_args=[
                    "--network=host",
                    f"--label={job['label']}",
                    f"--volume={packages}:{_PACKAGES}:ro",
                    f"--volume={start}:/usr/local/bin/swerex-remote:ro",
                    f"--env=SWEREX_PORT={port}",
                    f"--memory={job['memory_mb']}m",
                    f"--cpus={job['cpus']}",
                ],
            )
        )
        box.do(box.deployment.start())
        return box

    def run(box: _Box) -> None:
        answer = box.do(box.deployment.runtime.execute(Command(command=["true"])))
        if answer.exit_code:
            raise RuntimeError(f"true failed: {answer}")

    about = f"swe-rex {importlib.metadata.version('swe-rex')}, docker, one server per container"
    return side.Side(create, run, _Box.close, about=about)


if __name__ == "__main__":
    side.serve(prepare)
