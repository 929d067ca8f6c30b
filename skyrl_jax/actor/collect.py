"""Collect groups of episodes: tasks x samples, all stages overlapping, results in task order.

FAILED members stay in their group as FAILED; statistics leave them out later. Too many host
failures in a row open the breaker, which cancels the rest. On any way out - done, breaker,
deadline, cancel - every environment is closed before the call returns.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skyrl_jax.actor.board import Board, make_gates
from skyrl_jax.actor.budgets import BudgetedProvider
from skyrl_jax.actor.episodes import (
    GRACE_S,
    ActorContext,
    EpisodeRunner,
    Outcome,
    run_episode,
)
from skyrl_jax.actor.foresight import Foresight
from skyrl_jax.batching.sequences import AGENT
from skyrl_jax.core.config import RolloutConfig
from skyrl_jax.core.errors import BreakerOpen, ConfigError, HostError
from skyrl_jax.core.protocols import Agent, Generator, SandboxProvider, TaskSuite
from skyrl_jax.core.types import Episode, Status, Task, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a collection is. ``reward_mean`` is over the episodes that have a score."""

    done: int
    total: int
    live: int
    failed: int
    reward_mean: float
    resolved: int
    sampled_tokens: int
    stages: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The groups of a collection, in the order of the tasks, and the counts for the ledger.

    After a synchronous step (batching/minibatch.py made the batches):
    ``ledger.sample(c.sampled_tokens).drop("abandoned", c.abandoned_tokens)
    .train(made.trained).drop_all(made.dropped).check()``.
    """

    groups: tuple[TrajectoryGroup, ...]
    sampled_tokens: int
    abandoned_tokens: int
    failures: dict[str, int] = field(default_factory=dict)  # "infra:<cause>" -> episodes
    details: tuple[str, ...] = ()  # texts of the first faults, for a person


def healthy(collected: Collected) -> Collected:
    """Return a collection that may be trained on or reported.

    Raises:
        HostError: more than half of its episodes FAILED: what is left measures the host side, not
            the policy. The causes and the first reports are in the text.
        ConfigError: more than half had no room for an answer: their rewards measure the limit.
    """
    total = sum(len(group.trajectories) for group in collected.groups)
    failed = sum(collected.failures.values())
    episodes = (item.episode for group in collected.groups for item in group.trajectories)
    mute = [one.task_id for one in episodes if one.reason == "context" and not _answers(one)]
    if 2 * len(mute) > total:
        raise ConfigError(
            f"{len(mute)} of {total} episodes ended before their first answer, e.g. {mute[0]}: the "
            "first prompt does not fit. Raise rollout.max_prompt_tokens and "
            "rollout.max_episode_tokens, or set agent.prompt_style=compact"
        )
    if 2 * failed > total:
        counts = ", ".join(f"{name} {count}" for name, count in collected.failures.items())
        raise HostError(
            f"{failed} of {total} episodes failed by the host side ({counts}); "
            + "; ".join(collected.details[:3]),
            cause="failures",
        )
    return collected


def _answers(episode: Episode) -> int:
    return sum(turn.kind == AGENT for turn in episode.turns)


async def collect(
    tasks: Sequence[Task],
    samples: int,
    *,
    suite: TaskSuite,
    provider: SandboxProvider,
    generator: Generator,
    agent: Agent,
    rollout: RolloutConfig,
    on_progress: Callable[[Progress], None] | None = None,
    board: Board | None = None,
    run: EpisodeRunner = run_episode,
) -> Collected:
    """Run ``samples`` episodes of each task and return their groups in task order.

    No task may occur twice (an episode's seed is its task, sample, turn and phase). A ``board``
    from outside is filled with where each episode is. A provider that can is told which sandboxes
    are coming (foresight.py). ``run`` plays an episode in another place than this process
    (actor/ray_workers.py).

    Raises:
        BreakerOpen: ``rollout.breaker`` host failures in a row.
        HostError: the whole collection ran past the sum of its deadlines; says who is where.
    """
    if len({task.task_id for task in tasks}) != len(tasks):
        raise ValueError("a task occurs twice in one collection; its samples would be equal")
    context = ActorContext(
        suite=suite,
        provider=BudgetedProvider(provider, rollout.create_timeout_s),
        generator=generator,
        agent=agent,
        rollout=rollout,
        gates=make_gates(rollout),
        board=Board() if board is None else board,
    )
    tally = _Tally(total=len(tasks) * samples, breaker=rollout.breaker, on_progress=on_progress)
    slots: list[list[Outcome | None]] = [[None] * samples for _ in tasks]
    foresight = Foresight(suite, provider, samples)

    async def one(row: int, column: int) -> None:
        outcome = await run(context, tasks[row], column)
        slots[row][column] = outcome
        foresight.end_episode(tasks[row])
        tally.add(outcome, context.board)

    longest = _longest(rollout, tally.total)
    where: list[str] = []  # noted as the time is over: the cancelled episodes leave the board
    alarm = asyncio.get_running_loop().call_later(
        longest, lambda: where.append(context.board.report())
    )
    limit = asyncio.timeout(longest)
    try:
        async with limit, asyncio.TaskGroup() as group:
            group.create_task(foresight.announce(tasks))
            for row in range(len(tasks)):
                for column in range(samples):
                    group.create_task(one(row, column))
    except* BreakerOpen as caught:
        raise caught.exceptions[0] from None
    except* TimeoutError:
        raise HostError(
            f"collecting did not end within {longest:g} s: {'; '.join(where)}", cause="watchdog"
        ) from None
    finally:
        alarm.cancel()
        foresight.end()
    return _collected(tasks, slots, tally)


def _collected(
    tasks: Sequence[Task], slots: Sequence[Sequence[Outcome | None]], tally: _Tally
) -> Collected:
    rows = [[outcome for outcome in row if outcome is not None] for row in slots]
    return Collected(
        groups=tuple(
            TrajectoryGroup(
                task_id=task.task_id, trajectories=tuple(outcome.trajectory for outcome in row)
            )
            for task, row in zip(tasks, rows, strict=True)
        ),
        sampled_tokens=tally.sampled_tokens,
        abandoned_tokens=tally.abandoned_tokens,
        failures=dict(tally.failures),
        details=tuple(tally.details),
    )


def _longest(rollout: RolloutConfig, total: int) -> float:
    """Return a time no healthy collection can need: every stage at its deadline, twice."""
    stages = rollout.init_timeout_s + rollout.run_timeout_s + rollout.grade_timeout_s
    narrowest = min(rollout.live_sandboxes, rollout.init_concurrency, rollout.grade_concurrency)
    waves = math.ceil(total / max(1, narrowest))
    return max(1, waves) * 2 * (stages + 2 * GRACE_S + rollout.destroy_timeout_s)


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Counts what is done, tells the progress, and trips the breaker."""

    total: int
    breaker: int
    on_progress: Callable[[Progress], None] | None
    done: int = 0
    scored: int = 0
    reward: float = 0.0
    resolved: int = 0
    sampled_tokens: int = 0
    abandoned_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    in_a_row: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome, board: Board) -> None:
        """Count one episode.

        Raises:
            BreakerOpen: that was one host failure too many in a row.
        """
        self.done += 1
        self.sampled_tokens += outcome.sampled_tokens
        self.abandoned_tokens += outcome.abandoned_tokens
        episode, score = outcome.trajectory.episode, outcome.trajectory.score
        if outcome.detail and len(self.details) < 16:
            self.details.append(f"{episode.task_id}/{episode.sample_index}: {outcome.detail}")
        if score is not None:
            self.scored += 1
            self.reward += score.value
            self.resolved += score.verdict == "resolved"
        if self.on_progress is not None:
            self.on_progress(self._progress(board))
        if episode.status is Status.FAILED:
            self.failures[episode.reason] += 1
            self.in_a_row.append(f"{episode.reason}: {outcome.detail}")
        else:
            self.in_a_row.clear()
        if self.breaker and len(self.in_a_row) >= self.breaker:
            raise BreakerOpen(
                f"{len(self.in_a_row)} host failures in a row stop the run "
                f"(rollout.breaker = {self.breaker}); the first: {self.in_a_row[0]}"
            )

    def _progress(self, board: Board) -> Progress:
        return Progress(
            done=self.done,
            total=self.total,
            live=board.live,
            failed=self.done - self.scored,
            reward_mean=self.reward / max(1, self.scored),
            resolved=self.resolved,
            sampled_tokens=self.sampled_tokens,
            stages=board.counts(),
        )
