"""The CodeAct loop: ask the model, run its tool call, show it what came back, until it submits.

    reset -> initial ids -> [generate -> parse -> step -> delta ids] x turns -> submission

The prompt of a turn is the stored ids of everything before it plus a rendered delta. Budgets are
in tokens and turns; running out of one is TRUNCATED, and the tree as it stands is still submitted.
Errors of the host or the sandbox propagate: actor/episodes.py alone turns them into a status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.agents.tools import system_prompt
from skyrl_jax.core.config import AgentConfig, RolloutConfig
from skyrl_jax.core.errors import GenerationError
from skyrl_jax.core.protocols import Environment, Generator, Renderer, StepResult
from skyrl_jax.core.types import (
    Completion,
    Episode,
    Message,
    SamplingParams,
    Status,
    Task,
    Turn,
)
from skyrl_jax.generation.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Budgets of one episode.

    Args:
        max_turns: generation calls.
        max_prompt_tokens: of the opening prompt.
        max_new_tokens: per turn; less where the episode has less left.
        max_episode_tokens: opening prompt and everything after it.
        observation_tokens: of one tool message; the rest is cut and the cut stated.
        time_limit_s: wall time from reset to the last turn.
        repeat_limit: equal answers with equal observations in a row that count as a loop.
    """

    max_turns: int
    max_prompt_tokens: int
    max_new_tokens: int
    max_episode_tokens: int
    observation_tokens: int
    time_limit_s: float
    repeat_limit: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeActAgent:
    """The scaffold of every policy size. Stateless: one value serves any number of episodes.

    Args:
        renderer: messages <-> token ids.
        tokenizer: cuts observations by tokens.
        limits: budgets.
        sampling: temperature, top_p, top_k and stop ids; max_new_tokens and seed are set per turn.
        seed: of the run. ``phase``: what the samples are for, e.g. "train/12"; part of every seed.
        full_prompt: put the tool documentation in a system message (large models).
    """

    renderer: Renderer
    tokenizer: Tokenizer
    limits: LoopLimits
    sampling: SamplingParams
    seed: int
    phase: str
    full_prompt: bool = False

    async def run(
        self, task: Task, environment: Environment, generator: Generator, *, sample_index: int
    ) -> Episode:
        """Run one episode and take its submission, whatever ended it."""
        state = _State(task=task, sample_index=sample_index)
        status, reason = Status.TRUNCATED, "time"
        async with _deadline(self.limits.time_limit_s):
            status, reason = await self._play(state, environment, generator)
        submission = await environment.submission()
        return Episode(
            task_id=task.task_id,
            sample_index=sample_index,
            messages=tuple(state.messages),
            turns=tuple(state.turns),
            status=status,
            reason=reason,
            submission=submission,
            temperature=self.sampling.temperature,
        )

    async def _play(
        self, state: _State, environment: Environment, generator: Generator
    ) -> tuple[Status, str]:
        state.messages += await self._opening(environment)
        state.ids = self.renderer.initial(state.messages)
        if len(state.ids) > self.limits.max_prompt_tokens:
            return Status.TRUNCATED, "context"  # never cut a prompt: the task would be another
        for turn in range(self.limits.max_turns):
            room = self.limits.max_episode_tokens - len(state.ids)
            if room < 1:
                return Status.TRUNCATED, "context"
            done = await self._turn(state, environment, generator, turn, room)
            if done is not None:
                return Status.FINISHED, done.reason or "submit"
            if state.repeats >= self.limits.repeat_limit:
                return Status.TRUNCATED, "loop"
        return Status.TRUNCATED, "turns"

    async def _opening(self, environment: Environment) -> tuple[Message, ...]:
        opening = await environment.reset()
        if self.full_prompt:
            return (Message(role="system", content=system_prompt()), *opening)
        return opening

    async def _turn(
        self,
        state: _State,
        environment: Environment,
        generator: Generator,
        turn: int,
        room: int,
    ) -> StepResult | None:
        """Play one turn; return the environment's answer when it ends the episode."""
        begun = time.perf_counter()
        completion = await self._generate(state, generator, turn, room)
        generated = time.perf_counter()
        state.open_turn(completion, {"generate_s": generated - begun})
        message = self.renderer.parse(completion.token_ids, completion.finish_reason)
        state.messages.append(message)
        if message.error is not None:
            # told by a tool message: a user message would make many templates rewrite the history
            answer: tuple[Message, ...] = (Message(role="tool", content=message.error),)
            result = StepResult(messages=answer)
        else:
            result = await environment.step(message.tool_calls)
            answer = tuple(self._cut(item) for item in result.messages)
        state.close_turn({"tool_s": time.perf_counter() - generated})
        if result.done:
            state.messages += result.messages
            return result
        state.note_repeat(message.content, answer)
        state.messages += answer
        ids = completion.token_ids
        stopped = bool(ids) and ids[-1] in self.sampling.stop_token_ids
        follow = self.renderer.delta(answer, stopped=stopped, after=message)
        state.ids = (*state.ids, *ids, *follow)
        return None

    async def _generate(
        self, state: _State, generator: Generator, turn: int, room: int
    ) -> Completion:
        sampling = SamplingParams(
            temperature=self.sampling.temperature,
            max_new_tokens=min(self.limits.max_new_tokens, room),
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            stop_token_ids=self.sampling.stop_token_ids,
            seed=derive_seed(self.seed, state.task.task_id, state.sample_index, turn, self.phase),
        )
        session = f"{state.task.task_id}/{state.sample_index}"
        completion = await generator.generate(state.ids, sampling, session)
        if completion.finish_reason not in ("stop", "length"):
            raise GenerationError(
                f"generation of {session} turn {turn} ended with "
                f"{completion.finish_reason!r}; the client must finish an aborted request"
            )
        return completion

    def _cut(self, message: Message) -> Message:
        content = self.tokenizer.cut(message.content, self.limits.observation_tokens)
        return (
            message if content is message.content else Message(role=message.role, content=content)
        )


