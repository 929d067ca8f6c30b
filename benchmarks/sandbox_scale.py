"""Many sandbox hosts and one driver: does every episode end once, and does the driver keep up?

Command (root): ``python benchmarks/sandbox_scale.py [--live=1000] [--episodes=4000] [--hosts=4]``

Prints one JSON line; exits with 1 where a bar is not held ("held").

episodes      played: create, two commands with a pause between, destroy, and a grading in a fresh
              sandbox (real actor code; agent and policy are scripts)
ended_once    episodes that ended exactly once. Bar: all
live_peak     sandboxes that were live at once, as the driver counts them; "hosts_peak": as the
              hosts count them. The first wave waits until --live are there. Bar: --live
host_killed   episodes that ended as FAILED(infra) after the kill -9 of one host, in the middle
wrong         episodes whose status or score is not what the script must lead to. Bar: 0
lag_ms        lateness of a 20 ms timer in the driver's event loop. Bar: p99 < 100
threads       of the driver at most. Bar: < 100. rss_mb: its largest. Bar: < 2000
left          mounts, cgroups and processes of sandboxes when the hosts have ended. Bar: 0

Each host is a process in a network namespace of its own, on a bridge; bwrap makes the sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skyrl_jax.actor.collect import Progress, collect  # noqa: E402
from skyrl_jax.core.config import RolloutConfig  # noqa: E402
from skyrl_jax.core.protocols import Environment, Generator, SandboxSpec, StepResult  # noqa: E402
from skyrl_jax.core.types import Episode, Message, Score, Status, Task, ToolCall  # noqa: E402
from skyrl_jax.sandbox.bwrap import prepare_layer  # noqa: E402
from skyrl_jax.sandbox.fleet import FleetProvider  # noqa: E402
from tests.sandbox.hosts import TOKEN, HostProcess, start_host, stop_host  # noqa: E402

LAG_MS, THREADS, RSS_MB = 100.0, 100, 2000.0
SAMPLES = 4  # episodes of a task
TICK_S = 0.02
LEASE_S = 120.0  # hosts and driver share two cores here
WAIT_S = 900.0  # of the first wave for the last of its sandboxes


# -- machines ------------------------------------------------------------------------------------


def ip(*arguments: str, check: bool = True) -> None:
    """Run ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def network(name: str, hosts: int) -> Iterator[list[tuple[str, str]]]:
    """Make a bridge and a network namespace per host; yields (namespace, address) of each."""
    bridge = f"{name}br"
    spaces = [(f"{name}{number}", f"10.213.0.{10 + number}") for number in range(hosts)]

    def remove() -> None:
        for space, _ in spaces:
            ip("netns", "del", space, check=False)
        ip("link", "del", bridge, check=False)

    remove()  # what a killed run left
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", "10.213.0.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for space, address in spaces:
            ip("netns", "add", space)
            ip("link", "add", f"{space}v", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{space}v", "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield spaces
    finally:
        remove()


@contextlib.contextmanager
def machines(name: str, hosts: int, capacity: int) -> Iterator[list[HostProcess]]:
    """Start a sandbox host in each namespace."""
    started: list[HostProcess] = []
    with network(name, hosts) as spaces:
        try:
            for space, address in spaces:
                # not `ip netns exec`: it mounts a new /sys, without the cgroups
                before = ["nsenter", f"--net=/run/netns/{space}"]
                flags = [f"--address={address}", f"--capacity={capacity}", "--creates=4"]
                flags.append(f"--lease_s={LEASE_S}")
                started.append(start_host(*flags, before=before))
            yield started
        finally:
            for host in started:
                stop_host(host)


def leftovers(pids: Sequence[int]) -> list[str]:
    """Cgroups, launchers and mounts of these hosts' sandboxes."""
    found = [
        str(path) for pid in pids for path in Path("/sys/fs/cgroup").glob(f"*/skyrl/host.{pid}.*")
    ]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if any(b"\0-p\0%d\0" % pid in line for pid in pids):
                found.append(line.replace(b"\0", b" ").decode()[:80])
    mounts = Path("/proc/mounts").read_text().splitlines()
    return found + [line for line in mounts if "skyrl-stage" in line]


# -- episodes ------------------------------------------------------------------------------------


@dataclass
class Suite:
    """Tasks whose world is one sandbox; counts what is live and lets the first wave go together."""

    spec: SandboxSpec
    target: int
    pause_s: float
    live: int = 0
    peak: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self, change: int) -> None:
        """Note that a sandbox began or ended."""
        self.live += change
        self.peak = max(self.peak, self.live)
        if self.live >= self.target:
            self.full.set()

    def tasks(self, split: str) -> Sequence[Task]:
        """None: they are made in ``play``."""
        return ()

    def environment(self, task: Task, provider: Any) -> World:
        """Return a new world."""
        return World(self, task, provider)

    async def reward(self, task: Task, submission: str, provider: Any) -> Score:
        """Grade in a fresh sandbox."""
        box = await provider.create(self.spec)
        self.count(+1)
        try:
            done = await box.exec(["test", submission.strip(), "=", f"made {task.task_id}"])
        finally:
            self.count(-1)
            await box.destroy()
        good = done.returncode == 0
        return Score(value=float(good), verdict="resolved" if good else "unresolved")


