"""One episode's world: a repository in a sandbox, three tools, and the diff at the end.

Every tool call is one command in the sandbox. In the compact style a successful edit runs the
row's visible tests in the same command, and the answer is at most two short lines.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence

from skyrl_jax.core.protocols import (
    ExecResult,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    StepResult,
)
from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.tasks.swe.observations import failure_messages, normalise, test_log
from skyrl_jax.tasks.swe.rows import SweRow

EDIT = ("python3", "-S", "-E", "../opt/swe/edit.py")  # relative: the process backend has no root
MAX_ARGUMENT = 100_000  # bytes of one argument; the kernel refuses more than 128 KiB
MAX_DIFF = 1 << 20  # bytes of a submission
MAX_OUTPUT = 16_384  # bytes of one tool answer before the agent's own cut by tokens
PASSED = "ok\npassed"  # the compact style's signal to submit
_GIT = "git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.quotepath=off"
_DIFF = (
    f"{_GIT} add -A 2>/dev/null && {_GIT} diff --cached --binary --no-ext-diff --no-textconv "
    "--no-color --no-renames --src-prefix=a/ --dst-prefix=b/ {base} 2>/dev/null"
)
_FULL = """The repository {repo} lies in the current folder. Change it so that this is solved:

{problem}

Its tests run offline{command}. Edit only what is needed, then submit."""


class SweEnvironment:
    """The world of one episode. Use ``reset`` first; ``close`` always.

    Args:
        row: the task.
        provider: makes the sandbox.
        spec: image, layers (the repository on top) and limits.
        compact: the tiny policies' prompt and answers.
        command_timeout_s: limit of one command.
    """

    def __init__(
        self,
        row: SweRow,
        provider: SandboxProvider,
        spec: SandboxSpec,
        *,
        compact: bool,
        command_timeout_s: float,
    ) -> None:
        """Keep the parts; nothing is started."""
        self._row = row
        self._provider = provider
        self._spec = spec
        self._compact = compact
        self._timeout_s = command_timeout_s
        self._sandbox: Sandbox | None = None
        self._touched = False

    async def reset(self) -> tuple[Message, ...]:
        """Start a fresh sandbox and return the opening message."""
        await self.close()
        self._sandbox = await self._provider.create(self._spec)
        self._touched = False
        return (Message(role="user", content=opening(self._row, compact=self._compact)),)

    async def step(self, tool_calls: Sequence[ToolCall]) -> StepResult:
        """Run the calls of one turn in order; ``submit`` ends the episode at once."""
        answers: list[Message] = []
        for call in tool_calls:
            if call.name == "submit":
                return StepResult(messages=tuple(answers), done=True, reason="submit")
            answers.append(Message(role="tool", content=await self._answer(call)))
        return StepResult(messages=tuple(answers))

    async def shell(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command of a foreign scaffold's model as it is; see ``core.protocols.Shell``.

        In the compact style the command ``edit PATH OLD NEW``, alone, is the editor's str_replace.
        """
        edited = _edit_command(argv) if self._compact else None
        if edited is not None:
            text = await self._answer(edited)
            return ExecResult(returncode=0, output=text)
        self._touched = True
        return await self._exec(argv, MAX_OUTPUT, stdin=stdin, cwd=cwd, env=env)

    async def submission(self) -> str:
        """Return the diff of the tree against the base commit (``""``: nothing changed)."""
        if not self._touched or self._sandbox is None:
            return ""
        command = _DIFF.format(base=self._row.base_commit or "HEAD")
        result = await self._exec(("sh", "-c", command), MAX_DIFF)
        if "\ufffd" in result.output:  # bytes that are no UTF-8: fetch them unharmed
            command = f"({command}) | base64 -w0"
            coded = await self._exec(("sh", "-c", command), 2 * MAX_DIFF)
            with contextlib.suppress(ValueError):
                return base64.b64decode(coded.output).decode("utf-8", "surrogateescape")
        return result.output

    async def apply_patch(self, patch: str) -> bool:
        """Apply a patch as a person would, two lines of context being enough; say if it took.

        A row's gold patch need not fit an approximate tree exactly; what is graded is the diff
        that comes out of it, and that one strictly.
        """
        self._touched = True
        command = f"{_GIT} apply -C2 --whitespace=nowarn -"
        result = await self._exec(("sh", "-c", command), MAX_OUTPUT, stdin=patch.encode())
        return result.returncode == 0

    async def close(self) -> None:
        """Destroy the sandbox. Idempotent."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.destroy()

    async def _answer(self, call: ToolCall) -> str:
        call = _as_text(call)
        problem = _check(call)
        if problem:
            return problem
        if call.name == "bash":
            return await self._bash(call.arguments.get("command", ""))
        if call.name == "str_replace_editor":
            return await self._edit(call)
        return f"error: unknown tool {call.name!r}"

    async def _bash(self, command: str) -> str:
        if not command.strip():
            return "error: empty command"
        self._touched = True
        result = await self._exec(("bash", "-c", command), MAX_OUTPUT)
        text = normalise(result.output).rstrip()
        if result.returncode and not result.timed_out:
            text += f"\n[exit code {result.returncode}]"
        return (text + _ending(result, self._timeout_s)).strip() or "[no output]"

    async def _edit(self, call: ToolCall) -> str:
        arguments = dict(call.arguments)
        command = arguments.get("command") or "str_replace"
        path = arguments.get("path", "").strip()
        if not path:
            return "error: no path"
        if command == "view":
            parts = [path, *arguments.get("view_range", "").strip("[] ").replace(",", " ").split()]
        elif command == "create":
            parts = [path, arguments.get("file_text", "")]
        elif command == "insert":
            parts = [path, arguments.get("insert_line", "").strip(), arguments.get("new_str", "")]
        elif command == "str_replace":
            parts = [path, arguments.get("old_str", ""), arguments.get("new_str", "")]
        else:
            return f"error: unknown command {command!r}; view, create, str_replace or insert"
        tests: Sequence[str] = ()
        if self._compact and command != "view":
            tests = self._row.extra.get("test_files", ())
        self._touched = self._touched or command != "view"
        result = await self._exec((*EDIT, command, *parts, *tests), MAX_OUTPUT)
        ending = _ending(result, self._timeout_s)
        if tests and result.output.startswith("ok\n") and not ending:
            return _compact_answer(parts[-1], result)
        if command == "view":  # verbatim: an old_str copied from it must match the file
            text = result.output.rstrip("\n") + ending
        else:
            text = (normalise(result.output).rstrip() + ending).strip()
        return text or "error: the tool gave no answer"

    async def _exec(
        self,
        argv: Sequence[str],
        max_bytes: int,
        stdin: bytes = b"",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        if self._sandbox is None:
            raise RuntimeError("SweEnvironment: reset() comes before step() and submission()")
        # the sandbox ends the command itself; the outer limit only guards against a lost sandbox
        async with asyncio.timeout(2 * self._timeout_s + 30.0):
            return await self._sandbox.exec(
                argv,
                timeout_s=self._timeout_s,
                cwd=cwd or self._spec.workdir,
                env=env,
                max_output_bytes=max_bytes,
                stdin=stdin,
            )


def opening(row: SweRow, *, compact: bool) -> str:
    """Return the first user message of a task."""
    if not compact:
        command = f": {row.test_cmd}" if row.test_cmd else ""
        return _FULL.format(repo=row.repo, problem=row.problem_statement.strip(), command=command)
    extra = row.extra
    failure = (list(extra.get("failures", ())) or [""])[0]
    return f"Fix {extra.get('path', '')}\n{str(extra.get('function', '')).rstrip()}\n{failure}"


def _compact_answer(edited: str, result: ExecResult) -> str:
    log = test_log(result.output)
    if result.returncode == 0:
        return PASSED
    messages = failure_messages(log)
    line = edited.strip().partition("\n")[0]
    return f"{line}\n{normalise(messages[0]) if messages else 'tests crashed'}"


def _edit_command(argv: Sequence[str]) -> ToolCall | None:
    """Return the edit that ``sh -c "edit PATH OLD NEW"`` asks for, if it is that."""
    try:
        words = shlex.split(argv[-1]) if len(argv) == 3 and argv[1] in ("-c", "-lc") else []
    except ValueError:  # an open quote: the shell itself will say so
        return None
    if len(words) != 4 or words[0] != "edit":
        return None
    arguments = {"path": words[1], "old_str": words[2], "new_str": words[3]}
    return ToolCall(name="str_replace_editor", arguments=arguments)


def _as_text(call: ToolCall) -> ToolCall:
    """Return the call with values that are no text (JSON forms have them) written as JSON."""
    values = call.arguments.items()
    texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in values}
    return dataclasses.replace(call, arguments=texts)


def _check(call: ToolCall) -> str:
    for name, value in call.arguments.items():
        if "\0" in value:
            return f"error: {name} holds a zero byte"
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            return f"error: {name} holds half of a surrogate pair, which is no text"
        if len(value.encode()) > MAX_ARGUMENT:
            return f"error: {name} is longer than {MAX_ARGUMENT} bytes"
    return ""


def _ending(result: ExecResult, limit_s: float) -> str:
    if result.timed_out:
        return f"\n[stopped after {limit_s:g} s]"
    return "\n[out of memory]" if result.oom_killed else ""