@dataclass(slots=True, kw_only=True)
class _State:
    """What one episode has gathered so far."""

    task: Task
    sample_index: int
    ids: tuple[int, ...] = ()
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    repeats: int = 1
    last: tuple[str, tuple[Message, ...]] | None = None

    def open_turn(self, completion: Completion, timings: dict[str, float]) -> None:
        """Store the turn at once, so that it is kept if its tool call never returns."""
        self.turns.append(Turn(prompt_ids=self.ids, completion=completion, timings=timings))

    def close_turn(self, timings: dict[str, float]) -> None:
        """Add the tool's time to the last turn."""
        turn = self.turns[-1]
        self.turns[-1] = Turn(
            prompt_ids=turn.prompt_ids,
            completion=turn.completion,
            timings={**turn.timings, **timings},
        )

    def note_repeat(self, content: str, answer: tuple[Message, ...]) -> None:
        """Count how often the same answer met the same observation in a row."""
        self.repeats = self.repeats + 1 if (content, answer) == self.last else 1
        self.last = (content, answer)


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """End the block quietly after ``seconds``; a TimeoutError from inside still propagates."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise


def make_codeact(
    rollout: RolloutConfig,
    agent: AgentConfig,
    renderer: Renderer,
    tokenizer: Tokenizer,
    *,
    stop_token_ids: Sequence[int],
    seed: int,
    phase: str,
    temperature: float | None = None,
) -> CodeActAgent:
    """Build the agent of a run; ``temperature`` overrides the rollout's (0 = greedy)."""
    return CodeActAgent(
        renderer=renderer,
        tokenizer=tokenizer,
        limits=LoopLimits(
            max_turns=rollout.max_turns,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_new_tokens=rollout.max_new_tokens,
            max_episode_tokens=rollout.max_episode_tokens,
            observation_tokens=agent.observation_tokens,
            time_limit_s=rollout.run_timeout_s,
        ),
        sampling=SamplingParams(
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=tuple(stop_token_ids),
        ),
        seed=seed,
        phase=phase,
        full_prompt=agent.prompt_style == "full",
    )
