"""Play the red team: python -m tests.redteam OUT=FILE [BACKENDS=bwrap,docker] [ONLY=NAME,...].

FILE gets one JSON list of rows {"trick", "kind", "backend", "defended", "control"} with a note and
the seconds. Exit code 1 when a row is not (true, true). Docker needs a daemon: DOCKER_HOST, the
system's, or a private one that is started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from skyrl_jax.sandbox.images import base_image
from tests.redteam.runner import Row, play_all
from tests.redteam.world import CACHE, arena
from tests.sandbox.dockerd import build_image, docker_host


async def _play(backend: str, only: list[str]) -> list[Row]:
    base = await asyncio.to_thread(base_image, CACHE)
    with contextlib.ExitStack() as stack:
        image, host = str(base), ""
        if backend == "docker":
            host = stack.enter_context(docker_host())
            image = await asyncio.to_thread(build_image, host, base, "skyrl-redteam:test")
        async with arena(backend, image, host) as ground:
            return await play_all(ground, only)


def main(arguments: list[str]) -> int:
    """Read NAME=VALUE arguments, play, write the rows, say what did not hold."""
    values = dict(item.partition("=")[::2] for item in arguments)
    unknown = set(values) - {"OUT", "BACKENDS", "ONLY"}
    if unknown or not values.get("OUT"):
        print(f"usage: python -m tests.redteam OUT=FILE [BACKENDS=bwrap,docker] [ONLY=NAME,...]")
        return 2
    only = [name for name in values.get("ONLY", "").split(",") if name]
    rows: list[Row] = []
    for backend in values.get("BACKENDS", "bwrap,docker").split(","):
        rows += asyncio.run(_play(backend, only))
    Path(values["OUT"]).write_text(json.dumps(rows, indent=1) + "\n")
    bad = [row for row in rows if not (row["defended"] and row["control"])]
    for row in bad:
        print(f"does not hold: {json.dumps(row)}")
    held = [row for row in rows if row not in bad]
    for kind in ("trick", "suicide"):
        count = len({row["trick"] for row in held if row["kind"] == kind})
        print(f"{kind}: {count} names hold, {sum(row['kind'] == kind for row in held)} rows")
    print(f"{sum(row['seconds'] for row in rows):.0f} s, {len(bad)} rows do not hold")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
