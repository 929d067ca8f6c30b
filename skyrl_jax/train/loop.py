"""A run as chapters: open -> restore or warm start -> measure -> steps -> measure -> report."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_jax.actor.collect import Progress as Collecting
from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.protocols import Tracker
from skyrl_jax.learner.distributed import Peers
from skyrl_jax.sync.publish import Publisher
from skyrl_jax.train.chat import check_chat
from skyrl_jax.train.evaluate import Evaluation, drop, evaluate, plans, stored, stored_sampled
from skyrl_jax.train.policy import Policy
from skyrl_jax.train.pretrained import check_pretrained
from skyrl_jax.train.progress import Progress
from skyrl_jax.train.report import write_report
from skyrl_jax.train.rollouts import rollout_path, write_rollouts
from skyrl_jax.train.state import HostState
from skyrl_jax.train.step import StepOutcome, run_step
from skyrl_jax.train.summary import summarize
from skyrl_jax.train.together import Lead, LeadPolicy, LeadPublisher, ticking
from skyrl_jax.train.tracing import tell_untraced
from skyrl_jax.train.tracker import Fanout, JsonlTracker, TensorBoardTracker, read_metrics
from skyrl_jax.train.trainable import check_trainable
from skyrl_jax.train.warmstart import read_opening_shapes, warm_start
from skyrl_jax.train.workdir import read_json, write_json
from skyrl_jax.train.world import World, hf_extra, hf_files, open_world


@dataclass(kw_only=True)
class Run:
    """The open parts of a run and where it stands; ``host`` moves forward a step at a time."""

    config: RunConfig
    workdir: Path
    world: World
    policy: Policy | LeadPolicy
    progress: Progress
    tracker: Tracker  # a row a step
    board: Tracker  # TensorBoard alone, for numbers that are no step's
    host: HostState
    began: float  # monotonic time at which host.wall_s would have been 0
    seconds: dict[str, float]  # where the time went, over all processes of the run
    profile: frozenset[int]  # steps whose learner part is traced
    lead: Lead | None = None  # where other processes train too

    def spend(self, part: str, since: float) -> float:
        """Add the time since ``since`` to a part's account, on disk too; return the time now."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - since
        write_json(self.workdir / "clock.json", {"wall_s": self.wall_s, "seconds": self.seconds})
        return now

    @property
    def wall_s(self) -> float:
        """Return the seconds spent on the run so far, over all its processes."""
        return time.monotonic() - self.began


