"""What a trick is: a frozen value. The runner plays it as it is, and once with its defence off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_jax.core.protocols import ExecResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """What a control switches off; nothing by default.

    Args:
        drop: grading operations that are left out, by their first word.
        verdict: "full" (the product's), "text" (SWE-bench's rule on the log alone), "not_failed"
            (a test that no line calls failed has passed), "exit_code", "reward_file", "escaped".
        command: replaces the harness's command line.
        guest: Python statements that the grading program executes before it begins.
        env: changes of the grading sandbox's environment.
        own_sandbox: grade where the agent worked, not in a fresh sandbox.
        unsealed: hidden tests of a synthetic row lie on disk.
        unlimited: take a submission of any size.
        parse_config: find steering files by the text of the diff, not as git reads it.
        world: another world, for the control alone.
    """

    drop: tuple[str, ...] = ()
    verdict: str = "full"
    command: tuple[str, ...] = ()
    guest: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    own_sandbox: bool = False
    unsealed: bool = False
    unlimited: bool = False
    parse_config: bool = False
    world: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrick:
    """An attempt to be rewarded without a repair: commands of the agent, or a diff as it is.

    ``verdict`` is how the guarded run is looked at: "full", or "escaped" (a file outside the tree).
    """

    name: str
    defence: str
    script: str = ""
    diff: bytes = b""
    off: Off
    world: str = "pytest"
    verdict: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a machine trick left: outputs of its commands, or the error that ended them."""

    first: ExecResult | None = None
    second: ExecResult | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        """Return all output."""
        return "".join(done.output for done in (self.first, self.second) if done is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTrick:
    """An attempt on the host, on what is beside the sandbox, or on the next command.

    Args:
        script: what the command does; ``@NAME@`` is replaced by what the arena knows.
        then: the next command of the same sandbox.
        bites: says from what is seen whether the damage was done.
        spec: of the sandbox. ``off_spec``: of the control's.
        off_backend: the control runs in another kind of sandbox: "process", or "host_network".
        off_script: the control runs this instead (the trick under a naive runner).
    """

    name: str
    defence: str
    script: str
    bites: Callable[[Seen], bool]
    then: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    off_spec: Mapping[str, Any] = field(default_factory=dict)
    off_backend: str = ""
    off_script: str = ""
    output_bytes: int = 65536
    off_output_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTrick:
    """A trick that needs code of its own: ``play(arena, guarded)`` says whether it bit."""

    name: str
    defence: str
    play: Callable[[Any, bool], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suicide:
    """A policy that breaks its sandbox or its grading instead of repairing.

    The control is the same policy with ``true`` in place of ``harm``, which then repairs.
    """

    name: str
    harm: str


Trick = RewardTrick | MachineTrick | CodeTrick
