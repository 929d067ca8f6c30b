"""The leak test: episodes with faults injected, then count what is left on the host.

python benchmarks/sandbox_leaks.py [--bwrap=700] [--docker=300] [--seed=0] [--out=FILE]

Children (leak_child.py) play scripted episodes on bwrap and on docker, side by side. Into them:
exceptions in every stage, cancelled collections, killed sandboxes (launcher or supervisor of bwrap,
containers), restarts of the docker daemon (SIGTERM and SIGKILL), and the end of the trainer itself
by SIGKILL, SIGTERM, SIGINT or in peace. The daemon, the temporary folder and the run names are this
test's own, so that nothing of anybody else is counted or touched. Needs root and docker.

Prints one JSON line; exit code 1 when anything is left after the reaper, a call or a child was past
its deadline, or a kind of fault was injected less often than ``--each`` asks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import docker
import docker.errors

from benchmarks.leak_count import find_left, launchers_of, supervisors_of
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.sandbox.reaper import reap
from tests.sandbox.dockerd import REPO, PrivateDaemon, build_image

KINDS = ("exception", "cancellation", "kill -9", "daemon restart", "killed container")
ENDS = ("SIGKILL", "SIGKILL", "peace", "SIGKILL", "SIGTERM", "SIGKILL", "SIGINT")
CHILD_DEADLINE_S = 240.0  # of one child's whole work
END_DEADLINE_S = 60.0  # from SIGTERM or SIGINT to its end
SETTLE_S = 15.0  # launchers and daemons end what a killed trainer left (DESIGN: within 15 s)


@dataclass(kw_only=True)
class Totals:
    """What was done, over all children."""

    begun: Counter[str] = field(default_factory=Counter)
    closed: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    over: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    containers: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)


class Child:
    """One trainer process and its log."""

    def __init__(self, bench: Bench, backend: str, number: int, episodes: int) -> None:
        self.backend = backend
        self.rng = random.Random(f"{bench.seed} {backend} {number}")
        self.log = bench.scratch / f"{backend}-{number}.log"
        self.log.touch()
        plan = {
            "backend": backend,
            "run_id": f"leak{os.getpid()}",
            "image": bench.images[backend],
            "cache": str(REPO / ".cache"),
            "scratch": str(bench.scratch),
            "host": bench.daemon.host,
            "episodes": episodes,
            "live": 4,
            "pace_s": 0.6 if backend == "bwrap" else 3.0,
            "think_s": 0.1 if backend == "bwrap" else 0.3,
            "seed": self.rng.random(),
            "log": str(self.log),
        }
        arguments = self.log.with_suffix(".json")
        arguments.write_text(json.dumps(plan))
        env = {**os.environ, "TMPDIR": str(bench.temporary), "DOCKER_HOST": bench.daemon.host}
        with self.log.with_suffix(".err").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.leak_child", str(arguments)],
                cwd=REPO,
                env={**env, "PYTHONPATH": str(REPO)},
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    def events(self) -> list[dict[str, Any]]:
        """Return what it has written; a line that a kill cut short is left out."""
        lines = self.log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    @property
    def begun(self) -> int:
        """Return how many episodes have begun."""
        return sum("begun" in event for event in self.events())

    def wait_for(self, episodes: int, deadline: float) -> bool:
        """Wait until so many episodes have begun; False: it ended before."""
        while self.begun < episodes:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


class Bench:
    """The whole test: a daemon, a temporary folder, two lines of children."""

    def __init__(self, seed: int, each: int, crashes: float) -> None:
        self.seed, self.each, self.crashes = seed, each, crashes
        self.totals = Totals()
        self.lock = threading.Lock()
        self.scratch = Path(tempfile.mkdtemp(prefix="skyrl-leaks-"))
        self.scratch.chmod(0o755)
        self.temporary = self.scratch / "tmp"
        self.temporary.mkdir()
        self.daemon = PrivateDaemon(containerd=True)
        self.images: dict[str, str] = {}

    def open(self) -> None:
        """Start the daemon and make the images."""
        base = base_image(REPO / ".cache")
        self.daemon.start()
        tag = build_image(self.daemon.host, base)
        self.images = {"bwrap": str(base), "docker": tag}

    def close(self) -> None:
        """Take the daemon and the folders away."""
        self.daemon.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def line(self, backend: str, wanted: int, size: int, kills: int) -> None:
        """Run children one after the other until enough episodes have begun."""
        number = 0
        while self._wants(backend, wanted) and number < 4 * (wanted // size + 2):
            episodes = max(1, min(size, wanted - self.totals.begun[backend]))
            end = ENDS[number % len(ENDS)]
            child = Child(self, backend, number, episodes if end == "peace" else 10**6)
            try:
                self._torment(child, end, episodes, kills)
            finally:
                if child.process.poll() is None:
                    child.process.kill()
                    child.process.wait(timeout=30)
                self._add_up(child, end)
            number += 1

    def _wants(self, backend: str, wanted: int) -> bool:
        kinds = ("kill -9", "cancellation") if backend == "bwrap" else KINDS[3:]
        short = any(self.totals.injected[kind] < self.each for kind in kinds)
        return self.totals.begun[backend] < wanted or short

    def _torment(self, child: Child, end: str, episodes: int, kills: int) -> None:
        deadline = time.monotonic() + CHILD_DEADLINE_S
        acts = ["kill"] * kills + (["restart"] if child.backend == "docker" else [])
        child.rng.shuffle(acts)
        for at, act in enumerate(acts, start=1):
            if not child.wait_for(max(1, episodes * at // (len(acts) + 1)), deadline):
                break
            time.sleep(child.rng.uniform(0.0, 0.3))
            self._act(child, act)
        if end != "peace" and child.wait_for(episodes, deadline):
            time.sleep(child.rng.uniform(0.0, 0.5))
            if child.process.poll() is None:
                child.process.send_signal(signal.Signals[end])
                self._count("kill -9" if end == "SIGKILL" else end)
                deadline = time.monotonic() + END_DEADLINE_S
        try:
            child.process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._past(f"{child.backend} child {child.process.pid} ({end})")

    def _act(self, child: Child, act: str) -> None:
        if act == "restart":
            kill = child.rng.random() < self.crashes
            self.daemon.stop(kill=kill)
            self.daemon.start()
            self._count("daemon restart")
            if kill:
                self._count("of these by SIGKILL")
        elif child.backend == "docker":
            self._kill_container(child)
        else:
            pid = child.process.pid
            deadline = time.monotonic() + 5.0
            while time.monotonic() < deadline:
                launchers = launchers_of(pid)
                found = launchers if child.rng.random() < 0.5 else supervisors_of(launchers)
                if found:
                    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(child.rng.choice(found), signal.SIGKILL)
                        self._count("killed bwrap sandbox")
                        return
                time.sleep(0.005)

    def _kill_container(self, child: Child) -> None:
        deadline = time.monotonic() + 15.0
        client = docker.APIClient(base_url=self.daemon.host, timeout=30)
        while time.monotonic() < deadline:
            found = client.containers()
            if found:
                with contextlib.suppress(docker.errors.APIError):  # it has ended meanwhile
                    client.kill(child.rng.choice(found)["Id"])
                    self._count("killed container")
                    break
            time.sleep(0.02)
        client.close()

    def _count(self, kind: str) -> None:
        with self.lock:
            self.totals.injected[kind] += 1

    def _past(self, what: str) -> None:
        with self.lock:
            self.totals.over.append(what)

    def _add_up(self, child: Child, end: str) -> None:
        errors = child.log.with_suffix(".err").read_text()
        with self.lock:
            totals = self.totals
            totals.pids.add(child.process.pid)
            totals.ended[f"{end}: {child.process.returncode}"] += 1
            if child.process.returncode not in (0, 130, -signal.SIGKILL):
                totals.problems.append(f"{end}: {child.process.returncode}: {errors[-600:]}")
            for event in child.events():
                totals.begun[child.backend] += "begun" in event
                totals.closed += "closed" in event
                totals.failures.update(event.get("collected", {}))
                if "fault" in event:
                    totals.injected[event["fault"]] += 1
                if "over" in event:
                    totals.over.append(json.dumps(event))
                if "container" in event:
                    totals.containers.add(event["container"])


def settle(bench: Bench) -> tuple[dict[str, list[str]], float]:
    """Wait until nothing is left without a reaper, or for as long as that may take."""
    began = time.monotonic()
    while True:
        left = find_left(
            bench.temporary,
            bench.daemon,
            bench.totals.pids,
            bench.totals.containers,
            listed_too=False,
        )
        waited = time.monotonic() - began
        if not any(left.values()) or waited > SETTLE_S:
            return left, waited
        time.sleep(0.25)


def run(
    bwrap: int,
    containers: int,
    *,
    size: tuple[int, int],
    seed: int = 0,
    each: int = 1,
    crashes: float = 0.4,
) -> dict[str, Any]:
    """Run the test; return the figures."""
    bench = Bench(seed, each, crashes)
    began = time.monotonic()
    try:
        bench.open()
        with ThreadPoolExecutor(2) as threads:
            lines = [
                threads.submit(bench.line, "bwrap", bwrap, size[0], 1),
                threads.submit(bench.line, "docker", containers, size[1], 2),
            ]
            for line in lines:
                line.result()
        before, waited = settle(bench)
        os.environ.update(TMPDIR=str(bench.temporary), DOCKER_HOST=bench.daemon.host)
        tempfile.tempdir = str(bench.temporary)
        reaped = reap(strays=True)
        totals = bench.totals
        left = find_left(bench.temporary, bench.daemon, totals.pids, totals.containers)
    finally:
        tempfile.tempdir = None
        bench.close()
    return {
        "episodes": sum(totals.begun.values()),
        "bwrap": totals.begun["bwrap"],
        "docker": totals.begun["docker"],
        "closed": totals.closed,
        "injected": dict(sorted(totals.injected.items())),
        "ended": dict(sorted(totals.ended.items())),
        "failed": dict(sorted(totals.failures.items())),
        "left_before_reaper": {name: len(found) for name, found in before.items()},
        "settled_s": round(waited, 2),
        "reaped": [item.what for item in reaped],
        "left": {name: len(found) for name, found in left.items()},
        "what_is_left": [line[:200] for found in left.values() for line in found][:10],
        "over_deadline": len(totals.over),
        "over": totals.over[:5],
        "problems": totals.problems[:3],
        "seconds": round(time.monotonic() - began, 1),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def failed(result: dict[str, Any], each: int) -> list[str]:
    """Return what of a result breaks the promise."""
    bad = [f"{count} {name} left" for name, count in result["left"].items() if count]
    if result["over_deadline"]:
        bad.append(f"{result['over_deadline']} past their deadline")
    bad += [
        f"only {result['injected'].get(kind, 0)} x {kind}"
        for kind in KINDS
        if result["injected"].get(kind, 0) < each
    ]
    return bad + [f"a child broke: {text}" for text in result["problems"]]


def main() -> int:
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bwrap", type=int, default=700)
    parser.add_argument("--docker", type=int, default=300)
    parser.add_argument("--each", type=int, default=20, help="least number of each fault")
    parser.add_argument(
        "--crashes", type=float, default=0.25, help="share of restarts that begin by SIGKILL"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the JSON object here")
    options = parser.parse_args()
    result = run(
        options.bwrap,
        options.docker,
        size=(14, 7),
        seed=options.seed,
        each=options.each,
        crashes=options.crashes,
    )
    bad = failed(result, options.each)
    print(json.dumps(result | {"ok": not bad}), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result | {"ok": not bad}, indent=1) + "\n")
    for text in bad:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