class World:
    """One sandbox, whose commands come from the agent's calls."""

    def __init__(self, suite: Suite, task: Task, provider: Any) -> None:
        """Keep what is needed."""
        self._suite = suite
        self._task = task
        self._provider = provider
        self._box: Any = None

    async def reset(self) -> tuple[Message, ...]:
        """Make the sandbox."""
        self._box = await self._provider.create(self._suite.spec)
        self._suite.count(+1)
        return (Message(role="user", content=self._task.prompt),)

    async def step(self, tool_calls: Sequence[ToolCall]) -> StepResult:
        """Run a command."""
        done = await self._box.exec(tool_calls[0].arguments["command"])
        return StepResult(messages=(Message(role="tool", content=done.output),))

    async def submission(self) -> str | None:
        """Return what the commands made."""
        return str((await self._box.exec("cat made.txt")).output)

    async def close(self) -> None:
        """Destroy the sandbox."""
        box, self._box = self._box, None
        if box is not None:
            self._suite.count(-1)
            await box.destroy()


@dataclass(frozen=True)
class ScriptedAgent:
    """Waits for the first wave to be complete, runs its commands, submits."""

    suite: Suite

    async def run(
        self, task: Task, environment: Environment, generator: Generator, *, sample_index: int
    ) -> Episode:
        """Play one episode."""
        del generator
        async with asyncio.timeout(WAIT_S):
            await self.suite.full.wait()
        for command in (f"echo made {task.task_id} > made.txt", "cat made.txt"):
            await environment.step([ToolCall(name="bash", arguments={"command": command})])
            await asyncio.sleep(self.suite.pause_s)  # a policy would sample now
        return Episode(
            task_id=task.task_id,
            sample_index=sample_index,
            messages=(),
            turns=(),
            status=Status.FINISHED,
            reason="submit",
            submission=await environment.submission(),
            temperature=1.0,
        )


def rollout(live: int) -> RolloutConfig:
    """Return the limits of the collection."""
    return RolloutConfig(
        tasks_per_step=1, samples_per_task=SAMPLES, revisit_fraction=0.0, temperature=1.0,
        top_p=1.0, top_k=-1, max_turns=4, max_prompt_tokens=1, max_new_tokens=1,
        max_episode_tokens=2, live_sandboxes=live, init_concurrency=32, grade_concurrency=32,
        create_timeout_s=300.0, init_timeout_s=600.0, run_timeout_s=1200.0, grade_timeout_s=600.0,
        destroy_timeout_s=60.0, breaker=0,
    )  # fmt: skip


# -- the driver ----------------------------------------------------------------------------------


@dataclass
class Watch:
    """What the driver's process is like while it works."""

    lags_ms: list[float] = field(default_factory=list)
    threads: int = 0
    hosts_peak: int = 0

    async def run(self, fleet: FleetProvider) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags_ms.append(1000 * max(0.0, loop.time() - due))
            if len(self.lags_ms) % 25 == 0:
                self.threads = max(self.threads, len(os.listdir("/proc/self/task")))
                self.hosts_peak = max(self.hosts_peak, fleet.reported)

    def lag(self, fraction: float) -> float:
        """Return a quantile of the lags, ms."""
        return round(sorted(self.lags_ms)[int(fraction * (len(self.lags_ms) - 1))], 1)


