"""A run as chapters: open -> restore or warm start -> measure -> steps -> measure -> report."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_jax.actor.collect import Progress as Collecting
from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.protocols import Tracker
from skyrl_jax.train.evaluate import Evaluation, drop, evaluate, plans
from skyrl_jax.train.policy import Policy
from skyrl_jax.train.progress import Progress
from skyrl_jax.train.report import write_report
from skyrl_jax.train.rollouts import rollout_path, write_rollouts
from skyrl_jax.train.state import HostState
from skyrl_jax.train.step import StepOutcome, run_step
from skyrl_jax.train.summary import summarize
from skyrl_jax.train.tracker import Fanout, JsonlTracker, TensorBoardTracker
from skyrl_jax.train.warmstart import warm_start
from skyrl_jax.train.workdir import write_json
from skyrl_jax.train.world import World, open_world


@dataclass(kw_only=True)
class Run:
    """The open parts of a run and where it stands; ``host`` moves forward a step at a time."""

    config: RunConfig
    workdir: Path
    world: World
    policy: Policy
    progress: Progress
    tracker: Tracker
    host: HostState
    began: float  # monotonic time at which host.wall_s would have been 0

    @property
    def wall_s(self) -> float:
        """Return the seconds spent on the run so far, over all its processes."""
        return time.monotonic() - self.began


async def run(config: RunConfig, workdir: Path, cache: Path, *, setup_s: float = 0.0) -> Path:
    """Train until ``train.steps`` steps are done; return the path of the report.

    Running it again on the same folder continues after the last whole checkpoint.
    """
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with open_run(config, workdir, cache) as live:
        before = await measure(live, "before")
        await train(live)
        after = await measure(live, "after")
        summary = summarize(config, live.host, live.world.suite, before, after, wall_s=live.wall_s)
        summary["setup_s"] = setup_s
        write_json(workdir / "summary.json", summary)
        tell(live, summary)
        return write_report(workdir)


@asynccontextmanager
async def open_run(config: RunConfig, workdir: Path, cache: Path) -> AsyncIterator[Run]:
    """Open the parts of a run and bring policy and server to where the run stands."""
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        policy = stack.enter_context(Policy(config, workdir / "checkpoints"))
        progress = stack.enter_context(Progress(config.train.steps))
        progress.phase("open sandboxes, tasks and server")
        restored = policy.restore()
        for skipped in restored.skipped if restored else ():
            progress.note(
                f"checkpoint {skipped.step} is damaged ({skipped.reason}); the one before is used"
            )
        host = HostState() if restored is None else HostState.from_json(restored.host)
        trackers: list[Any] = [
            JsonlTracker(workdir / "metrics.jsonl", restored_step=host.step),
            TensorBoardTracker(workdir / "tensorboard", restored_step=host.step),
        ]
        opened = [stack.enter_context(tracker) for tracker in trackers]
        world = await stack.enter_async_context(open_world(config, workdir, cache, progress.note))
        live = Run(
            config=config,
            workdir=workdir,
            world=world,
            policy=policy,
            progress=progress,
            tracker=Fanout(opened),
            host=host,
            began=began - host.wall_s,
        )
        if restored is None:
            await start(live)
        else:
            progress.note(f"resuming after step {host.step}")
            await world.serve(policy.params, host.version)
        yield live


async def start(live: Run) -> None:
    """Make the first policy (warm start where the config asks for one) and checkpoint 0."""
    drop(live.workdir, "before")
    if live.config.sft.max_steps:
        live.progress.phase("warm start")
        live.policy.start_sft()
        reached = await warm_start(live.world, live.policy, live.progress.note)
        live.host = replace(live.host, sft=reached)
    live.policy.start_rl()
    save(live)
    await live.world.serve(live.policy.params, 0)


async def measure(live: Run, when: str) -> dict[str, Evaluation]:
    """Run (or read back) the evaluations of the policy that is served now."""
    found: dict[str, Evaluation] = {}
    if when == "before" and live.host.step:  # only step 0 can make them
        return {plan.name: await evaluate(live.world, when, plan) for plan in plans(live.world)}
    for plan in plans(live.world):
        live.progress.phase(f"evaluate {when}: {plan.name}")
        found[plan.name] = await evaluate(
            live.world, when, plan, lambda seen: live.progress.sandboxes(seen.live)
        )
        result = found[plan.name]
        live.progress.note(f"{when} {plan.name}: {result.rate:.3f} of {result.episodes} episodes")
    return found


async def train(live: Run) -> None:
    """Run the remaining steps; every step is on disk before the next begins."""
    limit = live.config.train.time_limit_s

    def watch(seen: Collecting) -> None:
        live.progress.sandboxes(seen.live)

    while live.host.step < live.config.train.steps:
        if limit and live.wall_s > limit:
            live.progress.note(f"time limit of {limit:g} s reached after step {live.host.step}")
            break
        drop(live.workdir, "after")
        begun = time.perf_counter()
        live.progress.phase("collect")
        outcome = await run_step(live.world, live.policy, live.host, watch)
        record(live, outcome, begun)
    live.host.ledger.check_closed()


def record(live: Run, outcome: StepOutcome, begun: float) -> None:
    """Write a step's episodes, its checkpoint where one is due, and its numbers."""
    live.host = replace(outcome.host, wall_s=live.wall_s)
    step, marked = live.host.step, time.perf_counter()
    write_rollouts(rollout_path(live.workdir, step), outcome.trajectories)
    last = step == live.config.train.steps
    if last or step % live.config.train.checkpoint_every == 0:
        save(live)
    now = time.perf_counter()
    metrics = outcome.metrics | {"checkpoint_s": now - marked, "wall_s": now - begun}
    metrics |= {f"ledger/{k}": float(v) for k, v in _ledger(live.host).items()}
    live.tracker.log(step, metrics)
    live.progress.step(step, metrics)


def save(live: Run) -> None:
    """Write a checkpoint of the run as it stands."""
    live.host = replace(live.host, wall_s=live.wall_s)
    live.policy.save(live.host.step, live.host.to_json())


def tell(live: Run, summary: Mapping[str, Any]) -> None:
    """Say in a few lines what the run reached."""
    if "gain" in summary:
        live.progress.note(
            f"resolved {100 * summary['resolved_before']:.1f} % -> "
            f"{100 * summary['resolved_after']:.1f} %, gain {100 * summary['gain']:.1f} points "
            f"[{100 * summary['gain_low']:.1f}, {100 * summary['gain_high']:.1f}] on "
            f"{summary['episodes']} episodes of {summary['tasks']} held-out tasks"
        )
    live.progress.note(
        f"wall time {summary['wall_s']:.0f} s, set-up {summary['setup_s']:.0f} s before it"
    )


def _ledger(host: HostState) -> dict[str, int]:
    ledger = host.ledger
    dropped = {f"dropped_{name}": count for name, count in ledger.dropped.items()}
    return {"sampled": ledger.sampled, "trained": ledger.trained, **dropped}
