"""The blame rule: who caused it decides between FAILED and reward 0."""

from __future__ import annotations

import pytest

from skyrl_jax.actor.blame import blame, deadline
from skyrl_jax.core.errors import (
    AgentCausedError,
    CapacityError,
    DataError,
    GenerationError,
    HostError,
    ImageError,
    InfraError,
    SandboxGone,
    SandboxTimeout,
)


@pytest.mark.parametrize("stage", ["init", "run", "grade"])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (GenerationError("x"), "engine"),
        (InfraError("x"), "sandbox"),
        (CapacityError("x"), "capacity"),
        (ImageError("x"), "image"),
        (HostError("x", cause="dockerd"), "dockerd"),
        (ValueError("x"), "bug_ValueError"),  # our own bug is never the agent's reward 0
        (DataError("x"), "bug_DataError"),
        (TimeoutError("x"), "bug_TimeoutError"),
    ],
)
def test_the_host_is_to_blame(stage: str, error: Exception, cause: str) -> None:
    fault = blame(error, stage)
    assert fault.host and fault.cause == cause and "x" in fault.detail


@pytest.mark.parametrize("stage", ["run", "grade"])
@pytest.mark.parametrize(
    ("error", "cause", "certain"),
    [
        (SandboxGone("x"), "gone", True),
        (SandboxTimeout("x"), "timeout", True),
        (SandboxGone("x", certain=False), "gone", False),
        (AgentCausedError("x"), "unknown", True),
    ],
)
def test_the_agent_is_to_blame(stage: str, error: Exception, cause: str, certain: bool) -> None:
    fault = blame(error, stage)
    assert (fault.host, fault.cause, fault.certain) == (False, cause, certain)


def test_before_the_agent_ran_nothing_is_its_fault() -> None:
    fault = blame(SandboxTimeout("git took 60 s"), "init")
    assert fault.host and fault.cause == "init_timeout"


def test_deadlines() -> None:
    assert deadline("init", 5).host
    for stage in ("run", "grade"):
        fault = deadline(stage, 5)
        assert not fault.host and not fault.certain and fault.cause == f"{stage}_deadline"
