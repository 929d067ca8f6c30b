"""Grading a diff in a fresh sandbox made from the clean tree: one command, one log, one verdict."""

from __future__ import annotations

import ast
import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from skyrl_jax.core.errors import AgentCausedError, InfraError, SandboxTimeout
from skyrl_jax.core.protocols import ExecResult, Sandbox, SandboxProvider, SandboxSpec
from skyrl_jax.core.types import Score
from skyrl_jax.tasks.swe.environment import MAX_DIFF
from skyrl_jax.tasks.swe.grading import Canaries, Expectation, judge, parse_report
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.sealed import literal_assert, nearby, seal
from skyrl_jax.tasks.swe.second_look import judge_again

GRADE = ("python3", "-S", "-E", "../opt/swe/grade.py")
MAX_LOG = 1 << 20
# Of a sandbox to grade in: the host's time, never the submission's. In a run
# rollout.create_timeout_s ends the wait before this does.
CREATE_TIMEOUT_S = 300.0

Operation = tuple[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """A grading that is ready to run: the operations, and how to read their log.

    ``answers``: what sealed tests expect (see sealed.py); it follows the operations.
    ``second``: the grading that a submission must fail which has passed (second_look.py).
    """

    operations: tuple[Operation, ...]
    expectation: Expectation
    answers: str = ""
    second: Grading | None = None

    def request(self) -> bytes:
        """Return what grade.py reads."""
        answers = f"{len(self.answers.encode())}\n{self.answers}" if self.answers else ""
        return encode_request(self.operations, [answers + self.expectation.nonce])


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

    They are named like the others. The failing one is a real assert about the repaired function
    (``target``) with its expected value changed a little: a result that claims to equal
    everything, or a runner patched to pass everything, makes it pass.
    """
    head, *tests = text.rstrip("\n").split("\n\n\ndef ")
    free = [f"test_{target}_new_{at}" for at in range(9)] + [f"test_{target}_old"]
    names = rng.sample([name for name in free if f"def {name}():" not in text], 2)
    lines = [line for line in text.splitlines() if line.startswith(f"    assert {target}(")]
    number = rng.randint(1, 9)
    real = (side for line in rng.sample(lines, len(lines)) if (side := literal_assert(line)))
    call, want = next(real, (f"{number} + 1", f"{number + 1}"))
    wrong = nearby(ast.literal_eval(want), rng)
    bodies = (f"assert {number} + 1 == {number + 1}", f"assert {call} == {wrong!r}")
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
    sealed = seal(first, text) if len(hidden) == 1 else None
    shown = {} if sealed else {**hidden, first: text}  # sealed tests are never on disk
    operations: list[Operation] = [("apply", diff.encode("utf-8", "surrogateescape"))]
    operations.append(("wipe tests", b""))
    for name, body in {**files, **shown}.items():
        operations.append((f"write {name}", body.encode()))
    run = ("check", sealed.calls) if sealed else ("run", "\0".join(hidden))
    operations.append((run[0], run[1].encode()))
    expectation = Expectation(
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        canaries=canaries,
        nonce=make_nonce(),
    )
    answers = sealed.answers if sealed else ""
    return Grading(operations=tuple(operations), expectation=expectation, answers=answers)


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

    async def run(grading: Grading) -> ExecResult:
        return await run_operations(provider, spec, grading.request(), timeout_s)

    fault: AgentCausedError | None = None
    for _ in range(2):
        grading = plan()
        try:
            result = await run(grading)
        except AgentCausedError as error:
            fault = error
            continue
        score = judge(result, parse(result.output), grading.expectation)
        if score.value == 1.0 and grading.second is not None:
            return await _look_again(score, grading, result, run, parse)
        return score
    verdict = "timeout" if isinstance(fault, SandboxTimeout) else "agent"
    return Score(value=0.0, verdict=verdict, breakdown={"why": str(fault)})


async def _look_again(
    score: Score,
    grading: Grading,
    result: ExecResult,
    run: Callable[[Grading], Awaitable[ExecResult]],
    parse: Callable[[str], dict[str, str]],
) -> Score:
    """Run the second grading of what passed the first, where a hidden test can be changed.

    How it ends does not matter, but for the tests that pass again: a submission cannot tell the
    two apart, so one that breaks its sandbox does so in the first.
    """
    expectation = grading.expectation
    report = parse_report(result.output, expectation.nonce, expectation.parent_facts)
    places = report.changed if report else ()
    changed = [expectation.changeable[at] for at in places if at < len(expectation.changeable)]
    if not changed or grading.second is None:
        return score
    try:
        again = await run(grading.second)
    except AgentCausedError:
        return score
    return judge_again(score, parse(again.output), changed)
