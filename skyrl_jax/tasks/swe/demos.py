"""More instances for the warm start: tasks that are only read, never put in a sandbox."""

from __future__ import annotations

from collections.abc import Iterable

from skyrl_jax.core.types import Task
from skyrl_jax.tasks.swe.environment import opening
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.synthesize import make_row
from skyrl_jax.tasks.swe.templates import pool

_KEYS = ("path", "function", "buggy_line", "fixed_line", "old_str", "new_str")


def opening_tasks(count: int, seed: int, avoid: Iterable[Task], templates: int) -> list[Task]:
    """Make tasks of the mutation kinds that the warm start may see.

    Args:
        count: how many.
        seed: of task making.
        avoid: tasks whose broken function may not occur (held-out and unseen ones).
        templates: how many of the shortest templates to use (0: all).
    """
    taken = {str(row.extra["key"]) for task in avoid if (row := task.payload.get("row"))}
    seen = pool(templates, unseen=False)
    tasks: list[Task] = []
    number = 0
    while len(tasks) < count:
        row = make_row(f"{seed}/opening/{number}", f"opening-{number}", seen)
        number += 1
        if row is None or not row.extra["sft"] or row.extra["key"] in taken:
            continue
        taken.add(str(row.extra["key"]))
        tasks.append(_task(row))
    return tasks


def _task(row: SweRow) -> Task:
    payload = {key: row.extra[key] for key in _KEYS}
    return Task(
        task_id=row.instance_id, prompt=opening(row, compact=True), payload={**payload, "row": row}
    )
