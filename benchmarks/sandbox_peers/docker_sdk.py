"""The raw docker SDK as a side: a detached container, exec_run, remove; the same limits as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import docker
import side


def prepare(job: Mapping[str, Any]) -> side.Side:
    """Connect once; every thread uses the client."""
    client = docker.DockerClient(base_url=job["host"], timeout=120, max_pool_size=side.THREADS)

    def create() -> Any:
        return client.containers.run(
            job["image"],
            ["sleep", "3600"],
            detach=True,
            init=True,
            labels=dict([job["label"].split("=")]),
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=job["memory_mb"] << 20,
            memswap_limit=job["memory_mb"] << 20,
            pids_limit=job["pids"],
            cpu_period=100_000,
            cpu_quota=int(job["cpus"] * 100_000),
        )

    def run(box: Any) -> None:
        code, output = box.exec_run(["true"])
        if code:
            raise RuntimeError(f"true ended with {code}: {output!r}")

    def destroy(box: Any) -> None:
        box.remove(force=True, v=True)

    return side.Side(create, run, destroy, about=f"docker SDK {docker.__version__}")


if __name__ == "__main__":
    side.serve(prepare)
