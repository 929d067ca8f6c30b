"""From text to verdict: by hand, one tampering at a time, and with arbitrary text."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.core.protocols import ExecResult
from skyrl_jax.tasks.swe.grading import Canaries, Expectation, judge, parse_report, resolved
from skyrl_jax.tasks.swe.logs import PARSERS, with_first_words

NONCE = "0123456789abcdef"
CANARIES = Canaries(passing="tests/c.py::test_1", failing="tests/c.py::test_2")
WANT = Expectation(
    fail_to_pass=("tests/t.py::a",),
    pass_to_pass=("tests/t.py::b",),
    canaries=CANARIES,
    nonce=NONCE,
)
LOG = (
    "PASSED tests/c.py::test_1\nFAILED tests/c.py::test_2 - 1 + 1 = 2, want 1\n"
    "PASSED tests/t.py::a\nPASSED tests/t.py::b\n3 passed, 1 failed\n"
)
FACTS = "P tests/c.py::test_1\tF tests/c.py::test_2\tP tests/t.py::a\tP tests/t.py::b"


def report(code=1, state="end", nonce=NONCE, facts=FACTS):
    return f"\nREPORT {nonce} {state} {code}\t{facts}\n"


def score(log, *, code=1, want=WANT, kind="light", **changes):
    result = ExecResult(returncode=code, output=log, **changes)
    return judge(result, PARSERS[kind](log), want)


def test_an_honest_success_is_resolved():
    found = score(LOG + report())
    assert (found.value, found.verdict) == (1.0, "resolved")
    assert found.breakdown == {"f2p_passed": 1, "f2p": 1, "p2p_passed": 1, "p2p": 1}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_failed_or_missing_test_is_unresolved(name):
    line = f"PASSED tests/t.py::{name}\n"
    fact = f"P tests/t.py::{name}"
    failed = LOG.replace(line, line.replace("PASSED", "FAILED")) + report(
        facts=FACTS.replace(fact, "F" + fact[1:])
    )
    assert score(failed).verdict == "unresolved"
    missing = LOG.replace(line, "") + report(facts=FACTS.replace("\t" + fact, ""))
    assert score(missing).verdict == "unresolved"


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (LOG, 1),  # no report: the parent was killed
        (LOG + report(nonce="f" * 16), 1),  # a report from someone who does not know the nonce
        (LOG + report() + "PASSED tests/t.py::a\n", 1),  # somebody wrote after the parent
        (LOG + report(), 0),  # exit code and report differ
        (LOG + report(code=0), 0),  # a test must have failed
        (LOG + report(state="exit"), 1),  # os._exit before the tests had ended
        (LOG + report(state="signal"), 1),
        (LOG + report(facts=FACTS.replace("P tests/t.py::a", "F tests/t.py::a")), 1),
        (LOG + report(facts=FACTS.replace("\tP tests/t.py::a", "")), 1),
        ("FAILED tests/t.py::a - x\n" + LOG + report(), 1),  # the log contradicts itself
        (LOG.replace("FAILED tests/c", "PASSED tests/c") + report(), 1),
        (
            LOG.replace("FAILED tests/c", "PASSED tests/c")
            + report(facts=FACTS.replace("F tests/c", "P tests/c")),
            1,
        ),  # everything passes, the canary too
        (
            LOG.replace("PASSED tests/c", "FAILED tests/c")
            + report(facts=FACTS.replace("P tests/c", "F tests/c")),
            1,
        ),
    ],
)
def test_disagreement_is_tampered(log, code):
    found = score(log, code=code)
    assert (found.value, found.verdict) == (0.0, "tampered")
    assert found.breakdown["why"]


def test_how_a_run_ends_decides_before_its_text():
    assert score(LOG + report(), timed_out=True).verdict == "timeout"
    assert score(LOG + report(), oom_killed=True).verdict == "agent"
    assert score("error: patch failed\nNO_APPLY\n", code=3).verdict == "no_apply"
    assert score("NO_TESTS\n", code=4).verdict == "agent"
    assert score(LOG + report(), truncated=True).verdict == "tampered"
    slow = LOG.replace("PASSED tests/t.py::a", "FAILED tests/t.py::a - timeout")
    facts = FACTS.replace("P tests/t.py::a", "F tests/t.py::a")
    assert score(slow + report(facts=facts)).verdict == "timeout"


def test_a_broken_collection_is_unresolved_not_tampered():
    want = replace(WANT, parent_facts=True)
    log = "ImportError while loading conftest\n" + report(code=4, facts="").replace("\t", "")
    assert score(log, code=4, want=want, kind="pytest").verdict == "unresolved"


def test_an_empty_fail_to_pass_is_never_resolved():
    assert not resolved({}, replace(WANT, fail_to_pass=(), pass_to_pass=()))


def test_a_report_without_facts_is_read_for_foreign_programs():
    found = parse_report(report(facts=""), NONCE, parent_facts=False)
    assert found is None or found.facts is None
    found = parse_report(f"x\nREPORT {NONCE} end 1\n", NONCE, parent_facts=False)
    assert found is not None and (found.state, found.code, found.facts) == ("end", 1, None)


def test_pytest_sympy_and_unittest_logs():
    log = (
        "PASSED t.py::a[x y]\nFAILED t.py::b - assert 1 == 2\nERROR t.py::c\n"
        "PASSED t.py::d[p q]\nFAILED t.py::d[p r] - no\n"
    )
    found = PARSERS["pytest"](log)
    assert found["t.py::a[x"] == "PASSED" and found["t.py::a[x y]"] == "PASSED"
    assert found["t.py::b"] == "FAILED" and found["t.py::c"] == "ERROR"
    assert found["t.py::d[p"] == "FAILED"  # not all of them passed
    found = PARSERS["sympy"]("test_a ok\ntest_b F\n test_c E\ntest_d f\ntest_e ok  [OK]\n")
    assert found == {
        "test_a": "PASSED",
        "test_b": "FAILED",
        "test_c": "ERROR",
        "test_d": "SKIPPED",
        "test_e": "PASSED",
    }
    log = (
        "test_a (x.y.T) ... ok\ntest_b (x.y.T.test_b) ... FAIL\ntest_c (x.T)\n"
        "test_d (x.T) ... skipped 'why'\n"
    )
    assert PARSERS["unittest"](log) == {
        "test_a (x.y.T)": "PASSED",
        "test_b (x.y.T)": "FAILED",
        "test_d (x.T)": "SKIPPED",
    }


def test_cut_ids_do_not_override_whole_ones():
    assert with_first_words({"a": "FAILED", "a b": "PASSED"})["a"] == "FAILED"


WORDS = st.sampled_from(
    "PASSED|FAILED|ERROR|tests/t.py::a|tests/t.py::b|tests/c.py::test_1|REPORT|end|exit|1|0|-|"
    "\n|\t|P|F| |...|ok|test_a|0123456789abcdef".split("|")
)
TEXTS = st.one_of(st.text(max_size=80), st.lists(WORDS, max_size=40).map(" ".join))


@given(log=TEXTS, code=st.integers(-9, 5), kind=st.sampled_from(sorted(PARSERS)))
def test_no_text_makes_it_raise_or_pass(log, code, kind):
    found = score(log, code=code, kind=kind)
    statuses = PARSERS[kind](log)
    if statuses.get("tests/t.py::a") != "PASSED":
        assert found.value == 0.0
    assert (found.value == 1.0) == (found.verdict == "resolved")


@given(noise=TEXTS, at=st.integers(0, 4))
def test_noise_never_turns_a_missing_test_into_a_success(noise, at):
    lines = LOG.replace("PASSED tests/t.py::a\n", "").splitlines(keepends=True)
    log = "".join([*lines[:at], noise, "\n", *lines[at:]])
    found = score(log + report(facts=FACTS.replace("\tP tests/t.py::a", "")))
    assert found.value == 0.0
