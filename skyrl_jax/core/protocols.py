"""The seams. Each has one real and one fake implementation; the same contract test runs on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from skyrl_jax.core.types import (
    Completion,
    Episode,
    Message,
    SamplingParams,
    Score,
    Task,
    ToolCall,
    Turn,
)

SHARED = "/.skyrl/host"  # where SandboxSpec.shared is seen


class Generator(Protocol):
    """Tokens in, tokens out."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Sample a completion of ``prompt_ids``.

        Raises:
            GenerationError: the server refused, died, or broke the contract.
        """
        ...


@runtime_checkable
class Recorder(Protocol):
    """A Generator that records an episode's calls, and can be told what they were.

    Call by call it cannot tell work from calls beside it, or where a history forked. An agent that
    knows (the gateway's record) says so before it ends, by whatever error or cancellation.
    """

    def keep(self, turns: Sequence[Turn], messages: Sequence[Message]) -> None:
        """Take these turns and this history for the episode, should it end without a result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is made of and may use.

    Args:
        image: root filesystem. bwrap: a directory (see sandbox/images.py); docker: an image tag.
        layers: host directories laid over the image, the first on top (a task's tree). Only their
            content is visible inside, never their host path; writes go to the sandbox's own layer.
        workdir: absolute path inside where commands start.
        cpus: CPU share (cores).
        memory_mb: memory limit, MiB. ``pids``: process limit. ``disk_mb``: writable space, MiB.
        network: False cuts everything but the sandbox's own loopback.
        env: environment of every command (nothing of the host's environment is passed).
        lifetime_s: the sandbox ends itself after this many seconds.
        best_effort: accept that a limit cannot be enforced on this host (said in a warning).
        shared: a host directory that is seen at ``SHARED``, read-only ("" = none). Sockets in it
            can be connected to: the only way out of a sandbox without a network.
        user: the id inside that commands run as: 1, or 2 for the program of an agent, which must
            have another id than the commands that it asks for.
    """

    image: str
    layers: tuple[str, ...] = ()
    workdir: str = "/"
    cpus: float = 1.0
    memory_mb: int = 1024
    pids: int = 256
    disk_mb: int = 512
    network: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    lifetime_s: float = 3600.0
    best_effort: bool = False
    shared: str = ""
    user: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command did. A non-zero ``returncode`` is not an error.

    ``output`` is stdout and stderr interleaved, decoded as UTF-8 with replacement, cut to head and
    tail with the cut stated when ``truncated``. ``seconds`` is wall time.
    """

    returncode: int
    output: str
    truncated: bool = False
    timed_out: bool = False
    oom_killed: bool = False
    seconds: float = 0.0


class Sandbox(Protocol):
    """A place where the agent's commands run. Every method has a deadline of its own."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output_bytes: int = 65536,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a script (str: ``sh -c``) or an argv in a fresh process group; nothing outlives it.

        Raises:
            SandboxGone: the sandbox ended from inside.
            InfraError: the host side broke.
        """
        ...

    async def put(self, path: str, tar: bytes) -> None:
        """Unpack a tar stream under ``path`` (members that leave it are refused)."""
        ...

    async def get(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Return a file or directory as a tar stream."""
        ...

    async def destroy(self) -> None:
        """End everything inside and remove every trace on the host. Idempotent."""
        ...


class Snapshotting(Protocol):
    """Takes the tree of a sandbox and makes others that have it (sandbox/snapshot.py)."""

    async def snapshot(self, box: Sandbox, spec: SandboxSpec) -> Any:
        """Return what lies in ``spec.workdir`` now; no command may run."""
        ...

    async def restore(self, snapshot: Any) -> Sandbox:
        """Start a fresh sandbox of the same spec with that tree."""
        ...


@runtime_checkable
class Pinged(Protocol):
    """A sandbox that can be asked for a sign of life without starting a process in it."""

    async def ping(self) -> None:
        """Return when it has answered.

        Raises:
            SandboxGone, SandboxTimeout, InfraError: it will not.
        """
        ...


@runtime_checkable
class Warming(Protocol):
    """A SandboxProvider that makes sandboxes in advance (sandbox/pool.py)."""

    def prepare(self, spec: SandboxSpec, count: int) -> None:
        """Say that ``count`` more creates of ``spec`` are to come (0: none); returns at once."""
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """A TaskSuite that can say which sandboxes an episode will ask for."""

    def upcoming(self, task: Task) -> Sequence[SandboxSpec]:
        """Return the specs of one episode of ``task`` and its grading, in order."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox.

        Raises:
            CapacityError, ImageError, InfraError: host side; the episode is FAILED.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """An environment's answer to a turn: tool messages, and whether the episode is over."""

    messages: tuple[Message, ...]
    done: bool = False
    reason: str = ""


class Environment(Protocol):
    """One episode's world. Speaks messages, never tokens."""

    async def reset(self) -> tuple[Message, ...]:
        """Start the world; return the first messages (system, user)."""
        ...

    async def step(self, tool_calls: Sequence[ToolCall]) -> StepResult:
        """Run the tool calls of one assistant turn."""
        ...

    async def submission(self) -> str | None:
        """Return what would be graded now: the diff of the tree (``""`` when nothing changed)."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


@runtime_checkable
class Shell(Protocol):
    """What an environment has beside its four methods when a foreign scaffold can work in it."""

    async def shell(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command of the scaffold's model in the episode's sandbox, as its commands' uid.

        ``cwd``: "" is where the task lies. The environment's own time and output limits hold.
        """
        ...


class Agent(Protocol):
    """A scaffold: decides what to ask the model and what to do with the answer."""

    async def run(
        self, task: Task, environment: Environment, generator: Generator, *, sample_index: int
    ) -> Episode:
        """Run one episode. Host errors propagate; agent-caused ends become a status."""
        ...


class Renderer(Protocol):
    """Messages <-> token ids, incrementally."""

    def initial(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render the opening messages and the generation prompt."""
        ...

    def delta(
        self, messages: Sequence[Message], *, stopped: bool, after: Message | None = None
    ) -> tuple[int, ...]:
        """Render what follows a sampled completion: boundary tokens, messages, generation prompt.

        ``stopped`` says whether the completion's last id is the stop token; if not, the missing
        end-of-turn token is part of the delta (so it is never trained). ``after`` is the message
        that the completion was parsed to: some templates name its calls in the tool messages.
        """
        ...

    def parse(self, token_ids: Sequence[int], finish_reason: str) -> Message:
        """Turn a completion into an assistant message with tool calls, or with ``error`` set."""
        ...


class TaskSuite(Protocol):
    """A set of tasks with their worlds and their reward."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split ("train", "heldout", "unseen", ...)."""
        ...

    def environment(self, task: Task, provider: SandboxProvider) -> Environment:
        """Return a new world for one episode of ``task``."""
        ...

    async def reward(self, task: Task, submission: str, provider: SandboxProvider) -> Score:
        """Grade a submission in a fresh sandbox from the diff alone."""
        ...


class WeightStore(Protocol):
    """Versioned weights on disk."""

    def publish(self, number: int, params: Any, manifest: Mapping[str, Any]) -> Any:
        """Write a version; it becomes visible only when complete."""
        ...

    def latest(self) -> Any:
        """Return the newest complete version or ``None``."""
        ...


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's numbers."""
        ...