async def run(
    config: RunConfig,
    workdir: Path,
    cache: Path,
    *,
    setup_s: float = 0.0,
    profile: frozenset[int] = frozenset(),
    made: Callable[[], None] = lambda: None,
    opened: Callable[[], None] = lambda: None,
    lead: Lead | None = None,
) -> Path:
    """Train until ``train.steps`` steps are done; return the path of the report.

    Running it again on the same folder continues after the last whole checkpoint.

    Args:
        config: the run's configuration.
        workdir: the run folder.
        cache: shared over runs.
        setup_s: what the set-up before the run took, for the summary.
        profile: steps whose learner part is traced into WORKDIR/profile.
        made: called when sandboxes, tasks and server are there.
        opened: called when the run stands where it left off, before anything is trained.
        lead: the other processes of the learner, where there are any. SIGTERM to one of them then
            ends the run as cancelled, with a checkpoint of the last whole step.

    Raises:
        ConfigError: the configuration asks for a part that is not built yet.
        ConfigError, DataError: ``model.checkpoint`` is no folder to start from.
    """
    check_trainable(config)
    task = asyncio.current_task()
    if task is not None and lead is None:  # with a lead SIGTERM is JAX's (learner/distributed.py)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with open_run(config, workdir, cache, profile, lead, made) as live:
        opened()
        shapes = read_opening_shapes(workdir, config.sft)
        before = await measure_start(live)
        await train(live)
        after = await measure(live)
        export_adapters(live)
        twice = {name: before[name] for name in after if name in before}
        summary = summarize(
            config,
            live.host,
            live.world.suite,
            twice,
            after,
            wall_s=live.wall_s,
            sampled=stored_sampled(workdir),
            opening_shapes=shapes,
        )
        done = live.host.step >= config.train.steps
        summary |= {
            "setup_s": setup_s,
            "seconds": live.seconds,
            "ended": "all steps done" if done else "time limit",
            "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        }
        write_json(workdir / "summary.json", summary)
        tell(live, summary)
        return write_report(workdir)


@asynccontextmanager
async def open_run(
    config: RunConfig,
    workdir: Path,
    cache: Path,
    profile: frozenset[int] = frozenset(),
    lead: Lead | None = None,
    made: Callable[[], None] = lambda: None,
) -> AsyncIterator[Run]:
    """Open the parts of a run and bring policy and server to where the run stands."""
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ticking(lead))
        check_before_devices(config, workdir)
        policy = stack.enter_context(make_policy(config, workdir, lead))
        restored = policy.restore()
        if restored is None:
            refuse_lost_checkpoints(workdir)
        host = HostState() if restored is None else HostState.from_json(restored.host)
        clock = read_clock(workdir)
        progress = stack.enter_context(Progress(config.train.steps, first_step=host.step))
        tell_untraced([n for n in profile if n <= host.step], "done before", progress.note)
        progress.phase("open sandboxes, tasks and server")
        for skipped in restored.skipped if restored else ():
            progress.note(
                f"checkpoint {skipped.step} is damaged ({skipped.reason}); the one before is used"
            )
        trackers: list[Any] = [
            JsonlTracker(workdir / "metrics.jsonl", restored_step=host.step),
            TensorBoardTracker(workdir / "tensorboard", restored_step=host.step),
        ]
        opened = [stack.enter_context(tracker) for tracker in trackers]
        publisher = partial(LeadPublisher, lead) if lead else Publisher
        world = await stack.enter_async_context(
            open_world(config, workdir, cache, progress.note, publisher)
        )
        live = Run(
            config=config,
            workdir=workdir,
            world=world,
            policy=policy,
            progress=progress,
            tracker=Fanout(opened),
            board=opened[-1],
            host=host,
            began=began - max(host.wall_s, clock["wall_s"]),
            seconds=clock["seconds"],
            profile=profile,
            lead=lead,
        )
        made()
        limit_display(live)
        marked = live.spend("open", began)
        if restored is None:
            await start(live)
            live.spend("warm start", marked)
        else:
            settle(live, saved=True)
            await resume(live)
        try:
            yield live
        except asyncio.CancelledError:
            if lead is not None and lead.stop and lead.unsaved:
                save(live)
            raise


def check_before_devices(config: RunConfig, workdir: Path) -> None:
    """Check the weights a run starts from before jax looks for devices and takes their memory.

    A run with checkpoints goes on from these and needs the folder no more.
    """
    if config.model.checkpoint and not any((workdir / "checkpoints").glob("[0-9]*")):
        check_pretrained(config.model)
        check_chat(config)


def refuse_lost_checkpoints(workdir: Path) -> None:
    """Refuse to begin anew over the steps of a run whose checkpoints are gone.

    Raises:
        DataError: names the folder; nothing in it has been touched.
    """
    steps = read_metrics(workdir / "metrics.jsonl")
    if steps:
        raise DataError(
            f"{workdir} has {len(steps)} steps in metrics.jsonl but nothing in checkpoints/: bring "
            "them back, or name a new --workdir"
        )


def read_clock(workdir: Path) -> dict[str, Any]:
    """Return the time spent by all processes of the run so far, and where it went."""
    try:
        clock = read_json(workdir / "clock.json")
        seconds = {str(name): float(spent) for name, spent in dict(clock["seconds"]).items()}
        found = {"wall_s": float(clock["wall_s"]), "seconds": seconds}
        if all(math.isfinite(x) and x >= 0 for x in (found["wall_s"], *seconds.values())):
            return found
        return {"wall_s": 0.0, "seconds": {}}
    except (DataError, TypeError, KeyError, ValueError, OverflowError, RecursionError):
        return {"wall_s": 0.0, "seconds": {}}  # the first start, or a damaged file


