"""A repair agent that follows a script: demonstrations for SFT, and a check of the pipeline.

Its text goes through the same loop, renderer and environment as a policy's, so a demonstration is
an ordinary Episode with exact token ids. Episodes are: (a wrong edit ->) the right edit -> submit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyrl_jax.agents.loop import CodeActAgent
from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.agents.tools import format_call
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.protocols import Environment, Generator
from skyrl_jax.core.types import Completion, Episode, SamplingParams, Task
from skyrl_jax.generation.renderer import ChatMLRenderer

SCRIPTED_VERSION = -1  # the weight version of tokens that no policy sampled
SUBMIT = "<function=submit>\n</function>"
_FAMILIES = (
    (re.compile(r"<=|>=|==|!=|<|>"), ("<", "<=", ">", ">=", "==", "!=")),
    (re.compile(r"(?<= )(?:\+|-|\*|//|%)(?= )"), ("+", "-", "*", "//")),
    (re.compile(r"\b(?:and|or)\b"), ("and", "or")),
    (re.compile(r"\b(?:True|False)\b"), ("True", "False")),
    (re.compile(r"\b(?:min|max)\b"), ("min", "max")),
    (re.compile(r"\b\d\b"), ("0", "1", "2")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedAgent:
    """Repairs a task from ``Task.payload`` (path, old_str, new_str) through the real loop.

    Args:
        loop: the scaffold the script speaks through; its renderer must be a ChatMLRenderer.
        renderer: encodes the script the way a policy would have sampled it.
        wrong_first: probability of one wrong edit before the right one.
        seed: of the wrong edits.
    """

    loop: CodeActAgent
    renderer: ChatMLRenderer
    wrong_first: float = 0.0
    seed: int = 0

    async def run(
        self, task: Task, environment: Environment, generator: Generator, *, sample_index: int
    ) -> Episode:
        """Run the script; ``generator`` is not used."""
        answers = script(task, sample_index, wrong_first=self.wrong_first, seed=self.seed)
        lines = ScriptedGenerator([self.renderer.assistant_ids(text) for text in answers])
        return await self.loop.run(task, environment, lines, sample_index=sample_index)


class ScriptedGenerator:
    """A Generator that says given token ids, one entry a call, and then nothing more."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        """Keep the answers in order."""
        self._answers: Iterator[Sequence[int]] = iter(answers)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Return the next answer; its log-probs are 0 (it was certain)."""
        ids = next(self._answers, None)
        if ids is None:
            raise DataError(f"the script of {session} is over but the episode is not")
        kept = tuple(ids[: sampling.max_new_tokens])
        return Completion(
            token_ids=kept,
            logprobs=(0.0,) * len(kept),
            weight_versions=(SCRIPTED_VERSION,) * len(kept),
            finish_reason="stop" if len(kept) == len(ids) else "length",
        )


def script(task: Task, sample_index: int, *, wrong_first: float, seed: int) -> list[str]:
    """Return the assistant texts of one demonstration."""
    payload = task.payload
    for key in ("path", "old_str", "new_str"):
        if not isinstance(payload.get(key), str):
            raise DataError(f"task {task.task_id!r}: payload[{key!r}] must be a string")
    path, line, fixed = payload["path"], payload["old_str"], payload["new_str"]
    rng = random.Random(derive_seed(seed, task.task_id, sample_index, "script"))
    texts: list[str] = []
    wrong = wrong_edits(line, fixed)
    if wrong and rng.random() < wrong_first:
        chosen = rng.choice(wrong)
        texts.append(edit(path, line, chosen))
        line = chosen
    return [*texts, edit(path, line, fixed), SUBMIT]


def wrong_edits(line: str, fixed: str) -> list[str]:
    """Return plausible but wrong edits of ``line``: one operator, constant or word swapped."""
    found: dict[str, None] = {}
    for pattern, others in _FAMILIES:
        for match in pattern.finditer(line):
            for other in others:
                changed = line[: match.start()] + other + line[match.end() :]
                if changed not in (line, fixed):
                    found.setdefault(changed)
    return list(found)


def edit(path: str, old: str, new: str) -> str:
    """Return the text of one str_replace edit."""
    return format_call("str_replace_editor", {"path": path, "old_str": old, "new_str": new})
