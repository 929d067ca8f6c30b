"""Measure one backend's sandboxes, in turns with others' in the same run.

Command: ``python benchmarks/sandbox.py --backend=docker [--peers=docker_sdk,swerex,mini]
[--rounds=3] [--cycles=6] [--seconds=4] [--exec_below=6] [--roundtrip_below=2]
[--first_below=60] [--at_least=1.3]``

Prints one JSON line; times are milliseconds.

create_p50_ms, destroy_p50_ms       one at a time; destroyed = nothing of it is left
exec_p50_ms, exec_p95_ms            of ``true``
roundtrip_p50_ms                    of the channel alone: the supervisor answers an empty request
cycles_per_s                        {"1", "4", "16" at a time}: create, 3 x ``true``, destroy
pooled_cycles_per_s                 docker: the same with sandboxes from a warm pool. It is full at
                                    the beginning and full again at the end: its refill is counted.
                                    No sandbox is used twice
acquire_to_first_result_p50_ms      docker: from asking the pool for a sandbox to the result of
                                    ``true`` in it, at 0.9 x the best pooled rate, so while it is
                                    refilled
peers                               {name: the same as far as it has it}
                                    (swe-rex has no rate at 16: see MOST)
ratio                               best rate of ours (docker: pooled) / best of the raw docker SDK
load                                1-minute load average as the run began

The sides take turns: latencies are medians over all rounds, rates medians of the rounds' rates.
Each peer runs in its own virtual environment, made where absent from
benchmarks/sandbox_peers/PEER.txt under .cache/lanes/bench-sandbox-PEER. Peers that need docker use
the daemon of DOCKER_HOST, else the system's, else a private one that ends with this command. Flags
with "below" and "least" are bars: exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner import peer_python
from rounds import PAUSE_S, Side, Worker, WorkerFailed, order

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "sandbox_peers"
BACKENDS = ("bwrap", "docker", "process")
# peer -> its sides: (name, environment and script, what the job says beside the rest)
SIDES: dict[str, tuple[tuple[str, str, dict[str, str]], ...]] = {
    "docker_sdk": (("docker_sdk", "docker_sdk", {}),),
    "swerex": (("swerex", "swerex_side", {}),),
    "mini": (
        ("mini_docker", "mini", {"kind": "docker"}),
        ("mini_bwrap", "mini", {"kind": "bubblewrap"}),
    ),
}
OURS = "ours"
CONCURRENCY = (1, 4, 16)
LIMITS = {"cpus": 1.0, "memory_mb": 512, "pids": 64}  # every side's, as far as it has them
POOL = {"pool": 8, "creates": 4}
PACE = 0.9  # of the sustained rate
# swe-rex starts a server of Python in every container: 16 at a time take too long on two cores.
MOST = {"swerex": 4}


def main(argv: Sequence[str]) -> int:
    """Measure and print; 1 where a bar is missed, 2 where a side failed."""
    options = parse(argv)
    try:
        with world(options) as job:
            result = run(options, job)
    except (WorkerFailed, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result), flush=True)
    missed = misses(options, result)
    for text in missed:
        print(text, file=sys.stderr)
    return 1 if missed else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ends the program with status 2 and a reason where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--peers", default="", help=f"some of {','.join(SIDES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=6, help="one at a time, in a round")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each rate, in a round")
    parser.add_argument("--exec_below", type=float, help="bar on exec_p50_ms")
    parser.add_argument("--roundtrip_below", type=float, help="bar on roundtrip_p50_ms")
    parser.add_argument("--first_below", type=float, help="bar on acquire_to_first_result_p50_ms")
    parser.add_argument("--at_least", type=float, help="bar on ratio; needs the peer docker_sdk")
    options = parser.parse_args(argv)
    options.peers = [name for name in options.peers.split(",") if name]
    for name in options.peers:
        if name not in SIDES:
            parser.error(f"no peer {name!r}; known: {', '.join(SIDES)}")
    if options.at_least is not None and "docker_sdk" not in options.peers:
        parser.error("--at_least compares with the raw docker SDK: add it to --peers")
    if min(options.rounds, options.cycles) < 1 or options.seconds <= 0:
        parser.error("--rounds, --cycles and --seconds must be above 0")
    return options


@contextlib.contextmanager
def world(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Make what the sides share, image and daemon; yields the job of all sides."""
    sys.path.insert(0, str(ROOT))
    from skyrl_jax.sandbox.images import base_image
    from tests.sandbox.dockerd import build_image, docker_host

    cache = ROOT / ".cache"
    job: dict[str, Any] = {"cache": str(cache), "backend": options.backend, **LIMITS, **POOL}
    root = base_image(cache) if options.backend != "process" or options.peers else Path()
    with contextlib.ExitStack() as stack:
        if options.backend == "docker" or options.peers:
            host = stack.enter_context(docker_host())
            job |= {"host": host, "image": build_image(host, root, "skyrl-sandbox:bench")}
            job["label"] = f"skyrl.bench={os.getpid()}"
            stack.callback(_remove_containers, host, job["label"])
        yield job | {"root": str(root)}


def _remove_containers(host: str, label: str) -> None:
    """Remove what a peer that failed has left."""
    listed = ["docker", "-H", host, "ps", "-aq", "--filter", f"label={label}"]
    left = subprocess.run(listed, capture_output=True, text=True, timeout=60).stdout.split()
    if left:
        remove = ["docker", "-H", host, "rm", "-f", *left]
        subprocess.run(remove, capture_output=True, timeout=120)