def make_policy(config: RunConfig, workdir: Path, lead: Lead | None) -> Policy | LeadPolicy:
    """Return the policy of a run, over all processes where there are several."""
    peers = lead.peers if lead else Peers()
    policy = Policy(config, workdir / "checkpoints", peers)
    return LeadPolicy(policy, lead) if lead else policy


def limit_display(live: Run) -> None:
    """Let the display know the time limit and the last measured held-out rate."""
    limit = live.config.train.time_limit_s
    if limit:
        live.progress.limit(lambda: limit - live.wall_s)
    known = [
        made.rate for step, made in stored_sampled(live.workdir).items() if step <= live.host.step
    ]
    if known:
        live.progress.evaluated("sampled", known[-1])


async def start(live: Run) -> None:
    """Make the first policy (warm start where the config asks for one) and checkpoint 0."""
    drop(live.workdir)
    if live.config.sft.max_steps:
        live.progress.phase("warm start")
        live.policy.start_sft()
        reached = await warm_start(live.world, live.policy, live.progress.note)
        live.host = replace(live.host, sft=reached)
    live.policy.start_rl()
    save(live)
    await live.world.serve(live.policy.params, 0)


async def resume(live: Run) -> None:
    """Bring files and server back to the restored step."""
    host = live.host
    live.progress.note(f"resuming after step {host.step}")
    drop(live.workdir, after=host.step)  # an allowed change may have made them another policy's
    steps = [row["step"] for row in read_metrics(live.workdir / "metrics.jsonl")]
    if host.row and host.step not in steps:  # killed between the checkpoint and its row
        live.tracker.log(host.step, host.row)
    live.world.store.discard_after(host.version)
    await live.world.serve(live.policy.params, host.version)


async def measure_start(live: Run) -> dict[str, Evaluation]:
    """Return the evaluations of the first policy; once it has moved on they can only be read."""
    if live.host.step == 0:
        return await measure(live)
    found = {plan.name: stored(live.workdir, 0, plan) for plan in plans(live.world)}
    for name, made in found.items():
        if made is None:
            live.progress.note(f"evaluation {name!r} was not made before training: no gain of it")
    return {name: made for name, made in found.items() if made is not None}


async def measure(live: Run, *, only: str = "") -> dict[str, Evaluation]:
    """Run (or read back) the evaluations of the policy that is served now.

    Args:
        live: the run.
        only: the name of the one evaluation to make; all of them by default.
    """
    found: dict[str, Evaluation] = {}
    marked, step = time.monotonic(), live.host.step
    for plan in plans(live.world):
        if only not in ("", plan.name):
            continue
        again = "" if stored(live.workdir, step, plan) is None else " (made before: read back)"
        live.progress.phase(f"evaluate after step {step}: {plan.name}{again}")
        result = await evaluate(
            live.world, step, plan, lambda seen: live.progress.sandboxes(seen.live)
        )
        found[plan.name] = result
        live.board.log(step, {f"eval/{plan.name}": result.rate})
        live.progress.evaluated(plan.name, result.rate)
        live.progress.note(f"{plan.name}: {result.rate:.3f} of {result.episodes} episodes")
    live.spend("evaluate", marked)
    return found


async def train(live: Run) -> None:
    """Run the remaining steps; every step is on disk before the next begins."""
    limit, every = live.config.train.time_limit_s, live.config.eval.every
    saved = live.host.step
    while live.host.step < live.config.train.steps:
        if limit and live.wall_s > limit:
            live.progress.note(f"time limit of {limit:g} s reached after step {live.host.step}")
            late = [n for n in live.profile if n > live.host.step]
            tell_untraced(late, "the time is over", live.progress.note)
            break
        if every and live.host.step and live.host.step % every == 0:
            await measure(live, only="sampled")
        marked = time.monotonic()
        if await advance(live):
            saved = live.host.step
        live.spend("steps", marked)
    if saved != live.host.step:  # stopped by the time limit between two checkpoints
        save(live)
    live.host.ledger.check_closed()


