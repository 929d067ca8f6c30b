"""mini-swe-agent's environments as sides: docker (its command line) and bubblewrap.

Docker: started with --init and with our limits; its clean-up runs in the background, so a destroy
ends when the container has.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Mapping
from typing import Any

import side


def _run(box: Any) -> None:
    answer = box.execute({"command": "true"})
    if answer["returncode"]:
        raise RuntimeError(f"true failed: {answer}")


def _docker(job: Mapping[str, Any], about: str) -> side.Side:
    from minisweagent.environments.docker import DockerEnvironment

    limits = ["--rm", "--init", "--network=none", "--cap-drop=ALL", f"--label={job['label']}"]
    limits += [f"--memory={job['memory_mb']}m", f"--pids-limit={job['pids']}"]
    limits += [f"--cpus={job['cpus']}", "--security-opt=no-new-privileges"]

    def create() -> Any:
        return DockerEnvironment(image=job["image"], run_args=limits)

    def destroy(box: Any) -> None:
        box.cleanup()
        subprocess.run(["docker", "wait", box.container_id], capture_output=True, timeout=60)
        box.container_id = None  # or its finalizer stops it once more

    return side.Side(create, _run, destroy, about=about)


def _bubblewrap(about: str) -> side.Side:
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment

    return side.Side(BubblewrapEnvironment, _run, lambda box: box.cleanup(), about=about)


def prepare(job: Mapping[str, Any]) -> side.Side:
    """Return the environment that the job names."""
    about = f"mini-swe-agent {importlib.metadata.version('mini-swe-agent')}, {job['kind']}"
    return _docker(job, about) if job["kind"] == "docker" else _bubblewrap(about)


if __name__ == "__main__":
    side.serve(prepare)
