"""One episode from task to score: init -> run -> close -> grade.

The only place where expected failures become a status. Each stage returns a value or a Fault
(never raises), under its own deadline; the environment is closed whatever happens, also on cancel.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from skyrl_jax.actor.blame import Fault, blame, deadline
from skyrl_jax.actor.board import Board, Gates
from skyrl_jax.core.config import RolloutConfig
from skyrl_jax.core.errors import CapacityError, ConfigError
from skyrl_jax.core.protocols import (
    Agent,
    Environment,
    ExecResult,
    Generator,
    SandboxProvider,
    Shell,
    StepResult,
    TaskSuite,
)
from skyrl_jax.core.types import (
    Completion,
    Episode,
    Message,
    SamplingParams,
    Score,
    Status,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)

T = TypeVar("T")
GRACE_S = 60.0  # for taking the submission after the run's time is over


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorContext:
    """Everything an episode needs besides its task."""

    suite: TaskSuite
    provider: SandboxProvider
    generator: Generator
    agent: Agent
    rollout: RolloutConfig
    gates: Gates
    board: Board


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one episode.

    Args:
        trajectory: the episode and its score (None when FAILED).
        sampled_tokens: every token the generator returned, abandoned attempts included: the
            ledger's own count, independent of the episode's turns.
        abandoned_tokens: those of attempts that were thrown away and run again.
        detail: text for a person when something went wrong.
    """

    trajectory: Trajectory
    sampled_tokens: int
    abandoned_tokens: int = 0
    detail: str = ""


# Plays an episode and grades it; only cancellation is raised. ``run_episode`` is one.
EpisodeRunner = Callable[[ActorContext, Task, int], Awaitable[Outcome]]


async def run_episode(context: ActorContext, task: Task, sample_index: int) -> Outcome:
    """Run one episode and grade it; only cancellation is raised."""
    attempt = _Attempt(context=context, task=task, sample_index=sample_index)
    async with context.gates.live:
        try:
            return await _with_second_chance(attempt)
        finally:
            context.board.leave(attempt.rollout_id)


def failed_outcome(task: Task, sample_index: int, fault: Fault) -> Outcome:
    """Return the outcome of an episode that the host side lost before anything came back."""
    episode = Episode(
        task_id=task.task_id,
        sample_index=sample_index,
        messages=(),
        turns=(),
        status=Status.FAILED,
        reason=f"infra:{fault.cause}",
        submission=None,
        temperature=1.0,
    )
    trajectory = Trajectory(episode=episode, score=None)
    return Outcome(trajectory=trajectory, sampled_tokens=0, detail=fault.detail)


