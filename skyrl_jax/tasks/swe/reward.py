"""Grading a diff in a fresh sandbox made from the clean tree: one command, one log, one verdict."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_jax.core.errors import AgentCausedError, InfraError, SandboxTimeout
from skyrl_jax.core.protocols import ExecResult, Sandbox, SandboxProvider, SandboxSpec
from skyrl_jax.core.types import Score
from skyrl_jax.tasks.swe.environment import MAX_DIFF
from skyrl_jax.tasks.swe.grading import Canaries, Expectation, judge
from skyrl_jax.tasks.swe.guest.swe_runner import split_assert
from skyrl_jax.tasks.swe.rows import SweRow

GRADE = ("python3", "-S", "-E", "../opt/swe/grade.py")
MAX_LOG = 1 << 20
CREATE_TIMEOUT_S = 30.0  # of a sandbox to grade in: the host's time, never the submission's

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


def add_canaries(path: str, text: str, target: str, rng: random.Random) -> tuple[Canaries, str]:
    """Hide two canary tests among the tests of a file; return them and the new text.

    The failing one asks the repaired function (``target``) for a value that it cannot have, with an
    input of a real test: a result that claims to equal everything, or a runner patched to pass
    everything, makes it pass.
    """
    head, *tests = text.rstrip("\n").split("\n\n\ndef ")
    names = [f"test_{rng.getrandbits(40):010x}" for _ in range(2)]
    sides = [found for line in text.splitlines() if (found := split_assert(line))]
    calls = [call for call, _ in sides if call.startswith(f"{target}(")]
    number = rng.randint(10**6, 10**9)
    call = rng.choice(calls) if calls else f"{number} + 1"
    bodies = (f"assert {number} + 1 == {number + 1}", f"assert {call} == {number}")
    for name, body in zip(names, bodies, strict=True):
        tests.insert(rng.randint(0, len(tests)), f"{name}():\n    {body}")
    canaries = Canaries(passing=f"{path}::{names[0]}", failing=f"{path}::{names[1]}")
    return canaries, "\n\n\ndef ".join([head, *tests]) + "\n"


def light_grading(row: SweRow, hidden: dict[str, str], diff: str) -> Grading:
    """Plan the grading of a synthetic row: its whole test folder comes from the trusted copy.

    Args:
        row: the task; ``extra["files"]`` is the clean tree.
        hidden: the files that test_patch adds.
        diff: the submission.
    """
    first, *_ = hidden
    target = str(row.extra["function"]).partition("(")[0].removeprefix("def ")
    canaries, text = add_canaries(first, hidden[first], target, random.SystemRandom())
    files = {name: body for name, body in row.extra["files"].items() if name.startswith("tests/")}
    operations: list[Operation] = [("apply", diff.encode("utf-8", "surrogateescape"))]
    operations.append(("wipe tests", b""))
    for name, body in {**files, **hidden, first: text}.items():
        operations.append((f"write {name}", body.encode()))
    operations.append(("run", "\0".join(hidden).encode()))
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
    """Run a framed request in a fresh sandbox, which is gone afterwards whatever happens.

    Raises:
        InfraError: there was no sandbox within ``CREATE_TIMEOUT_S``.
    """
    sandbox = await _create(provider, spec)
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


async def _create(provider: SandboxProvider, spec: SandboxSpec) -> Sandbox:
    try:
        async with asyncio.timeout(CREATE_TIMEOUT_S):
            return await provider.create(spec)
    except TimeoutError as error:
        raise InfraError(
            f"no sandbox for grading within {CREATE_TIMEOUT_S:g} s", cause="create"
        ) from error


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
