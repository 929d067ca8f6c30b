# ruff: noqa: D102
"""One trainer of the leak test: episodes by a script through the real actor path, with faults.

python -m benchmarks.leak_child ARGUMENTS.json

Every episode writes a line to the log once it has its sandbox, and as it ends. Each tenth episode
raises in one of its stages; each second collection is cancelled at some time. Every call to a
sandbox is timed against its own deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.swe import get_config
from skyrl_jax.actor.collect import collect
from skyrl_jax.agents.loop import make_codeact
from skyrl_jax.agents.parsing import parse_assistant
from skyrl_jax.agents.scripted import ScriptedAgent, ScriptedGenerator
from skyrl_jax.core.config import AgentConfig, RolloutConfig, parse_config
from skyrl_jax.core.protocols import Environment, SandboxProvider, SandboxSpec, StepResult
from skyrl_jax.core.types import Message, Score, Task, ToolCall
from skyrl_jax.generation.renderer import ChatMLRenderer
from skyrl_jax.generation.tokenizer import load_or_train
from skyrl_jax.sandbox.bwrap import BwrapProvider, prepare_layer
from skyrl_jax.sandbox.channel import DESTROY_TIMEOUT_S
from skyrl_jax.sandbox.docker import DockerProvider
from skyrl_jax.tasks.swe.suite import SweSuite
from skyrl_jax.tasks.swe.synthesize import make_splits

DOCKER_CALL_S = 20.0
CREATE_S = 30.0
SLACK_S = 5.0  # two busy cores
REPLY_GRACE_S = 15.0  # sandbox/channel.py: of a supervisor that does not answer
STAGES = ("reset", "step", "submission", "reward")


@dataclass(kw_only=True)
class Log:
    """The child's file: one JSON line an event, written at once."""

    path: str
    rng: random.Random
    think_s: float
    made: int = 0  # episodes, with those that never got a sandbox
    begun: int = 0  # episodes that did

    def say(self, **event: Any) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, json.dumps(event).encode() + b"\n")
        os.close(fd)

    def check(self, what: str, began: float, limit_s: float) -> None:
        """Tell a call that took longer than it may."""
        took = time.monotonic() - began
        if took > limit_s + SLACK_S:
            self.say(over=what, seconds=took, limit=limit_s)


class TimedBox:
    """A sandbox whose calls are timed."""

    def __init__(self, box: Any, log: Log) -> None:
        self._box, self._log = box, log

    async def exec(self, command: str | Sequence[str], *, timeout_s: float = 60.0, **more: Any):
        began = time.monotonic()
        try:
            return await self._box.exec(command, timeout_s=timeout_s, **more)
        finally:
            self._log.check("exec", began, timeout_s + REPLY_GRACE_S + DOCKER_CALL_S)

    async def put(self, path: str, tar: bytes) -> None:
        await self._box.put(path, tar)

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return await self._box.get(path, max_bytes=max_bytes)

    async def destroy(self) -> None:
        began = time.monotonic()
        try:
            await self._box.destroy()
        finally:
            self._log.check("destroy", began, max(DESTROY_TIMEOUT_S, DOCKER_CALL_S + 1.0))


class TimedProvider:
    """A provider whose sandboxes are timed, and whose containers are told to the log."""

    def __init__(self, provider: SandboxProvider, log: Log) -> None:
        self._provider, self._log = provider, log

    async def create(self, spec: SandboxSpec) -> Any:
        began = time.monotonic()
        try:
            box = await self._provider.create(spec)
        finally:
            self._log.check("create", began, CREATE_S + DESTROY_TIMEOUT_S)
        if container := getattr(box, "_container", ""):
            self._log.say(container=container)
        return TimedBox(box, self._log)


class FaultySuite:
    """The SWE suite; each tenth episode raises in one of its stages."""

    def __init__(self, suite: SweSuite, log: Log) -> None:
        self._suite, self._log = suite, log

    def tasks(self, split: str) -> Sequence[Task]:
        return self._suite.tasks(split)

    def environment(self, task: Task, provider: SandboxProvider) -> Environment:
        number = self._log.made
        self._log.made += 1
        stage = self._log.rng.choice(STAGES[:3]) if number % 10 == 3 else ""
        return FaultyWorld(self._suite.environment(task, provider), number, stage, self._log)

    async def reward(self, task: Task, submission: str, provider: SandboxProvider) -> Score:
        # a diff of its own for each episode: equal ones are graded once
        mark = "diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n"
        own = f"{mark}+{time.monotonic_ns()}\n"
        if self._log.rng.random() < 0.04:
            self._log.say(fault="exception", stage="reward")
            raise RuntimeError("injected while grading")
        return await self._suite.reward(task, submission + own, provider)


