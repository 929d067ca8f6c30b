"""Grade rows with the gold patch, or with nothing: a check of sandbox, tree and grader."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_jax.core.errors import AgentCausedError, ConfigError, HostError
from skyrl_jax.core.protocols import SandboxProvider
from skyrl_jax.core.types import Task
from skyrl_jax.tasks.swe.suite import SweSuite, task_row

AGENTS = ("gold", "noop")


async def evaluate_rows(
    suite: SweSuite,
    tasks: Sequence[Task],
    provider: SandboxProvider,
    *,
    agent: str,
    concurrency: int,
    retries: int = 1,
) -> dict[str, Any]:
    """Grade every task with one of the two scripted agents.

    Args:
        suite: makes worlds and grades.
        tasks: what to grade.
        provider: makes sandboxes.
        agent: "gold" applies the row's own patch, "noop" changes nothing.
        concurrency: tasks at once.
        retries: more tries after a host failure.

    Returns:
        {"resolved", "total", "infra_failures", "rows"}; a row that met a host failure has score
        ``None`` and is counted apart, never as unresolved.

    Raises:
        ConfigError: unknown agent.
    """
    if agent not in AGENTS:
        raise ConfigError(f"unknown agent {agent!r}; it must be one of: {', '.join(AGENTS)}")
    gate = asyncio.Semaphore(concurrency)

    async def run(task: Task) -> dict[str, Any]:
        async with gate:
            for left in range(retries, -1, -1):
                try:
                    return await _grade(suite, task, provider, agent)
                except HostError as error:
                    if not left:
                        return _row(suite, task, None, f"infra:{error.cause}", {"why": str(error)})
        raise AssertionError("unreachable: the last try returns")

    rows = await asyncio.gather(*(run(task) for task in tasks))
    return {
        "agent": agent,
        "resolved": sum(row["score"] == 1.0 for row in rows),
        "total": len(rows),
        "infra_failures": sum(row["score"] is None for row in rows),
        "rows": rows,
    }


async def _grade(
    suite: SweSuite, task: Task, provider: SandboxProvider, agent: str
) -> dict[str, Any]:
    environment = suite.environment(task, provider)
    try:
        await environment.reset()
        if agent == "gold" and not await environment.apply_patch(task_row(task).patch):
            why = "the gold patch does not fit the tree"
            return _row(suite, task, 0.0, "no_apply", {"why": why})
        submission = await environment.submission()
    except AgentCausedError as error:
        return _row(suite, task, 0.0, "agent", {"why": str(error)})
    finally:
        await environment.close()
    score = await suite.reward(task, submission, provider)
    return _row(suite, task, score.value, score.verdict, score.breakdown)


def _row(
    suite: SweSuite, task: Task, score: float | None, verdict: str, breakdown: Mapping[str, Any]
) -> dict[str, Any]:
    outcome = {"instance_id": task.task_id, "score": score, "verdict": verdict}
    return {**outcome, **suite.facts(task), **breakdown}
