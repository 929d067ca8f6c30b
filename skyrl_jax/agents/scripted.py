"""A repair agent that follows a script: demonstrations for SFT, and a check of the pipeline.

Its text goes through the same loop, renderer and environment as a policy's, so a demonstration is
an ordinary Episode with exact token ids. Episodes are: (a wrong edit ->) the right edit -> submit.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.agents.tools import format_call
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.protocols import Agent, Environment, Generator
from skyrl_jax.core.types import Completion, Episode, Message, SamplingParams, Task
from skyrl_jax.generation.renderer import AnyRenderer

SCRIPTED_VERSION = -1  # the weight version of tokens that no policy sampled
SUBMIT = "<function=submit>\n</function>"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # ends an episode of mini-swe-agent
SHELL_SYSTEM = "bash"  # mini-swe-agent's system message in the compact style
_FAMILIES = (
    (re.compile(r"<=|>=|==|!=|<|>"), ("<", "<=", ">", ">=", "==", "!=")),
    (re.compile(r"(?<= )(?:\+|-|\*|//|%)(?= )"), ("+", "-", "*", "//")),
    (re.compile(r"\b(?:and|or)\b"), ("and", "or")),
    (re.compile(r"\b(?:True|False)\b"), ("True", "False")),
    (re.compile(r"\b(?:min|max)\b"), ("min", "max")),
    (re.compile(r"\b\d\b"), ("0", "1", "2")),
)


def edit(path: str, old: str, new: str) -> str:
    """Return the text of one str_replace edit."""
    return format_call("str_replace_editor", {"path": path, "old_str": old, "new_str": new})


def shell_edit(path: str, old: str, new: str) -> str:
    """Return the text of one edit by a scaffold that has a shell alone.

    ``edit`` is a command of the task's compact style (tasks/swe/environment.py).
    """
    return format_call("bash", {"command": shlex.join(["edit", path, old, new])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How a repair is said to a scaffold.

    Args:
        edit: the text of one edit, of (path, old, new).
        submit: the text that ends the episode.
        system: what the scaffold says before the task ("" = nothing).
    """

    edit: Callable[[str, str, str], str]
    submit: str
    system: str = ""

    def opening(self, prompt: str) -> tuple[Message, ...]:
        """Return the messages that the policy sees first."""
        system = (Message(role="system", content=self.system),) if self.system else ()
        return (*system, Message(role="user", content=prompt))


CODEACT = Words(edit=edit, submit=SUBMIT)
SHELL = Words(edit=shell_edit, submit=format_call("bash", {"command": DONE}), system=SHELL_SYSTEM)


def words_of(kind: str) -> Words:
    """Return the words of a scaffold (``agent.kind``) in its compact style."""
    return SHELL if kind == "mini_swe_agent" else CODEACT


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedAgent:
    """Repairs a task from ``Task.payload`` (path, old_str, new_str) through the real loop.

    Args:
        loop: the scaffold the script speaks through; it reads calls in the text form.
        renderer: encodes the script the way a policy would have sampled it.
        wrong_first: probability of one wrong edit before the right one.
        seed: of the wrong edits.
        words: the script in the scaffold's own tools.
    """

    loop: Agent
    renderer: AnyRenderer
    wrong_first: float = 0.0
    seed: int = 0
    words: Words = CODEACT

    async def run(
        self, task: Task, environment: Environment, generator: Generator, *, sample_index: int
    ) -> Episode:
        """Run the script; ``generator`` is not used."""
        answers = script(
            task, sample_index, wrong_first=self.wrong_first, seed=self.seed, words=self.words
        )
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


class ForcedGenerator:
    """A Generator that makes a server say given token ids, one entry a call.

    The ids go through the server's own forward pass, so their log-probs and weight version are what
    its policy really gives them (the embedded engine does it, see ``SamplingParams.forced_ids``).
    """

    def __init__(self, generator: Generator, answers: Sequence[Sequence[int]]) -> None:
        """Keep the answers in order."""
        self._generator = generator
        self._answers: Iterator[Sequence[int]] = iter(answers)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Return the next answer as the server's completion."""
        ids = next(self._answers, None)
        if ids is None:
            raise DataError(f"the script of {session} is over but the episode is not")
        forced = replace(sampling, forced_ids=tuple(ids))
        return await self._generator.generate(prompt_ids, forced, session)


def script(
    task: Task, sample_index: int, *, wrong_first: float, seed: int, words: Words = CODEACT
) -> list[str]:
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
        texts.append(words.edit(path, line, chosen))
        line = chosen
    return [*texts, words.edit(path, line, fixed), words.submit]


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