class FaultyWorld:
    """An environment that raises once, in the named stage."""

    def __init__(self, world: Environment, number: int, stage: str, log: Log) -> None:
        self._world, self._number, self._stage, self._log = world, number, stage, log
        self._began = time.monotonic()

    def _fault(self, stage: str) -> None:
        if stage == self._stage:
            self._stage = ""
            self._log.say(fault="exception", stage=stage)
            raise RuntimeError(f"injected in {stage}")

    async def reset(self) -> tuple[Message, ...]:
        messages = await self._world.reset()
        self._log.begun += 1
        self._log.say(begun=self._number)
        self._fault("reset")
        return messages

    async def step(self, tool_calls: Sequence[ToolCall]) -> StepResult:
        self._fault("step")
        await asyncio.sleep(self._log.rng.uniform(0.0, self._log.think_s))  # the policy's own time
        return await self._world.step(tool_calls)

    async def submission(self) -> str | None:
        self._fault("submission")
        return await self._world.submission()

    async def close(self) -> None:
        await self._world.close()
        self._log.say(closed=self._number, seconds=time.monotonic() - self._began)


def make_world(plan: dict[str, Any], log: Log) -> tuple[FaultySuite, ScriptedAgent, RolloutConfig]:
    """Return the suite, the script and the budgets."""
    agent = AgentConfig(kind="codeact", prompt_style="compact", observation_tokens=64)
    quick = parse_config(get_config("quickstart").to_dict()).sandbox
    sandbox = replace(
        quick, backend=plan["backend"], image="", cpus=1.0, memory_mb=256, pids=64, disk_mb=64,
        command_timeout_s=20.0, lifetime_s=300.0, best_effort=True, warm=0,
    )  # fmt: skip
    rollout = RolloutConfig(
        tasks_per_step=4, samples_per_task=2, revisit_fraction=0.0, temperature=1.0, top_p=1.0,
        top_k=-1, max_turns=4, max_prompt_tokens=600, max_new_tokens=120, max_episode_tokens=2000,
        live_sandboxes=plan["live"], init_concurrency=4, grade_concurrency=4,
        create_timeout_s=CREATE_S, init_timeout_s=60.0, run_timeout_s=60.0, grade_timeout_s=90.0,
        destroy_timeout_s=30.0, breaker=0,
    )  # fmt: skip
    cache = Path(plan["scratch"])
    suite = SweSuite(
        make_splits(4, 0, 0, 5),
        agent=agent,
        sandbox=sandbox,
        image=plan["image"],
        cache=cache / "swe",
        prepare=prepare_layer,
    )
    texts = [f"{task.prompt}\n{task.payload['new_str']}" for task in suite.tasks("train")]
    tokenizer = load_or_train(texts, 400, cache / "tokenizers")
    renderer = ChatMLRenderer(tokenizer, parse_assistant)
    loop = make_codeact(
        rollout, agent, renderer, tokenizer,
        stop_token_ids=renderer.stop_token_ids, seed=0, phase="leak",
    )  # fmt: skip
    script = ScriptedAgent(loop=loop, renderer=renderer, wrong_first=0.5)
    return FaultySuite(suite, log), script, rollout


async def play(plan: dict[str, Any], log: Log) -> None:
    """Collect until enough episodes have begun; cancel some of the collections."""
    suite, script, rollout = make_world(plan, log)
    cache, run_id = Path(plan["cache"]), plan["run_id"]
    provider: BwrapProvider | DockerProvider
    if plan["backend"] == "bwrap":
        provider = BwrapProvider(run_id=run_id, cache_dir=cache)
    else:
        host, limit = plan["host"], DOCKER_CALL_S
        provider = DockerProvider(run_id=run_id, cache_dir=cache, host=host, call_timeout_s=limit)
    tasks = suite.tasks("train")[:2]
    async with provider:
        log.say(ready=os.getpid())
        for number in itertools.count():
            if log.begun >= plan["episodes"]:
                break
            job = asyncio.ensure_future(
                collect(
                    tasks,
                    2,
                    suite=suite,
                    provider=TimedProvider(provider, log),
                    generator=ScriptedGenerator([]),
                    agent=script,
                    rollout=rollout,
                )
            )
            try:
                if number % 2:
                    await asyncio.wait({job}, timeout=log.rng.uniform(0.02, plan["pace_s"]))
                    if job.cancel():
                        log.say(fault="cancellation")
                collected = await job
                log.say(collected=collected.failures, details=collected.details[:2])
                if sum(collected.failures.values()) > 2:  # the daemon is away
                    await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                job.cancel()
                await asyncio.wait({job})
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
    log.say(done=True)


async def main(plan: dict[str, Any]) -> None:
    """Play; SIGTERM cancels, as in the launchers."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    rng = random.Random(plan["seed"])
    await play(plan, Log(path=plan["log"], rng=rng, think_s=plan["think_s"]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background shell's children ignore it
    try:
        asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
