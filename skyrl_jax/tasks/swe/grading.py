"""From a log to a verdict. Pure text functions; running is in reward.py.

The score is the text verdict (every FAIL_TO_PASS and PASS_TO_PASS test has passed in the log) AND
integrity: the log, the parent's report and the exit code say the same, and of two canary tests
named like the others one passed and one failed. Where they differ the verdict is "tampered".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_jax.core.protocols import ExecResult
from skyrl_jax.core.types import Score
from skyrl_jax.tasks.swe.logs import CONFLICT, ERROR, FAILED, PASSED, with_first_words

_EVENTS = {"P": PASSED, "F": FAILED, "E": ERROR}
_REPORT = "REPORT "


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """Ids of the test that must pass and the test that must fail, fresh for every grading."""

    passing: str
    failing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the parent process says: how the tests ended, its exit code, and facts where it has any.

    ``facts`` is ``None`` for foreign test programs (the parent sees only their exit code).
    ``changed``: which hidden tests have an expected value that can be changed (second_look.py).
    """

    state: str
    code: int
    facts: Mapping[str, str] | None
    changed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a grading must show.

    ``changeable``: the ids of each test that the "change" operation names.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    canaries: Canaries
    nonce: str
    parent_facts: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)
    changeable: tuple[tuple[str, ...], ...] = ()


def parse_report(log: str, nonce: str, parent_facts: bool) -> Report | None:
    """Return the parent's report if it is the log's last line and carries the nonce."""
    line = log.rstrip("\n").rpartition("\n")[2]
    if not line.startswith(_REPORT):
        return None
    head, *facts = line[len(_REPORT) :].split("\t")
    parts = head.split(" ")
    if len(parts) != 3 or parts[0] != nonce or not parts[2].lstrip("-").isdigit():
        return None
    found, changed = {}, []
    for fact in facts:
        event, _, name = fact.partition(" ")
        if event == "C" and name.isdecimal() and name.isascii():
            changed.append(int(name))
        elif event in _EVENTS:
            found[name] = _EVENTS[event]
        else:
            return None
    facts_found = with_first_words(found) if parent_facts else None
    return Report(state=parts[1], code=int(parts[2]), facts=facts_found, changed=tuple(changed))


def judge(result: ExecResult, statuses: Mapping[str, str], expectation: Expectation) -> Score:
    """Return the score of one grading run.

    Args:
        result: of the grading command.
        statuses: {test id: status} parsed from its log.
        expectation: what the run must show.
    """
    breakdown = _counts(statuses, expectation)
    ended = _ended_early(result)
    if ended:
        return Score(value=0.0, verdict=ended, breakdown=breakdown)
    why = _tampering(result, statuses, expectation)
    if why:
        return Score(value=0.0, verdict="tampered", breakdown={**breakdown, "why": why})
    if resolved(statuses, expectation):
        return Score(value=1.0, verdict="resolved", breakdown=breakdown)
    out_of_time = any(line.endswith(" - timeout") for line in result.output.splitlines())
    verdict = "timeout" if out_of_time else "unresolved"
    return Score(value=0.0, verdict=verdict, breakdown=breakdown)


def resolved(statuses: Mapping[str, str], expectation: Expectation) -> bool:
    """SWE-bench's own rule: every named test passed (an empty FAIL_TO_PASS never does)."""
    needed = (*expectation.fail_to_pass, *expectation.pass_to_pass)
    return bool(expectation.fail_to_pass) and all(statuses.get(name) == PASSED for name in needed)


def _ended_early(result: ExecResult) -> str:
    if result.timed_out:
        return "timeout"
    if result.oom_killed:
        return "agent"
    lines = result.output.split("\n")
    if result.returncode == 3 and "NO_APPLY" in lines:
        return "no_apply"
    return "agent" if result.returncode == 4 and "NO_TESTS" in lines else ""


def _tampering(result: ExecResult, statuses: Mapping[str, str], expectation: Expectation) -> str:
    """Say which two sources disagree, or return ``""``."""
    report = parse_report(result.output, expectation.nonce, expectation.parent_facts)
    passed = resolved(statuses, expectation)
    if report is None:
        return "no report of the parent process at the end of the log"
    if report.code != result.returncode:
        return f"exit code {result.returncode}, report says {report.code}"
    if report.state in ("timeout", "signal"):
        return "the log claims success of a killed run" if passed else ""
    if report.state != "end":
        return "the test process left before its tests had ended"
    if result.truncated and passed:
        return "the log was flooded"
    if _differ(statuses, report.facts, expectation):
        return "the log contradicts itself or the report of the parent process"
    return _canary_trouble(statuses, expectation.canaries, passed, report.code)


def _canary_trouble(
    statuses: Mapping[str, str], canaries: Canaries, passed: bool, code: int
) -> str:
    """Both absent is no sign of tampering where nothing passed: collection may have failed."""
    good, bad = statuses.get(canaries.passing), statuses.get(canaries.failing)
    if code == 0:
        return "exit code 0 although a canary test must fail"
    if good is None and bad is None:
        return "the canary tests are missing" if passed else ""
    # a wrong repair may return just what the failing canary asks for
    wrong = good != PASSED or (passed and bad in (None, PASSED))
    return "a canary test has the wrong result" if wrong else ""


def _differ(
    statuses: Mapping[str, str], facts: Mapping[str, str] | None, expectation: Expectation
) -> bool:
    canaries = (expectation.canaries.passing, expectation.canaries.failing)
    for name in (*expectation.fail_to_pass, *expectation.pass_to_pass, *canaries):
        status = statuses.get(name)
        if status == CONFLICT:
            return True
        if facts is not None and (status == PASSED) != (facts.get(name) == PASSED):
            return True
    return False


def _counts(statuses: Mapping[str, str], expectation: Expectation) -> dict[str, object]:
    def passed(names: Sequence[str]) -> int:
        return sum(statuses.get(name) == PASSED for name in names)

    return {
        "f2p_passed": passed(expectation.fail_to_pass),
        "f2p": len(expectation.fail_to_pass),
        "p2p_passed": passed(expectation.pass_to_pass),
        "p2p": len(expectation.pass_to_pass),
        **expectation.extra,
    }
