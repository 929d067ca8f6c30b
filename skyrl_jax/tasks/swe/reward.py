"""Grading a diff in a fresh sandbox made from the clean tree: one command, one log, one verdict."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_jax.core.errors import AgentCausedError, SandboxTimeout
from skyrl_jax.core.protocols import ExecResult, SandboxProvider, SandboxSpec
from skyrl_jax.core.types import Score
from skyrl_jax.tasks.swe.environment import MAX_DIFF
from skyrl_jax.tasks.swe.grading import Canaries, Expectation, judge
from skyrl_jax.tasks.swe.rows import SweRow

GRADE = ("python3", "-S", "-E", "../opt/swe/grade.py")
MAX_LOG = 1 << 20

Operation = tuple[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """A grading that is ready to run: the operations, and how to read their log."""

    operations: tuple[Operation, ...]
    expectation: Expectation


def encode_request(operations: Sequence[Operation], nonces: Sequence[str]) -> bytes:
    """Frame operations for grade.py; one 16-character nonce per run follows them."""
    parts = [b"%d\n" % len(operations)]
    for name, value in operations:
        for item in (name.encode(), value):
            parts.append(b"%d\n" % len(item) + item)
    return b"".join(parts) + "".join(nonces).encode()


def make_nonce() -> str:
    """Return a fresh nonce."""
    return secrets.token_hex(8)


def make_canaries(folder: str) -> tuple[Canaries, str, str]:
    """Return fresh canaries, their file's path and its text."""
    good, bad = f"test_{secrets.token_hex(4)}", f"test_{secrets.token_hex(4)}"
    number = secrets.randbelow(1000)
    path = f"{folder}/test_{secrets.token_hex(4)}.py"
    tests = [
        f"def {good}():\n    assert {number} + 1 == {number + 1}\n",
        f"def {bad}():\n    assert {number} + 1 == {number}\n",
    ]
    secrets.SystemRandom().shuffle(tests)
    canaries = Canaries(passing=f"{path}::{good}", failing=f"{path}::{bad}")
    return canaries, path, "\n\n".join(tests)


def light_grading(row: SweRow, hidden: dict[str, str], diff: str) -> Grading:
    """Plan the grading of a synthetic row: its whole test folder comes from the trusted copy.

    Args:
        row: the task; ``extra["files"]`` is the clean tree.
        hidden: the files that test_patch adds.
        diff: the submission.
    """
    canaries, path, text = make_canaries("tests")
    files = {name: body for name, body in row.extra["files"].items() if name.startswith("tests/")}
    operations: list[Operation] = [("apply", diff.encode("utf-8", "surrogateescape"))]
    operations.append(("wipe tests", b""))
    for name, body in {**files, **hidden, path: text}.items():
        operations.append((f"write {name}", body.encode()))
    operations.append(("run", "\0".join([path, *hidden]).encode()))
    expectation = Expectation(
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        canaries=canaries,
        nonce=make_nonce(),
    )
    return Grading(operations=tuple(operations), expectation=expectation)


async def run_operations(
    provider: SandboxProvider, spec: SandboxSpec, request: bytes, timeout_s: float
) -> ExecResult:
    """Run a framed request in a fresh sandbox, which is gone afterwards whatever happens."""
    sandbox = await provider.create(spec)
    try:
        return await sandbox.exec(
            GRADE,
            timeout_s=timeout_s,
            cwd=spec.workdir,
            max_output_bytes=MAX_LOG,
            stdin=request,
        )
    finally:
        await sandbox.destroy()


def refuse(diff: str) -> Score | None:
    """Return the score of a submission that needs no run."""
    if not diff.strip():
        return Score(value=0.0, verdict="empty")
    if len(diff.encode("utf-8", "surrogateescape")) >= MAX_DIFF:
        return Score(value=0.0, verdict="no_apply", breakdown={"why": "the diff is too large"})
    return None


async def grade(
    plan: Callable[[], Grading],
    parse: Callable[[str], dict[str, str]],
    provider: SandboxProvider,
    spec: SandboxSpec,
    timeout_s: float,
) -> Score:
    """Run a grading in a fresh sandbox and judge its log.

    Host errors propagate. A sandbox that ends from inside is tried once more, with new canaries;
    then it was the submission's doing and costs it the reward.
    """
    fault: AgentCausedError | None = None
    for _ in range(2):
        grading = plan()
        request = encode_request(grading.operations, [grading.expectation.nonce])
        try:
            result = await run_operations(provider, spec, request, timeout_s)
        except AgentCausedError as error:
            fault = error
            continue
        return judge(result, parse(result.output), grading.expectation)
    verdict = "timeout" if isinstance(fault, SandboxTimeout) else "agent"
    return Score(value=0.0, verdict=verdict, breakdown={"why": str(fault)})