async def advance(live: Run) -> bool:
    """Run one step and put it on disk; return whether a checkpoint of it was written."""

    def watch(seen: Collecting) -> None:
        live.progress.sandboxes(seen.live)

    begun, step = time.perf_counter(), live.host.step + 1
    trace = live.workdir / "profile" / f"step_{step:06d}" if step in live.profile else None
    live.progress.phase("collect")
    outcome = await run_step(live.world, live.policy, live.host, watch, profile=trace)
    return record(live, outcome, begun)


def record(live: Run, outcome: StepOutcome, begun: float) -> bool:
    """Write a step's episodes, its checkpoint where one is due, and its numbers.

    Returns:
        Whether a checkpoint was written.
    """
    live.host = replace(outcome.host, wall_s=live.wall_s)
    settle(live)
    step, marked = live.host.step, time.perf_counter()
    path = rollout_path(live.workdir, step)
    write_rollouts(path, outcome.trajectories, abandoned=live.config.objective.abandoned)
    due = step == live.config.train.steps or step % live.config.train.checkpoint_every == 0
    if due:
        save(live)
    now = time.perf_counter()
    metrics = outcome.metrics | {"checkpoint_s": now - marked, "wall_s": now - begun}
    metrics |= {f"ledger/{k}": float(v) for k, v in _ledger(live.host).items()}
    live.tracker.log(step, metrics)
    live.progress.step(step, metrics)
    return due


def save(live: Run) -> None:
    """Write a checkpoint of the run as it stands."""
    live.host = replace(live.host, wall_s=live.wall_s)
    live.policy.save(live.host.step, live.host.to_json())
    settle(live, saved=True)


def settle(live: Run, *, saved: bool = False) -> None:
    """Note that host state and policy are those of one step, and whether they are on disk."""
    if live.lead is not None:
        live.lead.settle(saved=saved)


def export_adapters(live: Run) -> None:
    """LoRA: leave the adapters as a PEFT folder, and their base beside it."""
    if not isinstance(live.policy, Policy):
        return  # several processes train every parameter
    weights = live.workdir / "weights"
    extra = {"extra_config": hf_extra(live.world.renderer), "files": hf_files(live.workdir)}
    live.policy.export_peft(weights / "peft", weights / "base", **extra)


def tell(live: Run, summary: Mapping[str, Any]) -> None:
    """Say in a few lines what the run reached."""
    if not summary["steps"] and live.config.train.steps:
        live.progress.note(
            f"no RL step was made: the time limit of {live.config.train.time_limit_s:g} s was over "
            "before the first one; go on with the same --workdir and a higher "
            "--config.train.time_limit_s (0 = none)"
        )
    elif "gain" in summary:
        live.progress.note(
            f"resolved {100 * summary['resolved_before']:.1f} % -> "
            f"{100 * summary['resolved_after']:.1f} %, gain {100 * summary['gain']:.1f} points "
            f"[{100 * summary['gain_low']:.1f}, {100 * summary['gain_high']:.1f}] on "
            f"{summary['episodes']} episodes of {summary['tasks']} held-out tasks"
        )
    split = ", ".join(f"{part} {seconds:.0f}" for part, seconds in live.seconds.items())
    live.progress.note(f"wall time {summary['wall_s']:.0f} s ({split})")
    live.progress.note(f"set-up before it {summary['setup_s']:.0f} s")


def _ledger(host: HostState) -> dict[str, int]:
    ledger = host.ledger
    dropped = {f"dropped_{name}": count for name, count in ledger.dropped.items()}
    return {"sampled": ledger.sampled, "trained": ledger.trained, **dropped}