async def play(
    options: argparse.Namespace, hosts: list[HostProcess], layer: Path
) -> dict[str, Any]:
    """Collect the episodes; kill a host when half of them are done."""
    spec = SandboxSpec(
        image="", layers=(str(layer),), workdir="/testbed", cpus=1.0, memory_mb=64, pids=16,
        disk_mb=8, lifetime_s=3600.0,
    )  # fmt: skip
    suite = Suite(spec=spec, target=options.live, pause_s=options.pause)
    tasks = [Task(task_id=f"task-{n}", prompt="go") for n in range(options.episodes // SAMPLES)]
    total = len(tasks) * SAMPLES
    began, ended, killed_at = time.monotonic(), 0, 0.0

    def progress(done: Progress) -> None:
        nonlocal ended, killed_at
        ended += 1
        if not killed_at and done.done * 2 >= total:
            killed_at = time.monotonic() - began
            hosts[0].process.kill()
        if ended % max(1, total // 20) == 0:
            passed = time.monotonic() - began
            print(f"{passed:.0f} s: {ended} of {total}, live {suite.live}", file=sys.stderr)

    watch = Watch()
    async with FleetProvider([host.url for host in hosts], token=TOKEN) as fleet:
        watching = asyncio.create_task(watch.run(fleet))
        collected = await collect(
            tasks,
            SAMPLES,
            suite=suite,
            provider=fleet,
            generator=None,  # type: ignore[arg-type]  # the agent is a script
            agent=ScriptedAgent(suite),
            rollout=rollout(options.live),
            on_progress=progress,
        )
        watching.cancel()
        down = [url for url, reason in fleet.hosts.items() if reason]
    seconds = time.monotonic() - began
    found = [item for group in collected.groups for item in group.trajectories]
    keys = Counter((item.episode.task_id, item.episode.sample_index) for item in found)
    failed = [item for item in found if item.episode.status is Status.FAILED]
    right = [item for item in found if item.score is not None and item.score.verdict == "resolved"]
    return {
        "episodes": total,
        "ended_once": sum(count == 1 for count in keys.values()) if ended == total else 0,
        "live_peak": suite.peak,
        "hosts_peak": watch.hosts_peak,
        "host_killed": len(failed),
        "killed_at_s": round(killed_at, 1),
        "hosts_down": len(down),
        "wrong": total - len(right) - len(failed),
        "failures": collected.failures,
        "details": list(collected.details[:2]),
        "lag_p50_ms": watch.lag(0.5),
        "lag_p99_ms": watch.lag(0.99),
        "lag_max_ms": watch.lag(1.0),
        "threads": watch.threads,
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "seconds": round(seconds, 1),
    }


def held(row: dict[str, Any], options: argparse.Namespace) -> bool:
    """Say whether every bar is held."""
    return bool(
        row["ended_once"] == row["episodes"]
        and row["live_peak"] >= options.live
        and row["hosts_down"] == 1
        and 0 < row["host_killed"] <= options.live
        and row["wrong"] == 0
        and row["lag_p99_ms"] < LAG_MS
        and row["threads"] < THREADS
        and row["rss_mb"] < RSS_MB
        and row["left"] == 0
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--pause", type=float, default=20.0, help="seconds between two commands")
    parser.add_argument("--name", default="skyrlsc", help="of the bridge and the namespaces")
    options = parser.parse_args()
    capacity = options.live // (options.hosts - 1) + 20  # the others take a dead host's share
    layer = ROOT / ".cache" / "scale-layer"
    (layer / "testbed").mkdir(parents=True, exist_ok=True)
    prepare_layer(layer)
    before = os.getloadavg()[0]
    with machines(options.name, options.hosts, capacity) as hosts:
        row = asyncio.run(play(options, hosts, layer))
    deadline = time.monotonic() + 30
    pids = [host.process.pid for host in hosts]
    while (left := leftovers(pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    row |= {"left": len(left), "load_before": round(before, 1), "cores": os.cpu_count()}
    row["held"] = held(row, options)
    print(json.dumps(row))
    return 0 if row["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
