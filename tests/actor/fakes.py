"""Fake worlds for actor tests: a generator that says scripted text, a suite without sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skyrl_jax.actor.collect import collect
from skyrl_jax.agents.loop import CodeActAgent, LoopLimits
from skyrl_jax.agents.parsing import parse_assistant
from skyrl_jax.agents.scripted import SUBMIT, edit
from skyrl_jax.core.config import RolloutConfig
from skyrl_jax.core.protocols import StepResult
from skyrl_jax.core.types import Completion, Message, SamplingParams, Score, Task, ToolCall
from skyrl_jax.generation.renderer import ChatMLRenderer
from skyrl_jax.generation.tokenizer import Tokenizer, train

CORPUS = ["def f(a, b):\n    return a < b\n", "Fix pkg/mod.py\nassert f(1, 2) == 3\n"] * 4
PATH, BUGGY, FIXED = "pkg/mod.py", "return a < b", "return a <= b"
RIGHT, WRONG = edit(PATH, BUGGY, FIXED), edit(PATH, BUGGY, "return a > b")


def make_tokenizer() -> Tokenizer:
    return train(CORPUS, 400)


def make_renderer(tokenizer: Tokenizer | None = None) -> ChatMLRenderer:
    return ChatMLRenderer(tokenizer or make_tokenizer(), parse_assistant)


def make_agent(renderer: ChatMLRenderer, **limits: float) -> CodeActAgent:
    values = {
        "max_turns": 4, "max_prompt_tokens": 400, "max_new_tokens": 64,
        "max_episode_tokens": 2000, "observation_tokens": 40, "time_limit_s": 20.0,
    }  # fmt: skip
    return CodeActAgent(
        renderer=renderer,
        tokenizer=renderer.tokenizer,
        limits=LoopLimits(**{**values, **limits}),
        sampling=SamplingParams(stop_token_ids=renderer.stop_token_ids),
        seed=0,
        phase="test",
    )


def make_rollout(**changes: float) -> RolloutConfig:
    values = {
        "tasks_per_step": 4, "samples_per_task": 2, "revisit_fraction": 0.0,
        "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "max_turns": 4, "max_prompt_tokens": 400, "max_new_tokens": 64, "max_episode_tokens": 2000,
        "live_sandboxes": 4, "init_concurrency": 2, "grade_concurrency": 2, "create_timeout_s": 5.0,
        "init_timeout_s": 5.0, "run_timeout_s": 5.0, "grade_timeout_s": 5.0,
        "destroy_timeout_s": 5.0, "breaker": 0,
    }  # fmt: skip
    return RolloutConfig(**{**values, **changes})


def make_task(number: int = 0) -> Task:
    payload = {"path": PATH, "old_str": BUGGY, "new_str": FIXED, "kind": "lt"}
    return Task(task_id=f"task-{number}", prompt=f"Fix {PATH}", payload=payload)


@dataclass
class TextGenerator:
    """Says the text that ``answer(session, turn)`` gives; raises it when it is an exception."""

    renderer: ChatMLRenderer
    answer: Callable[[str, int], str | Exception]
    calls: dict[str, int] = field(default_factory=dict)
    seen: list[tuple[tuple[int, ...], SamplingParams, str]] = field(default_factory=list)
    delay_s: float = 0.0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        turn = self.calls.get(session, 0)
        self.calls[session] = turn + 1
        self.seen.append((tuple(prompt_ids), sampling, session))
        await asyncio.sleep(self.delay_s)
        text = self.answer(session, turn)
        if isinstance(text, Exception):
            raise text
        ids = self.renderer.assistant_ids(text)
        kept = ids[: sampling.max_new_tokens]
        return Completion(
            token_ids=kept,
            logprobs=(-0.5,) * len(kept),
            weight_versions=(3,) * len(kept),
            finish_reason="stop" if len(kept) == len(ids) else "length",
        )


def repairs(session: str, turn: int) -> str:
    return [WRONG, edit(PATH, "return a > b", FIXED), SUBMIT][turn % 3]


@dataclass
class FakeSuite:
    """One-line repair worlds. ``hooks[stage]`` runs in that stage and may raise or wait."""

    hooks: dict[str, Callable[[str], object]] = field(default_factory=dict)
    open: int = 0
    opened: int = 0
    most_open: int = 0
    grades: int = 0

    async def hook(self, stage: str, task_id: str) -> None:
        made = self.hooks[stage](task_id) if stage in self.hooks else None
        if asyncio.iscoroutine(made):
            await made

    def tasks(self, split: str) -> Sequence[Task]:
        return ()

    def environment(self, task: Task, provider: object) -> FakeWorld:
        return FakeWorld(suite=self, task=task)

    async def reward(self, task: Task, submission: str, provider: object) -> Score:
        self.grades += 1
        await self.hook("grade", task.task_id)
        solved = submission == FIXED
        return Score(value=float(solved), verdict="resolved" if solved else "unresolved")


@dataclass
class FakeWorld:
    suite: FakeSuite
    task: Task
    line: str = BUGGY
    is_open: bool = False

    async def reset(self) -> tuple[Message, ...]:
        self.is_open = True
        self.suite.open += 1
        self.suite.opened += 1
        self.suite.most_open = max(self.suite.most_open, self.suite.open)
        await self.suite.hook("init", self.task.task_id)
        return (Message(role="user", content=f"Fix {PATH}\n{BUGGY}\nassert f(1, 1)"),)

    async def step(self, tool_calls: Sequence[ToolCall]) -> StepResult:
        await self.suite.hook("run", self.task.task_id)
        call = tool_calls[0]
        if call.name == "submit":
            return StepResult(messages=(), done=True, reason="submit")
        if call.name == "bash":
            return StepResult(messages=(Message(role="tool", content=call.arguments["command"]),))
        if call.arguments["old_str"] != self.line:
            return StepResult(messages=(Message(role="tool", content="no match"),))
        self.line = call.arguments["new_str"]
        text = "ok\npassed" if self.line == FIXED else f"{self.line}\nassert f(1, 1)"
        return StepResult(messages=(Message(role="tool", content=text),))

    async def submission(self) -> str | None:
        await self.suite.hook("submission", self.task.task_id)
        return "" if self.line == BUGGY else self.line

    async def close(self) -> None:
        if self.is_open:
            self.is_open = False
            await asyncio.sleep(0)
            self.suite.open -= 1


RENDERER = make_renderer()


def run(suite=None, answer=repairs, tasks=1, samples=1, agent=None, **options):
    """Collect with fakes; return (Collected, suite)."""
    suite = suite or FakeSuite()
    keywords = {k: options.pop(k) for k in ("on_progress", "board") if k in options}
    made = collect(
        [make_task(i) for i in range(tasks)],
        samples,
        suite=suite,
        provider=None,
        generator=TextGenerator(RENDERER, answer),
        agent=agent or make_agent(RENDERER),
        rollout=make_rollout(**options),
        **keywords,
    )
    try:
        return asyncio.run(asyncio.wait_for(made, 20)), suite
    finally:
        assert suite.open == 0, "an environment was left open"


def one(collected):
    return collected.groups[0].trajectories[0]


def raising(error, times: int = 99):
    """Return a hook that raises ``error`` the first ``times`` times."""
    left = [times]

    def hook(_):
        if left[0]:
            left[0] -= 1
            raise error

    return hook
