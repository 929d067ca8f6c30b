"""Play the red team: python -m tests.redteam OUT=FILE [BACKENDS=bwrap,docker] [ONLY=NAME,...].

FILE gets one JSON list of rows {"trick", "kind", "backend", "defended", "control"} with a note and
the seconds, written anew after each row; RESUME=1 keeps the rows of FILE that hold and plays the
others. Exit code 1 when a row is not (true, true). Docker needs a daemon: DOCKER_HOST, the
system's, or a private one that is started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from skyrl_jax.sandbox.images import base_image
from tests.redteam.runner import Row, holds, names, play
from tests.redteam.world import CACHE, Arena, arena
from tests.sandbox.dockerd import build_image, docker_host

_KNOWN = ("OUT", "BACKENDS", "ONLY", "RESUME")


class Sheet:
    """The rows in a file, whole after every row.

    Args:
        path: the file.
        resume: keep its rows that hold.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Read what is kept."""
        self._path = path
        old = json.loads(path.read_text()) if resume and path.exists() else []
        self.rows: list[Row] = [row for row in old if holds(row)]

    def has(self, backend: str, name: str) -> bool:
        """Say whether a row needs no play."""
        return any((row["backend"], row["trick"]) == (backend, name) for row in self.rows)

    def add(self, row: Row) -> None:
        """Take a row and write the file."""
        self.rows.append(row)
        draft = self._path.with_name(self._path.name + ".part")
        draft.write_text(json.dumps(self.rows, indent=1) + "\n")
        draft.replace(self._path)


@contextlib.asynccontextmanager
async def ground(backend: str) -> AsyncIterator[Arena]:
    """Open an arena with everything that its backend needs."""
    base = await asyncio.to_thread(base_image, CACHE)
    with contextlib.ExitStack() as stack:
        image, host = str(base), ""
        if backend == "docker":
            host = stack.enter_context(docker_host())
            image = await asyncio.to_thread(build_image, host, base, "skyrl-redteam:test")
        async with arena(backend, image, host) as opened:
            yield opened


async def _play(backend: str, only: Sequence[str], sheet: Sheet) -> None:
    async with ground(backend) as opened:
        known = names(opened)
        for name in set(only) - set(known):
            print(f"no trick or suicide is named {name!r}")
        for name in known:
            if (only and name not in only) or sheet.has(backend, name):
                continue
            row = await play(opened, name)
            sheet.add(row)
            if not holds(row):
                print(f"does not hold: {json.dumps(row)}", flush=True)


def main(arguments: list[str]) -> int:
    """Read NAME=VALUE arguments, play, write the rows, say what did not hold."""
    values = dict(item.partition("=")[::2] for item in arguments)
    if set(values) - set(_KNOWN) or not values.get("OUT"):
        options = " ".join(f"[{name}=...]" for name in _KNOWN[1:])
        print(f"usage: python -m tests.redteam OUT=FILE {options}")
        return 2
    only = [name for name in values.get("ONLY", "").split(",") if name]
    sheet = Sheet(Path(values["OUT"]), resume=values.get("RESUME", "0") not in ("", "0"))
    for backend in values.get("BACKENDS", "bwrap,docker").split(","):
        asyncio.run(_play(backend, only, sheet))
    return _tell(sheet.rows)


def _tell(rows: Sequence[Row]) -> int:
    """Print the counts; return the exit code."""
    bad = [row for row in rows if not holds(row)]
    for kind, backend in sorted({(row["kind"], row["backend"]) for row in rows}):
        mine = [row for row in rows if (row["kind"], row["backend"]) == (kind, backend)]
        print(f"{kind} on {backend}: {sum(map(holds, mine))} of {len(mine)} hold")
    print(f"{sum(row['seconds'] for row in rows):.0f} s, {len(bad)} rows do not hold")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