def run(options: argparse.Namespace, job: Mapping[str, Any]) -> dict[str, Any]:
    """Start the sides, let them take turns and return the figures (module docstring)."""
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        sides = {OURS: stack.enter_context(_ours(options, job))}
        for peer in options.peers:
            python = peer_python(f"sandbox-{peer}", pins=PEERS / f"{peer}.txt")
            for name, script, extra in SIDES[peer]:
                worker = Worker(name, python, PEERS / f"{script}.py", {**job, **extra}, _env(job))
                sides[name] = stack.enter_context(worker)
        played = play(sides, options)
        pooled = pool_figures(sides[OURS], options) if options.backend == "docker" else {}
        about = {name: side.about["about"] for name, side in sides.items()}
        for side in sides.values():
            side.ask({"do": "end"})
    return summary(options.backend, played, pooled, about) | {"load": round(load, 2)}


def _ours(options: argparse.Namespace, job: Mapping[str, Any]) -> Worker:
    image = job["image"] if options.backend == "docker" else job["root"]
    ours = {**job, "image": "" if options.backend == "process" else image}
    env = {**_env(job), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return Worker(OURS, Path(sys.executable), PEERS / "ours.py", ours, env)


def _env(job: Mapping[str, Any]) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if "host" in job:
        env["DOCKER_HOST"] = job["host"]
    return env | {"PYTHONUNBUFFERED": "1", "MSWEA_SILENT_STARTUP": "1"}


Played = dict[str, dict[str, list[float]]]


def play(sides: Mapping[str, Side], options: argparse.Namespace) -> Played:
    """Let the sides take turns.

    Returns:
        {side: {"create" | "exec" | "destroy" | "roundtrip": [ms], "1" | "4" | "16": [cycles/s]}}.
    """
    found: Played = {name: {} for name in sides}
    for number in range(options.rounds):
        for name in order(number, list(sides)):
            time.sleep(PAUSE_S)
            asked = {"do": "latency", "cycles": options.cycles, "execs": 10}
            for key, values in sides[name].ask(asked).items():
                found[name].setdefault(key, []).extend(values)
        for at_once in CONCURRENCY:
            for name in order(number, [s for s in sides if at_once <= MOST.get(s, at_once)]):
                time.sleep(PAUSE_S)
                asked = {"do": "cycles", "concurrency": at_once, "seconds": options.seconds}
                found[name].setdefault(str(at_once), []).append(_rate(sides[name].ask(asked)))
    return found


def pool_figures(ours: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Return the pooled rates {"1": [..], ...} and, at 0.9 x the best, "first": [ms]."""
    found: dict[str, Any] = {str(n): [] for n in CONCURRENCY}
    for _ in range(options.rounds):
        for at_once in CONCURRENCY:
            time.sleep(PAUSE_S)
            asked = {"do": "pooled", "concurrency": at_once, "seconds": options.seconds}
            found[str(at_once)].append(_rate(ours.ask(asked)))
    rate = PACE * max(statistics.median(found[str(n)]) for n in CONCURRENCY)
    asked = {"do": "paced", "rate": rate, "seconds": 2 * options.seconds}
    return found | {"first": ours.ask(asked)["first"], "pace_per_s": rate}


def _rate(answer: Mapping[str, float]) -> float:
    return answer["cycles"] / answer["seconds"]


def summary(
    backend: str, played: Played, pooled: Mapping[str, Any], about: Mapping[str, str]
) -> dict[str, Any]:
    """Turn what was played into the result."""
    result: dict[str, Any] = {"backend": backend, "about": about[OURS], **figures(played[OURS])}
    if pooled:
        result["pooled_cycles_per_s"] = _rates(pooled)
        result["acquire_to_first_result_p50_ms"] = percentile(pooled["first"], 50)
        result["acquire_to_first_result_p95_ms"] = percentile(pooled["first"], 95)
        result["pace_per_s"] = pooled["pace_per_s"]
    result["peers"] = {
        name: {"about": about[name], **figures(values)}
        for name, values in played.items()
        if name != OURS
    }
    if "docker_sdk" in played:
        sustained = pooled if backend == "docker" else played[OURS]
        result["ratio"] = _best(sustained) / _best(played["docker_sdk"])
    return rounded(result)


def figures(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the figures that one side has."""
    result: dict[str, Any] = {"create_p50_ms": percentile(found["create"], 50)}
    result |= {f"exec_p{p}_ms": percentile(found["exec"], p) for p in (50, 95)}
    if found["roundtrip"]:
        result["roundtrip_p50_ms"] = percentile(found["roundtrip"], 50)
    result["destroy_p50_ms"] = percentile(found["destroy"], 50)
    return result | {"cycles_per_s": _rates(found)}


def _rates(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {str(n): statistics.median(found[str(n)]) for n in CONCURRENCY if str(n) in found}


def _best(found: Mapping[str, Sequence[float]]) -> float:
    return max(_rates(found).values())


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def misses(options: argparse.Namespace, result: Mapping[str, Any]) -> list[str]:
    """Return a line for each bar that the result misses."""
    bars = (
        ("exec_p50_ms", options.exec_below),
        ("roundtrip_p50_ms", options.roundtrip_below),
        ("acquire_to_first_result_p50_ms", options.first_below),
    )
    found = [
        f"{result['backend']}: {name} is {result[name]:g}, not below {bar:g}"
        for name, bar in bars
        if bar is not None and result[name] >= bar
    ]
    if options.at_least is not None and result["ratio"] < options.at_least:
        found.append(
            f"{result['backend']}: {result['ratio']:g} x the raw docker SDK's cycles, under "
            f"{options.at_least:g}"
        )
    return found


def rounded(value: Any) -> Any:
    """Keep 4 digits: the rest is noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
