"""The sandboxes' promises: one contract, no leak, no cheat, many hosts, images, milliseconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from checks import Clone, Outcome, Part
from gateway_promises import lane
from learner_parts import PATIENCE_S, PYTHON, Check, proved, script
from learner_promises import HOUSE
from main_job import setup, tests

CONTRACT = (
    "tests/sandbox/test_contract.py",
    "tests/sandbox/test_isolation.py",
    "tests/sandbox/test_filter.py",
    "tests/sandbox/test_output.py",
    "tests/sandbox/test_missing_parts.py",
    "tests/sandbox/test_programs.py",
    "tests/sandbox/test_plain_user.py",
)
FAULTS = ("tests/test_faults_e.py", "tests/test_faults_b.py")
HOSTS = (
    "tests/sandbox/test_remote.py",
    "tests/sandbox/test_fleet.py",
    "tests/sandbox/test_scale.py",
)
LIFECYCLE = (
    "tests/sandbox/test_registry.py",
    "tests/sandbox/test_owner_death.py",
    "tests/benchmarks/test_sandbox_leaks.py",
)
IMAGES = (
    "tests/sandbox/test_image_parts.py",
    "tests/sandbox/test_image_store.py",
    "tests/tasks/test_row_images.py",
)
OUTPUT = ("tests/sandbox/test_output.py",)
# Each: part, promise, the tests that prove it.
PROVED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("contract", "one contract on bwrap, docker, process and remote", CONTRACT),
    ("faults", "faults.md: the 20 of section E, C41, C43, 8 rows of B", FAULTS),
    ("output", "20 MB without a newline, invalid UTF-8, a reader of stdin: under 1 s, cut", OUTPUT),
    ("hosts", "hosts over HTTP: token, once, leases, deaths", HOSTS),
    ("images", "pulled under its SWE-bench name by evaluate.py; missing; 429; disk", IMAGES),
    ("lifecycle", "registry, reaper, owner's death, a small leak test", LIFECYCLE),
    ("house", "import contracts, ruff, mypy run in make test", HOUSE),
)
TRICKS, SUICIDES = 25, 10
BACKENDS = ("bwrap", "docker")
EPISODES = {"bwrap": 700, "docker": 300}
EACH_FAULT = 20
LIVE, PLAYED, HOSTS_AT_WORK = 1000, 4000, 4
LAG_MS, THREADS, MEMORY_MB = 100.0, 100, 2000.0


def leaks(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Play 1,000 episodes with faults injected and count what is left on the host."""
    ran, found = script(clone, "benchmarks/sandbox_leaks.py", log="leaks.log")
    held = (
        ran.status == 0
        and all(found[backend] >= wanted for backend, wanted in EPISODES.items())
        and min(found["injected"].values()) >= EACH_FAULT
        and not any(found["left"].values())
        and found["over_deadline"] == 0
        and not found["problems"]
    )
    return Outcome(held=held, figures=found)


def redteam(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Play every trick and suicide on both backends, each with its control."""
    sheet = clone.root / ".cache" / "redteam.json"
    sheet.unlink(missing_ok=True)
    command = ["make", "redteam-json", "OUT=.cache/redteam.json"]
    ran = clone.run(command, log="redteam.log", timeout_s=PATIENCE_S, check=False)
    rows = json.loads(sheet.read_text()) if sheet.exists() else []
    told = tally(rows)
    return Outcome(held=ran.status == 0 and all_hold(told), figures=told | {"seconds": ran.seconds})


def tally(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"trick on bwrap": [that hold, of]}, and the rows that do not hold."""
    held: Counter[str] = Counter()
    played: Counter[str] = Counter()
    for row in rows:
        name = f"{row['kind']} on {row['backend']}"
        played[name] += 1
        held[name] += row["defended"] is True and row["control"] is True
    bad = [dict(row) for row in rows if not (row["defended"] is True and row["control"] is True)]
    return {name: [held[name], played[name]] for name in sorted(played)} | {"bad": bad}


def all_hold(told: Mapping[str, Any]) -> bool:
    """Tell whether enough tricks and suicides were played on both backends and all of them hold."""
    wanted = {f"trick on {name}": TRICKS for name in BACKENDS}
    wanted |= {f"suicide on {name}": SUICIDES for name in BACKENDS}
    enough = all(told.get(name, [0, 0])[0] >= least for name, least in wanted.items())
    return enough and not told["bad"]


def scale(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Play 4,000 episodes over four hosts in network namespaces; one host is killed midway."""
    ran, found = script(clone, "benchmarks/sandbox_scale.py", log="scale.log")
    held = (
        ran.status == 0
        and found["held"] is True
        and found["live_peak"] >= LIVE
        and found["episodes"] == found["ended_once"] == PLAYED
        and found["host_killed"] > 0
        and found["hosts_down"] == 1
        and found["wrong"] == found["left"] == 0
        and 0 < found["lag_p99_ms"] < LAG_MS
        and 0 < found["threads"] < THREADS
        and 0 < found["rss_mb"] < MEMORY_MB
    )
    return Outcome(held=held, figures=found)


def speed(backend: str, **below: float) -> Check:
    """Return a check of benchmarks/sandbox.py.

    Args:
        backend: in turns with all peers.
        below: {figure: its bar}; "ratio" is a least value instead.
    """

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        argv = [".ci/with_docker.py", PYTHON, "benchmarks/sandbox.py", f"--backend={backend}"]
        argv += ["--peers=docker_sdk,swerex,mini"]
        ran, found = script(clone, *argv, log=f"speed-{backend}.log")
        held = ran.status == 0 and len(found["peers"]) == 4
        for name, bar in below.items():
            held = held and (found[name] >= bar if name == "ratio" else 0 < found[name] < bar)
        return Outcome(held=held, figures=found | {"bars": below})

    return run


PARTS: tuple[Part, ...] = (
    Part(name="setup", promise="a fresh clone sets itself up", run=setup),
    Part(name="tests", promise="make test in 15 min after downloads, 0 skipped", run=tests),
    *(Part(name=name, promise=told, run=proved(*nodes)) for name, told, nodes in PROVED),
    Part(
        name="lane-ray",
        promise="the contract on bwrap placed by Ray; a node dies, its sandboxes are replaced",
        run=lane("ray"),
    ),
    Part(
        name="lane-kubernetes",
        promise="the contract on pods of a fake API server, by the official client",
        run=lane("kubernetes"),
    ),
    Part(
        name="leaks",
        promise="700 + 300 episodes, each fault 20 times: nothing is left, nothing hangs",
        run=leaks,
    ),
    Part(
        name="redteam",
        promise="25 tricks and 10 suicides on bwrap and docker: defended, every control bites",
        run=redteam,
    ),
    Part(
        name="scale",
        promise="4 hosts, 1,000 live, 4,000 episodes, one host killed: lag, threads, memory",
        run=scale,
    ),
    Part(
        name="speed-bwrap",
        promise="round trip p50 < 2 ms, `true` p50 < 6 ms",
        run=speed("bwrap", roundtrip_p50_ms=2.0, exec_p50_ms=6.0),
    ),
    Part(
        name="speed-docker",
        promise="pool to first result p50 < 60 ms; 1.3 x the raw SDK's cycles, refill counted",
        run=speed("docker", roundtrip_p50_ms=2.0, acquire_to_first_result_p50_ms=60.0, ratio=1.3),
    ),
)