async def _with_second_chance(attempt: _Attempt) -> Outcome:
    outcome = await attempt.play()
    if not attempt.uncertain:
        return outcome
    again = _Attempt(context=attempt.context, task=attempt.task, sample_index=attempt.sample_index)
    second = await again.play()  # a second time, the agent is to blame: play() said so already
    return replace(
        second,
        sampled_tokens=second.sampled_tokens + outcome.sampled_tokens,
        abandoned_tokens=outcome.sampled_tokens,
    )


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One try at an episode, with what it has gathered."""

    context: ActorContext
    task: Task
    sample_index: int
    uncertain: bool = False
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def rollout_id(self) -> str:
        return f"{self.task.task_id}/{self.sample_index}"

    async def play(self) -> Outcome:
        """Return the outcome of init, run, close and grade."""
        recorder = _Recorder(self.context.generator)
        world = await self._twice(self._init)
        if isinstance(world, Fault):
            return self._failed(world, recorder, ())
        try:
            episode = await self._run(world, recorder)
        finally:
            note = await self._timed("close", self._close(world))
        if isinstance(episode, Fault):
            if episode.host:
                return self._failed(episode, recorder, world.messages)
            self.uncertain = not episode.certain
            reason = f"agent:{episode.cause}"
            ended = self._end(Status.TRUNCATED, reason, recorder, world.messages)
            zero = Score(value=0.0, verdict="agent")
            return self._scored(ended, zero, recorder, episode.detail)
        score = await self._grade(episode)
        if isinstance(score, Fault) and score.host:
            return self._failed(score, recorder, episode.messages)
        if isinstance(score, Fault):
            verdict = "timeout" if score.cause in ("timeout", "grade_deadline") else "agent"
            zero = Score(value=0.0, verdict=verdict, breakdown={"cause": score.cause})
            return self._scored(episode, zero, recorder, score.detail)
        return self._scored(episode, score, recorder, note)

    async def _init(self) -> _World | Fault:
        self.context.board.enter(self.rollout_id, "wait_init")
        async with self.context.gates.init:
            self.context.board.enter(self.rollout_id, "init")
            seconds = self.context.rollout.init_timeout_s
            return await self._timed("init", _stage("init", seconds, self._open))

    async def _open(self) -> _World:
        """Make the world; wait where there is no room (the stage's deadline ends the wait)."""
        pause = 0.25
        while True:
            environment = self.context.suite.environment(self.task, self.context.provider)
            try:
                return _World(environment, await environment.reset())
            except CapacityError:
                await self._close(environment)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
            except BaseException:
                await self._close(environment)
                raise

    async def _close(self, environment: Environment) -> str:
        return await close_environment(environment, self.context.rollout.destroy_timeout_s)

    async def _run(self, world: _World, recorder: _Recorder) -> Episode | Fault:
        self.context.board.enter(self.rollout_id, "run")

        async def play() -> Episode:
            return await self.context.agent.run(
                self.task, world, recorder, sample_index=self.sample_index
            )

        seconds = self.context.rollout.run_timeout_s + GRACE_S
        result = await self._timed("run", _stage("run", seconds, play))
        if not isinstance(result, Fault) or result.cause != "run_deadline":
            return result
        # an agent that does not watch the clock: its time is over, its work so far still counts
        submission = await _stage("run", GRACE_S, world.submission)
        if isinstance(submission, Fault):
            return submission
        ended = self._end(Status.TRUNCATED, "time", recorder, world.messages)
        return replace(ended, submission=submission)

    async def _grade(self, episode: Episode) -> Score | Fault:
        submission = episode.submission
        if submission is None:
            return Score(value=0.0, verdict="empty")

        async def grade() -> Score:
            return await self.context.suite.reward(self.task, submission, self.context.provider)

        async def stage() -> Score | Fault:
            self.context.board.enter(self.rollout_id, "wait_grade")
            async with self.context.gates.grade:
                self.context.board.enter(self.rollout_id, "grade")
                seconds = self.context.rollout.grade_timeout_s
                return await self._timed("grade", _stage("grade", seconds, grade))

        return await self._twice(stage)

    async def _twice(self, stage: Callable[[], Awaitable[T | Fault]]) -> T | Fault:
        """Try a stage that costs no sampled token once more after a host or uncertain fault."""
        result = await stage()
        if isinstance(result, Fault) and (result.host or not result.certain):
            result = await stage()
        return result

    async def _timed(self, name: str, work: Awaitable[T]) -> T:
        begun = time.perf_counter()
        try:
            return await work
        finally:
            spent = time.perf_counter() - begun
            self.timings[f"{name}_s"] = self.timings.get(f"{name}_s", 0.0) + spent

    def _end(
        self, status: Status, reason: str, recorder: _Recorder, messages: Sequence[Message]
    ) -> Episode:
        """Build the episode that no agent could return, from what was recorded."""
        turns, said = recorder.record(messages)
        return Episode(
            task_id=self.task.task_id,
            sample_index=self.sample_index,
            messages=said,
            turns=turns,
            status=status,
            reason=reason,
            submission=None,
            temperature=recorder.temperature,
        )

    def _failed(self, fault: Fault, recorder: _Recorder, messages: Sequence[Message]) -> Outcome:
        episode = self._end(Status.FAILED, f"infra:{fault.cause}", recorder, messages)
        return self._scored(episode, None, recorder, fault.detail)

    def _scored(
        self, episode: Episode, score: Score | None, recorder: _Recorder, detail: str
    ) -> Outcome:
        episode = replace(episode, timings={**episode.timings, **self.timings})
        return Outcome(
            trajectory=Trajectory(episode=episode, score=score),
            sampled_tokens=recorder.sampled_tokens,
            detail=detail,
        )


async def _stage(name: str, seconds: float, work: Callable[[], Awaitable[T]]) -> T | Fault:
    """Run ``work`` under a deadline; every exception but cancellation becomes a Fault."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work()
    except Exception as error:
        # a TimeoutError from inside the work is somebody's bug, not this deadline
        if isinstance(error, TimeoutError) and limit.expired():
            return deadline(name, seconds)
        return blame(error, name)


async def close_environment(environment: Environment, seconds: float) -> str:
    """Close, also while being cancelled; return what went wrong (the reaper sees to the rest)."""
    closing = asyncio.ensure_future(environment.close())
    try:
        await asyncio.wait({closing}, timeout=seconds)
    except asyncio.CancelledError:
        await asyncio.wait({closing}, timeout=seconds)
        raise
    finally:
        if not closing.done():
            closing.cancel()
    if closing.cancelled() or not closing.done():
        return f"closing the environment took longer than {seconds:g} s"
    error = closing.exception()
    return "" if error is None else f"closing the environment: {type(error).__name__}: {error}"


class _World:
    """An environment that has been reset already, and remembers what was said."""

    def __init__(self, environment: Environment, opening: tuple[Message, ...]) -> None:
        self._environment = environment
        self._opening = opening
        self.messages: list[Message] = list(opening)

    async def reset(self) -> tuple[Message, ...]:
        """Return the messages of the reset that the init stage made."""
        return self._opening

    async def step(self, tool_calls: Sequence[ToolCall]) -> StepResult:
        """Pass on, keeping the messages for an episode that ends by a fault."""
        calls = tuple(tool_calls)
        self.messages.append(Message(role="assistant", content="", tool_calls=calls))
        result = await self._environment.step(calls)
        self.messages += result.messages
        return result

    async def shell(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Pass on; the messages of such an episode are the gateway's to keep.

        Raises:
            ConfigError: the environment has no shell.
        """
        if not isinstance(self._environment, Shell):
            kind = type(self._environment).__name__
            raise ConfigError(f"{kind} has no shell for a foreign scaffold (core.protocols.Shell)")
        return await self._environment.shell(argv, cwd=cwd, env=env, stdin=stdin)

    async def submission(self) -> str | None:
        """Pass on."""
        return await self._environment.submission()

    async def close(self) -> None:
        """Pass on."""
        await self._environment.close()


class _Recorder:
    """A generator that keeps every turn and counts every token it returned."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.turns: list[Turn] = []
        self.temperature = 1.0
        self._kept: tuple[tuple[Turn, ...], tuple[Message, ...]] | None = None

    def keep(self, turns: Sequence[Turn], messages: Sequence[Message]) -> None:
        """Keep an agent's own record of its calls."""
        self._kept = tuple(turns), tuple(messages)

    def record(self, messages: Sequence[Message]) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
        """Return turns that hold every sampled token, and the history: the agent's own, or these.

        What an agent's record lacks was no good to it: such tokens are counted, never trained.
        """
        if self._kept is None:
            return tuple(self.turns), tuple(messages)
        turns, said = self._kept
        held = Counter(turn.completion.token_ids for turn in turns)
        beside: list[Turn] = []
        for turn in self.turns:
            ids = turn.completion.token_ids
            held[ids] -= 1
            if held[ids] < 0:
                blank = replace(turn.completion, logprobs=(0.0,) * len(ids))
                beside.append(replace(turn, completion=blank, kind="aux"))
        return (*turns, *beside), said

    @property
    def sampled_tokens(self) -> int:
        """Return how many tokens were sampled in all."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Pass on and record."""
        completion = await self._generator.generate(prompt_ids, sampling, session)
        self.temperature = sampling.temperature
        self.turns.append(Turn(prompt_ids=tuple(prompt_ids), completion=completion))
        return completion
