"""Runs bwrap sandboxes as a user without root: started by test_plain_user, prints one JSON line.

Arguments: uid (the process becomes this user first, -1: stays as it is), image, cache directory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  (the user may not be able to read the library)
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from skyrl_jax.core.errors import InfraError
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox import native_build
from skyrl_jax.sandbox.bwrap import BwrapProvider
from skyrl_jax.sandbox.wire import pack_files, unpack_files


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


async def report(image: str, cache: Path) -> dict[str, Any]:
    layer = cache / "layer"
    (layer / "testbed").mkdir(parents=True)
    (layer / "testbed" / "a.txt").write_text("one\n")
    spec = SandboxSpec(
        image=image, layers=(str(layer),), workdir="/testbed", pids=20, memory_mb=400
    )
    found: dict[str, Any] = {"uid": os.getuid()}
    async with BwrapProvider(run_id="plain", cache_dir=cache) as provider:
        try:
            await provider.create(spec)
        except InfraError as error:
            found["without_best_effort"] = str(error)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            box = await provider.create(
                SandboxSpec(
                    **{**{f: getattr(spec, f) for f in spec.__slots__}, "best_effort": True}
                )
            )
        found["warning"] = str(caught[0].message) if caught else ""
        found["caps"] = (await box.exec("grep -E 'Cap(Prm|Eff|Bnd)' /proc/self/status")).output
        found["user_ns"] = (await box.exec("unshare -Ur true")).returncode
        found["processes"] = (await box.exec("ls -d /proc/[0-9]* | wc -l")).output
        found["kill"] = (await box.exec("sleep 50 & kill -9 -1; kill -9 1; echo survived")).output
        found["git"] = (
            await box.exec("git init -q . && git add -A && git commit -qm x; git log")
        ).output
        await box.put("/testbed", pack_files({"b.txt": b"two"}))
        found["got"] = unpack_files(await box.get("/testbed/b.txt"))["b.txt"].decode()
        began = time.monotonic()
        done = await box.exec("setsid sleep 45671 & sleep 45672", timeout_s=0.5)
        found["timed_out"] = [done.timed_out, time.monotonic() - began]
        found["memory"] = (await box.exec("python3 -S -c 'bytearray(1 << 30)'")).output
        forks = "import os\nn = 0\ntry:\n  while n < 500 and os.fork(): n += 1\n"
        forks += "except OSError: print(n)"
        found["forks"] = (
            await box.exec(["python3", "-S", "-c", forks + "\nimport time; time.sleep(1)"])
        ).output
        await box.destroy()
        found["live"] = provider.live
    return found


if __name__ == "__main__":
    if int(sys.argv[1]) >= 0:
        become(int(sys.argv[1]))
        native_build._SOURCES = Path(sys.argv[3]) / "sources"  # the checkout may be private
    print(json.dumps(asyncio.run(report(sys.argv[2], Path(sys.argv[3])))))
