"""The SWE task suite: rows -> tasks, worlds and rewards, each task validated before it is used.

A synthetic row brings its tree with it; a real row has one in ``trees`` (see trees.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_jax.core.config import AgentConfig, SandboxConfig, TasksConfig
from skyrl_jax.core.errors import DataError, ImageError
from skyrl_jax.core.protocols import SandboxProvider, SandboxSpec
from skyrl_jax.core.types import Score, Task
from skyrl_jax.tasks.swe.diffs import added_files
from skyrl_jax.tasks.swe.environment import SweEnvironment, opening
from skyrl_jax.tasks.swe.harness import harness_grading
from skyrl_jax.tasks.swe.layers import make_tools_layer, tools_digest
from skyrl_jax.tasks.swe.logs import parse_light_log
from skyrl_jax.tasks.swe.once import Once
from skyrl_jax.tasks.swe.repo import WORKDIR, make_layer
from skyrl_jax.tasks.swe.reward import grade, light_grading, refuse
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.synthesize import make_splits
from skyrl_jax.tasks.swe.trees import Tree
from skyrl_jax.tasks.swe.validate import validate_row

GRADE_TIMEOUT_S = 60.0
HARNESS_TIMEOUT_S = 900.0  # real test suites
_PAYLOAD = (
    "path",
    "function",
    "buggy_line",
    "fixed_line",
    "old_str",
    "new_str",
    "failures",
    "template",
    "mutation",
)

# Nothing of the host's environment reaches a sandbox; these make runs repeatable.
SANDBOX_ENV: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@localhost",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@localhost",
    "PAGER": "cat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Outcome of checking tasks: how many were valid, {task id: why not}, and how many were cached.

    Example: ``Validation(valid=703, invalid={"app__clamp-train-9": "..."}, cached=0)``.
    """

    valid: int
    invalid: Mapping[str, str]
    cached: int


