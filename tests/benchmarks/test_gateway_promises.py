"""The gateway's verification: its judgements by hand."""

from __future__ import annotations

import ast
import json

import pytest

from tests.test_faults_c import ROWS

CALM = {
    "held": True, "sessions": 256, "turns": 20, "lost": 0, "crossed": 0, "alive": 0,
    "seconds": 360.0, "requests": 10_240, "prompt_tokens": 16_100,
    "overhead_ms": {"p50": 2.0, "p99": 20.0},
    "rss_mb": {"before": 52.0, "warm": 70.3, "most": 92.0, "after": 70.7},
}  # fmt: skip
CHEAP = {"turns": 128.0, "tokens": 69_900.0, "ratio": 1.2}
SUITE = "<testsuites><testsuite>{}</testsuite></testsuites>"
CASE = '<testcase classname="{}" name="{}">{}</testcase>'


@pytest.fixture
def promises(modules):
    return modules("gateway_promises")


@pytest.mark.parametrize(
    ("status", "changes", "held"),
    [
        (0, {}, True),
        (1, {"held": False}, False),
        (1, {}, False),
        (0, {"lost": 1}, False),
        (0, {"crossed": 1}, False),
        (0, {"sessions": 8}, False),
        (0, {"turns": 2}, False),
        (0, {"alive": 1}, False),
        (0, {"seconds": 100.0}, False),
        (0, {"requests": 0}, False),
        (0, {"prompt_tokens": 900}, False),
        (0, {"overhead_ms": {"p50": 5.0, "p99": 20.0}}, False),
        (0, {"overhead_ms": {"p50": 2.0, "p99": 50.0}}, False),
        (0, {"rss_mb": CALM["rss_mb"] | {"after": 70.3 + 8.1}}, False),
    ],
)
def test_load(promises, clone, status, changes, held):
    made = clone([("gateway.py", status, json.dumps(CALM | changes))])
    assert promises.load(made, {}).held is held


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"ratio": 1.51}, False),
        ({"ratio": 0.0}, False),
        ({"tokens": 5_000.0}, False),
        ({"turns": 20.0}, False),
    ],
)
def test_cost_is_judged_in_both_dialects(promises, clone, changes, held):
    made = clone(
        [
            ("dialect=chat", 0, json.dumps(CHEAP)),
            ("dialect=messages", 0, json.dumps(CHEAP | changes)),
        ]
    )
    assert promises.cost(made, {}).held is held


def test_faults_want_every_test_of_every_row(promises, clone):
    made = clone([("test_faults_c", 0, json.dumps(ROWS))])
    nodes = {node for row in ROWS.values() for node in row}
    nodes.add("tests/test_faults_c.py::test_no_row_is_missing")
    report = made.root / ".cache" / "junit.xml"
    report.parent.mkdir()

    def judge(nodes, inside=""):
        cases = []
        for node in sorted(nodes):
            path, name = node.split("::")
            cases.append(CASE.format(path.removesuffix(".py").replace("/", "."), name, inside))
        report.write_text(SUITE.format("".join(cases)))
        return promises.faults(made, {}).held

    assert judge(nodes)
    assert not judge(nodes, "<skipped/>")
    for lacking in ("test_no_row_is_missing", "test_an_empty_answer_is_legal"):
        assert not judge({node for node in nodes if not node.endswith(lacking)})


@pytest.mark.parametrize(
    ("status", "case", "held"),
    [(0, "", True), (1, "", False), (0, "<skipped/>", False), (0, "<failure/>", False)],
)
def test_a_lane(promises, clone, status, case, held):
    made = clone()
    (made.root / ".cache").mkdir()
    report = SUITE.format(CASE.format("tests.lanes.x", "test_y", case))
    (made.root / "report").write_text(report)
    text = f"lane-x:\n\tcp report .cache/lane-x.xml\n\texit {status}\n"
    (made.root / "Makefile").write_text(text)
    found = promises.lane("x")(made, {})
    assert found.held is held and found.figures["tests"] == 1
    assert promises.lane("x", "tests.lanes.x::test_y")(made, {}).held is held
    assert not promises.lane("x", "tests.lanes.x::test_z")(made, {}).held


def test_the_cases_that_lanes_must_hold_exist(promises, repo_root):
    for case in (*promises.EPISODES, *promises.ORACLE):
        module, _, name = case.partition("::")
        made = ast.parse((repo_root / f"{module.replace('.', '/')}.py").read_text()).body
        assert name in {node.name for node in made if isinstance(node, ast.FunctionDef)}, case
