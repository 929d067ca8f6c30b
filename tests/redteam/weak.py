"""The grader with a defence switched off: the product's operations and programs, less one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from skyrl_jax.core.protocols import ExecResult, Sandbox
from skyrl_jax.tasks.swe.diffs import touched_paths
from skyrl_jax.tasks.swe.grading import Expectation, judge
from skyrl_jax.tasks.swe.harness import harness_grading
from skyrl_jax.tasks.swe.logs import FAILED, PASSED, parse_light_log
from skyrl_jax.tasks.swe.reward import GRADE, MAX_LOG, Grading, Operation, light_grading
from skyrl_jax.tasks.swe.suite import hidden_files, task_row
from tests.redteam.table import Off
from tests.redteam.world import Arena, World

STEERING = ("conftest.py", "pytest.ini", "setup.cfg", "sitecustomize.py")
ESCAPED = "/tmp/escaped"
_TIMEOUT_S = 60.0
_EXTRA = {"tests/test_zz.py": "def test_zz():\n    assert 1 == 1\n"}  # two files are not sealed


async def graded(arena: Arena, world: World, diff: str, off: Off, own: Sandbox | None) -> bool:
    """Grade a diff by the product's own operations, less what is off; say whether it bit.

    It is graded once: the second look (tasks/swe/second_look.py) is always off.
    """
    spec = world.suite.spec(task_row(world.task))
    grading = _plan(world, diff, off)
    parse = world.harness.parse if world.harness else parse_light_log
    box = own or await arena.provider.create(replace(spec, env={**spec.env, **off.env}))
    try:
        result = await box.exec(
            _program(off),
            timeout_s=_TIMEOUT_S,
            cwd=spec.workdir,
            max_output_bytes=MAX_LOG,
            stdin=grading.request(),
        )
        return await _bit(off.verdict, box, result, grading.expectation, parse)
    finally:
        if own is None:
            await box.destroy()


def _plan(world: World, diff: str, off: Off) -> Grading:
    row = task_row(world.task)
    if world.harness is not None:
        grading = harness_grading(row, world.harness, diff, ())
    else:
        hidden = {**hidden_files(row), **(_EXTRA if off.unsealed else {})}
        grading = light_grading(row, hidden, diff)
    operations = [made for item in grading.operations for made in _weaker(item, diff, off)]
    return replace(grading, operations=tuple(operations))


def _weaker(operation: Operation, diff: str, off: Off) -> list[Operation]:
    verb = operation[0].partition(" ")[0]
    if verb in off.drop:
        return []
    if verb == "exec" and off.command:
        files = operation[1].split(b"\0")[5:]
        return [("exec", b"\0".join([*(word.encode() for word in off.command), *files]))]
    if verb == "restore_config" and off.parse_config:
        touched = touched_paths(diff)
        return [(f"restore {p}", b"") for p in touched if p.rpartition("/")[2] in STEERING]
    return [operation]


def _program(off: Off) -> tuple[str, ...]:
    if not off.guest:
        return GRADE
    head = "import sys\nsys.path[:1] = ['/opt/swe']\nimport swe_check, swe_grade\n"
    return ("python3", "-S", "-E", "-c", f"{head}{off.guest}\nsys.exit(swe_grade.main())")


async def _bit(
    verdict: str,
    box: Any,
    result: ExecResult,
    expectation: Expectation,
    parse: Callable[[str], dict[str, str]],
) -> bool:
    needed = (*expectation.fail_to_pass, *expectation.pass_to_pass)
    if verdict == "full":
        return judge(result, parse(result.output), expectation).value == 1.0
    if verdict == "exit_code":
        return result.returncode == 0
    if verdict == "text":
        last = last_wins(result.output, parse)
        return all(last.get(name) == PASSED for name in needed)
    if verdict == "not_failed":
        statuses = parse(result.output)
        return all(statuses.get(name) != FAILED for name in needed)
    if verdict == "reward_file":
        return (await box.exec("cat /tmp/reward.txt", cwd="/")).output.strip() == "1"
    assert verdict == "escaped", verdict
    return (await box.exec(["test", "-e", ESCAPED], cwd="/")).returncode == 0


def last_wins(log: str, parse: Callable[[str], dict[str, str]]) -> dict[str, str]:
    """Read a log as SWE-bench's own parsers do: the last line about a test counts."""
    statuses: dict[str, str] = {}
    for line in log.splitlines():
        statuses.update(parse(line))
    return statuses