class SweSuite:
    """Repair tasks in git repositories (a TaskSuite).

    Args:
        splits: {split: rows}.
        agent: decides the prompt style.
        sandbox: limits of every sandbox.
        image: root filesystem for the sandbox provider.
        cache: layers and validation results are kept here.
        prepare: gives a layer to the agent's uid (``skyrl_jax.sandbox`` has it); ``None``: nothing.
        trees: {instance id: tree} of the rows that do not bring their own.
        missing: {instance id: why} of rows whose tree could not be had.
    """

    def __init__(
        self,
        splits: Mapping[str, Sequence[SweRow]],
        *,
        agent: AgentConfig,
        sandbox: SandboxConfig,
        image: str,
        cache: Path,
        prepare: Callable[[Path], None] | None = None,
        trees: Mapping[str, Tree] | None = None,
        missing: Mapping[str, str] | None = None,
    ) -> None:
        """Index the rows; no layer is made yet."""
        self._missing = dict(missing or {})
        self._trees = dict(trees or {})
        self._graded = Once()
        self._agent = agent
        self._sandbox = sandbox
        self._cache = cache
        self._prepare = prepare
        self._splits = {
            name: [self._task(row, name) for row in rows] for name, rows in splits.items()
        }
        tools = str(make_tools_layer(cache))
        self._spec = SandboxSpec(
            image=image,
            layers=(tools,),
            workdir=f"/{WORKDIR}",
            cpus=sandbox.cpus,
            memory_mb=sandbox.memory_mb,
            pids=sandbox.pids,
            disk_mb=sandbox.disk_mb,
            network=False,
            env=SANDBOX_ENV,
            lifetime_s=sandbox.lifetime_s,
            best_effort=sandbox.best_effort,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of "train", "heldout" or "unseen"."""
        if split not in self._splits:
            raise DataError(f"no split {split!r}; there are: {', '.join(self._splits)}")
        return tuple(self._splits[split])

    def environment(self, task: Task, provider: SandboxProvider) -> SweEnvironment:
        """Return a new world for one episode of ``task``."""
        row = task_row(task)
        tree = self._trees.get(row.instance_id)
        return SweEnvironment(
            replace(row, base_commit=tree.commit) if tree else row,
            provider,
            self.spec(row),
            compact=self._agent.prompt_style == "compact",
            command_timeout_s=self._sandbox.command_timeout_s,
        )

    def upcoming(self, task: Task) -> Sequence[SandboxSpec]:
        """Return the sandboxes of an episode and its grading; see ``core.protocols.Foreseeing``."""
        spec = self.spec(task_row(task))
        return (spec, spec)

    async def reward(self, task: Task, submission: str, provider: SandboxProvider) -> Score:
        """Grade a submission in a fresh sandbox from the diff alone; host errors propagate.

        Equal diffs of a synthetic row are graded once (once.py).
        """
        row = task_row(task)
        tree = self._trees.get(row.instance_id)
        refused = refuse(submission)
        if refused is not None:
            return replace(refused, breakdown={**refused.breakdown, **self.facts(task)})
        if tree is None:
            return await self._light_reward(row, submission, provider)
        harness, excluded = tree.recipe.harness, None if tree.image else tuple(tree.recipe.excluded)
        return await grade(
            lambda: harness_grading(row, harness, submission, excluded),
            harness.parse,
            provider,
            self.spec(row),
            HARNESS_TIMEOUT_S,
        )

    async def _light_reward(self, row: SweRow, submission: str, provider: SandboxProvider) -> Score:
        hidden = hidden_files(row)
        diff = hashlib.sha256(submission.encode("utf-8", "surrogateescape")).hexdigest()
        return await self._graded.get(
            f"{row.instance_id} {diff}",
            lambda: grade(
                lambda: light_grading(row, hidden, submission),
                parse_light_log,
                provider,
                self.spec(row),
                GRADE_TIMEOUT_S,
            ),
        )

    def facts(self, task: Task) -> dict[str, Any]:
        """Return what every output about a task must say of its tree (exact: nothing)."""
        tree = self._trees.get(task_row(task).instance_id)
        if tree is None:
            return {}
        if tree.image:
            return {"image": tree.image}
        return {"approximate": True, "p2p_excluded": len(tree.recipe.excluded)}

    def spec(self, row: SweRow) -> SandboxSpec:
        """Return the sandbox of a row: its clean tree over the tools over the image.

        Raises:
            ImageError: the row has no tree.
        """
        if row.instance_id in self._missing:
            raise ImageError(self._missing[row.instance_id])
        tree = self._trees.get(row.instance_id)
        if tree is not None and tree.image:
            path = ":".join(part for part in (tree.path, SANDBOX_ENV["PATH"]) if part)
            return replace(self._spec, image=tree.image, env={**SANDBOX_ENV, "PATH": path})
        if tree is not None:
            return replace(self._spec, layers=(*tree.layers, *self._spec.layers))
        if "files" not in row.extra:
            raise ImageError(
                f"{row.instance_id}: no image and no tree; name a PyPI release for it in "
                "tasks/swe/pypi_trees.toml"
            )
        make_tools_layer(self._cache)  # in another process than the one that made this suite
        layer = make_layer(self._cache / "layers", row.extra["files"], self._prepare)
        return replace(self._spec, layers=(str(layer), *self._spec.layers))

    async def validate(self, provider: SandboxProvider, concurrency: int = 4) -> Validation:
        """Check every task in a sandbox, drop the invalid ones, and remember the good ones.

        FAIL_TO_PASS must fail before the gold patch and pass after it, PASS_TO_PASS pass both
        times, and the quoted output of the visible tests must be what they really print.
        """
        tasks = [task for tasks in self._splits.values() for task in tasks]
        store = self._cache / "validated.json"
        known = _load_known(store)
        digests = {task.task_id: row_digest(task_row(task)) for task in tasks}
        new = [task for task in tasks if digests[task.task_id] not in known]
        gate = asyncio.Semaphore(concurrency)

        async def check(task: Task) -> tuple[str, str]:
            async with gate:
                row = task_row(task)
                why = await validate_row(
                    row, hidden_files(row), provider, self.spec(row), GRADE_TIMEOUT_S
                )
                return task.task_id, why

        outcomes = dict(await asyncio.gather(*(check(task) for task in new)))
        invalid = {name: why for name, why in outcomes.items() if why}
        fresh = {digests[name] for name, why in outcomes.items() if not why}
        if fresh:
            _save_known(store, known | fresh)
        for name, kept in self._splits.items():
            self._splits[name] = [task for task in kept if task.task_id not in invalid]
        return Validation(
            valid=len(tasks) - len(invalid), invalid=invalid, cached=len(tasks) - len(new)
        )

    def _task(self, row: SweRow, split: str) -> Task:
        payload = {key: row.extra[key] for key in _PAYLOAD if key in row.extra}
        payload |= {"row": row, "split": split, "sft": bool(row.extra.get("sft", True))}
        prompt = opening(row, compact=self._agent.prompt_style == "compact")
        return Task(task_id=row.instance_id, prompt=prompt, payload=payload)


def synthetic_splits(tasks: TasksConfig) -> dict[str, list[SweRow]]:
    """Make the rows of a synthetic configuration."""
    return make_splits(tasks.train, tasks.heldout, tasks.unseen, tasks.seed, tasks.templates)


def task_row(task: Task) -> SweRow:
    """Return the row of one of this suite's tasks."""
    row = task.payload.get("row")
    if not isinstance(row, SweRow):
        raise DataError(f"task {task.task_id!r}: payload['row'] must be a SweRow")
    return row


def hidden_files(row: SweRow) -> dict[str, str]:
    """Return the files that a synthetic row's test_patch adds."""
    files = added_files(row.test_patch)
    if files is None or "files" not in row.extra:
        raise DataError(f"{row.instance_id}: test_patch must only add files, and 'files' be given")
    return files


def row_digest(row: SweRow) -> str:
    """Return the identity of a row and the programs that judge it."""
    text = json.dumps(row.to_json(), sort_keys=True, default=str) + tools_digest()
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _load_known(store: Path) -> set[str]:
    try:
        values = json.loads(store.read_text())
    except (OSError, ValueError):  # absent or half-written: validate again
        return set()
    return set(values) if isinstance(values, list) else set()


def _save_known(store: Path, digests: Iterable[str]) -> None:
    store.parent.mkdir(parents=True, exist_ok=True)
    draft = store.with_suffix(".tmp")
    draft.write_text(json.dumps(sorted(digests)))
    draft.replace(store)
