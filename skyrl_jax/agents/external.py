"""Foreign scaffolds: an unmodified agent program plays an episode through the gateway.

    program's sandbox (uid 2, no network)          episode's sandbox (uid 1, no network)
      start.py -> PROGRAM                             the model's commands
        |  http://127.0.0.1:PORT/v1                     ^
        v                                               |  Environment.shell
      gateway/v1.sock -> gateway session               commands.sock (agents/commands.py)
                                                        ^
      docker.py / calls.py -----------------------------+

The program has a sandbox of its own: a command of the model sees neither its processes nor its
sockets nor its port, shares no memory, process or time limit with it, and has another uid, which
both sockets check. Whatever scaffold it is, the engine's ids and log-probs are recorded by the
gateway, and the diff is taken from the episode's sandbox and graded as always.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from skyrl_jax.agents.commands import CommandSocket
from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.core.errors import AgentCausedError, ConfigError, InfraError
from skyrl_jax.core.protocols import (
    SHARED,
    Environment,
    ExecResult,
    Generator,
    Recorder,
    Sandbox,
    SandboxSpec,
    Shell,
)
from skyrl_jax.core.types import Completion, Episode, Message, SamplingParams, Status, Task
from skyrl_jax.gateway.app import Gateway
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.gateway.calls import Recorded
from skyrl_jax.gateway.session import Session

GUEST = Path(__file__).parent / "guest"
GATEWAY = "gateway/v1.sock"  # in the shared folder; a folder of its own, which is the program's
_SHOWN = 2000  # characters of a program's last words in a message
_CANCEL_S = 20.0  # for a program's command to end; its sandbox is destroyed after that anyway
_MARGIN_S = 60.0  # a program's sandbox outlives its time limit by this


class ProgramProvider(Protocol):
    """A SandboxProvider that has a second uid for programs (bwrap as root, docker)."""

    @property
    def program_uid(self) -> int | None:
        """Host uid of a process in a sandbox with ``user=2``; ``None``: there is none."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A scaffold's program: what is laid over the image, what is started, what it is told.

    Args:
        name: for messages.
        argv: the program; ``{shared}`` in it is the folder of ``files`` and task.json.
        layers: host directories with what it needs, laid over the image (see install.py).
        files: {name: host file} put beside task.json.
        job: more entries of task.json, beside "task" and "cwd".
        env: its environment, beside the addresses and keys of the gateway.
        submitted: the exit statuses by which it says that it is done: the last line it prints is
            JSON, {"exit": status}.
        memory_mb: of its sandbox.
    """

    name: str
    argv: tuple[str, ...]
    layers: tuple[str, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    submitted: tuple[str, ...] = ("submit",)
    memory_mb: int = 2048


class _Counted:
    """An episode's generator that counts its calls."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.calls = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Pass on."""
        self.calls += 1
        return await self._generator.generate(prompt_ids, sampling, session)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAgent:
    """Plays episodes with a foreign program. One value serves any number of them.

    Args:
        program: the scaffold.
        gateway: records its calls.
        provider: makes the program's sandboxes.
        image: their root filesystem (not the task's: it needs the program's Python).
        sampling: temperature, top_p, top_k, stop ids and tokens a turn; the seed is derived.
        budget: turns and tokens of an episode.
        time_limit_s: wall time of the program.
        seed: of the run. ``phase``: what the samples are for; part of every seed.
        best_effort: of the program's sandbox.
    """

    program: Program
    gateway: Gateway
    provider: ProgramProvider
    image: str
    sampling: SamplingParams
    budget: Budget
    time_limit_s: float
    seed: int
    phase: str
    best_effort: bool = False

    async def run(
        self, task: Task, environment: Environment, generator: Generator, *, sample_index: int
    ) -> Episode:
        """Run one episode and take its submission, whatever ended it.

        Raises:
            HostError: the engine or a sandbox broke, or the program did not start.
            DataError: the generator returns no ids or log-probs.
            AgentCausedError: the model's commands ended the episode's sandbox.
            ConfigError: the environment has no shell.
        """
        if not isinstance(environment, Shell):
            raise ConfigError(f"{self.program.name} needs an environment with a shell")
        opening = await environment.reset()
        counted = _Counted(generator)
        seed = derive_seed(self.seed, task.task_id, sample_index, self.phase)
        async with _folder(self.program, _text(opening)) as folder:
            session = await self.gateway.open(
                f"{task.task_id}/{sample_index}",
                sampling=replace(self.sampling, seed=seed),
                budget=self.budget,
                generator=counted,
            )
            try:
                ended = await self._play(session, environment, folder)
            finally:
                recorded = await session.close()
                if isinstance(generator, Recorder):  # also for an end by an error or a deadline
                    generator.keep(recorded.turns, recorded.messages)
        turns = recorded.for_training()
        status, reason = self._ending(ended, recorded, counted.calls)
        return Episode(
            task_id=task.task_id,
            sample_index=sample_index,
            messages=tuple(recorded.messages),
            turns=tuple(turns),
            status=status,
            reason=reason,
            submission=await environment.submission(),
            temperature=self.sampling.temperature,
        )

    async def _play(self, session: Session, environment: Shell, folder: Path) -> ExecResult:
        """Start the program and wait for its end, or for the end of the world it works in."""
        uid = self.provider.program_uid
        if uid is None:
            raise InfraError(
                f"{self.program.name} needs a sandbox backend with a second uid: bwrap started by "
                "root, or docker",
                cause="user",
            )
        await session.socket(folder / GATEWAY, allow_uid=uid)
        async with (
            CommandSocket(folder / "commands.sock", environment, allow_uid=uid) as commands,
            self._sandbox(folder, session.key) as box,
        ):
            work = asyncio.ensure_future(self._execute(box))
            try:
                await asyncio.wait({work, commands.failed}, return_when=asyncio.FIRST_COMPLETED)
                if commands.failed.done():
                    commands.failed.result()  # raises
                return work.result()
            finally:
                work.cancel()
                await asyncio.wait({work}, timeout=_CANCEL_S)

    async def _execute(self, box: Sandbox) -> ExecResult:
        argv = [part.replace("{shared}", SHARED) for part in self.program.argv]
        start = ["python3", "-S", "-E", f"{SHARED}/start.py", f"{SHARED}/{GATEWAY}"]
        try:
            return await box.exec([*start, *argv], timeout_s=self.time_limit_s)
        except AgentCausedError as error:  # no command of the model runs in there
            raise InfraError(
                f"the sandbox of {self.program.name} ended: {error}", cause="program"
            ) from error

    @asynccontextmanager
    async def _sandbox(self, folder: Path, key: str) -> AsyncIterator[Sandbox]:
        addresses = {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}
        addresses["SKYRL_COMMANDS"] = f"{SHARED}/commands.sock"
        spec = SandboxSpec(
            image=self.image,
            layers=self.program.layers,
            workdir="/tmp",
            memory_mb=self.program.memory_mb,
            disk_mb=64,
            env={"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", **self.program.env, **addresses},
            lifetime_s=self.time_limit_s + _MARGIN_S,
            best_effort=self.best_effort,
            shared=str(folder),
            user=2,
        )
        box = await self.provider.create(spec)
        try:
            yield box
        finally:
            await box.destroy()

    def _ending(self, ended: ExecResult, recorded: Recorded, calls: int) -> tuple[Status, str]:
        """Say how the episode ended.

        Raises:
            InfraError: the program never spoke to the gateway: it is broken, not the model.
        """
        if not (calls or ended.timed_out or recorded.limit):
            raise InfraError(
                f"{self.program.name} ended with code {ended.returncode} before its first call: "
                f"{ended.output.strip()[-_SHOWN:]}",
                cause="program",
            )
        word = _last_word(ended.output)
        if word in self.program.submitted:
            return Status.FINISHED, "submit"
        if ended.timed_out:
            return Status.TRUNCATED, "time"
        if recorded.limit:
            return Status.TRUNCATED, "turns" if recorded.limit == "turns" else "context"
        return Status.TRUNCATED, f"agent:{word if word.isidentifier() else 'program'}"


@asynccontextmanager
async def _folder(program: Program, task: str) -> AsyncIterator[Path]:
    """Make the directory that the program's sandbox shares with the host, for one episode."""
    path = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="skyrl-agent-"))
    try:
        await asyncio.to_thread(_fill, path, program, task)
        yield path
    finally:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _fill(path: Path, program: Program, task: str) -> None:
    path.chmod(0o755)
    files = {name: GUEST / name for name in ("start.py", "calls.py", "docker.py")}
    for name, source in {**files, **program.files}.items():
        shutil.copyfile(source, path / name)
        (path / name).chmod(0o755)
    (path / "task.json").write_text(json.dumps({"task": task, **program.job}))
    (path / "task.json").chmod(0o644)


def _text(opening: Sequence[Message]) -> str:
    return "\n\n".join(message.content for message in opening)


def _last_word(output: str) -> str:
    """Return the exit status on the last line of a program's output ("" = it says none)."""
    lines = output.strip().splitlines()
    with contextlib.suppress(ValueError, AttributeError, IndexError):
        return str(json.loads(lines[-1]).get("exit", ""))
    return ""
