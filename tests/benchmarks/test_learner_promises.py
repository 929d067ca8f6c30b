"""The learner's verification: what it names exists, and its judgements by hand."""

from __future__ import annotations

import ast
import json
import sys

import jax.numpy as jnp
import pytest

from tests.test_faults_d import ROWS

GIB = 2**30


@pytest.fixture(scope="module")
def parts(modules):
    return modules("learner_parts")


@pytest.mark.parametrize("suite", ["learner_promises", "gateway_promises"])
def test_every_named_test_exists(modules, repo_root, suite):
    promises = modules(suite)
    names = [part.name for part in promises.PARTS]
    assert len(set(names)) == len(names)
    for part, _, nodes in promises.PROVED:
        assert part in names
        for node in nodes:
            path, _, name = node.partition("::")
            tree = ast.parse((repo_root / path).read_text())
            made = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            assert name in made if name else any(n.startswith("test_") for n in made), node


def test_rows_of_faults_and_symptoms_of_tests_are_one_list(modules):
    symptoms = modules("section_d").SYMPTOMS
    assert {name for names in symptoms.values() for name in names} == {
        row for row in ROWS if not row.startswith("C42")
    }


def test_a_row_that_is_not_known_has_no_symptom(modules):
    text = """
## C. Others
- rope_theta is dropped
## D. JAX systems
Seen while reading:
- left alone: nobody said so
- rope_theta is dropped: a default is used

| thread | symptom |
|---|---|
| marin#1652 (PR) | silent |
| marin#16521 | another thread |

## E. Sandboxes
| x | y |
|---|---|
| SkyRL#891 | not of this section |
"""
    found = modules("section_d").symptoms_of_rows(text)
    assert found == {
        "left alone: nobody said so": (),
        "rope_theta is dropped: a default is used": (
            "tunix: rope_theta of config.json is dropped",
        ),
        "marin#1652 (PR)": ("marin#1652: a failed transfer silently keeps the old params",),
        "marin#16521": (),
    }
    with pytest.raises(ValueError, match="no section D"):
        modules("section_d").symptoms_of_rows("## C.")


CASES = {
    "tests.a.test_b::test_c[1]": "passed",
    "tests.a.test_b::test_c[2]": "failed",
    "tests.a.test_b::test_cd": "skipped",
    "tests.a.test_bb::test_c": "passed",
}


def test_states_by_hand(parts):
    nodes = ("tests/a/test_b.py::test_c", "tests/a/test_b.py", "tests/a/test_bb.py", "tests/x.py")
    found = parts.states(CASES, nodes)
    assert found == {
        nodes[0]: {"passed": 1, "failed": 1},
        nodes[1]: {"passed": 1, "failed": 1, "skipped": 1},
        nodes[2]: {"passed": 1},
        nodes[3]: {},
    }
    assert [parts.passed({node: found[node]}) for node in nodes] == [False, False, True, False]
    assert not parts.passed({})


def test_named_tests_are_those_of_the_last_run(parts, clone):
    made = clone()
    (made.root / ".cache").mkdir()
    (made.root / ".cache" / "junit.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.a.test_b" name="test_c"/>'
        '<testcase classname="tests.a.test_b" name="test_d"><failure/></testcase>'
        "</testsuite></testsuites>"
    )
    good = parts.proved("tests/a/test_b.py::test_c")(made, {})
    assert good.held and good.figures == {"tests/a/test_b.py::test_c": {"passed": 1}}
    for bad in ("tests/a/test_b.py::test_d", "tests/a/test_b.py", "tests/a/test_b.py::test_e"):
        assert not parts.proved("tests/a/test_b.py::test_c", bad)(made, {}).held


def plan_answer(**changes):
    """What launchers/plan.py prints of a step that fits; ``changes`` of its object."""
    found = {
        "fits": True, "topology": "v5e:4x4", "mesh": {"data": 1, "fsdp": 16}, "rows": 16,
        "seq_len": 2048, "remat": "full", "compile_s": 70.0, "step_time_s": 1.5,
        "peak_bytes": 9 * GIB, "hbm_bytes": 16 * GIB, "over_bytes": 0, "argument_bytes": GIB,
        "temporary_bytes": GIB, "reference_bytes": 0,
    }  # fmt: skip
    return json.dumps(found | changes)


@pytest.mark.parametrize(
    ("status", "changes", "held"),
    [
        (0, {}, True),
        (0, {"peak_bytes": 10 * GIB}, False),
        (0, {"compile_s": 95.0}, False),
        (0, {"remat": "dots"}, False),
        (1, {"fits": False}, False),
    ],
)
def test_a_plan_that_must_fit(parts, clone, status, changes, held):
    made = clone([("--topology=v5e:4x4", status, f"a table\n{plan_answer(**changes)}\n")])
    check = parts.plan_fits("qwen3_8b", "v5e:4x4", 16, 2048, peak_gib=9.7)
    outcome = check(made, {})
    assert outcome.held is held
    assert outcome.figures["exit"] == status and outcome.figures["limit_gib"] == 9.7


def test_a_plan_that_must_not_fit(parts, clone):
    # 4.0052: 4.005 when rounded once, and 4.00 when that is rounded again
    over = dict(fits=False, peak_bytes=20 * GIB, over_bytes=int(4.0052 * GIB), step_time_s=None)
    verdict = "does not fit: 4.01 GiB too much; the compiler: ... exceeds available HBM (16G)\n"

    def judge(text, status=1, larger=19.0):
        answers = [("v5p:2x2x2", 0, plan_answer(peak_bytes=int(larger * GIB)))]
        made = clone([*answers, ("v5e:2x4", status, text + plan_answer(**over))])
        return parts.plan_too_large("qwen3_8b", "v5e:2x4", 16, 4096, larger="v5p:2x2x2")(made, {})

    assert judge(verdict).held
    assert judge(verdict).figures["total_over_larger_chips_peak"] == pytest.approx(20 / 19)
    assert not judge(verdict, status=0).held
    assert not judge(verdict, larger=15.0).held
    assert not judge("").held
    assert not judge(verdict.replace("4.01", "4.00")).held


def test_no_object_is_an_error_that_quotes_the_output(parts, clone):
    made = clone([("v5e", 2, "error: libtpu is missing\n")])
    with pytest.raises(ValueError, match="error: libtpu is missing"):
        parts.plan_fits("qwen3_8b", "v5e:4x4", 16, 2048, peak_gib=9.7)(made, {})


SEARCH = """v5p:2x2x1 data=1,fsdp=4 remat=full not tried: needs at least 200.0 of 95.7 GiB a device
v5p:2x2x2: no mesh divides the rows, heads and tokens
v5p:2x2x4 data=1,fsdp=16 remat=full does not fit: 99.00 of 95.74 GiB a device, 60 s
v5p:2x4x4 data=1,fsdp=16 remat=full fits: 45.00 of 95.74 GiB a device, 60 s
v5p is no line of a try
"""


def test_a_search(parts, clone):
    tries = parts.read_tries(SEARCH, "v5p")
    assert [(one["topology"], one["fits"]) for one in tries] == [
        ("v5p:2x2x1", False),
        ("v5p:2x2x4", False),
        ("v5p:2x4x4", True),
    ]
    check = parts.plan_search("qwen3_32b", "v5p", 40_960)
    right = dict(topology="v5p:2x4x4", seq_len=40_960)
    assert check(clone([("--search", 0, SEARCH + plan_answer(**right))]), {}).held
    # a smaller slice that nobody speaks of
    silent = SEARCH.replace("v5p:2x2x2: no mesh", "no mesh")
    assert not check(clone([("--search", 0, silent + plan_answer(**right))]), {}).held
    # it did not stop at the smallest that fits
    larger = right | {"topology": "v5p:4x4x4"}
    assert not check(clone([("--search", 0, SEARCH + plan_answer(**larger))]), {}).held
    none = json.dumps({"fits": False, "topology": "v5p:8x8x8"})
    assert not check(clone([("--search", 1, SEARCH + none)]), {}).held


def test_gaps_of_the_table(parts, modules):
    scaling = modules("scaling")
    plans = (scaling.Plan("a", "v5e:4x4", 16, 2048), scaling.Plan("b", "v5p:2x2x4", 8, 4096))
    result = json.loads(plan_answer()) | {"estimate": False, "step_time_s": None}

    def page(*rows):
        return "\n".join(["text", scaling.BEGIN, *scaling.HEAD, *rows, scaling.END, "| 9 | text |"])

    rows = [scaling.row(number, plan, result) for number, plan in enumerate(plans, 1)]
    assert parts.table_gaps(page(*rows), plans, ["a", "b"]) == []
    assert parts.table_gaps(page(*rows), plans, ["a", "b", "c"]) == ["no plan of preset c"]
    assert parts.table_gaps(page(rows[0]), plans, ["a"]) == ["row 2 (b on v5p:2x2x4) is missing"]
    assert len(parts.table_gaps(page(rows[0], rows[0]), plans, ["a"])) == 1
    lost = scaling.row(2, plans[1], None)
    assert parts.table_gaps(page(rows[0], lost), plans, ["a"]) == [
        "row 2 (b on v5p:2x2x4): not compiled"
    ]
    measured = {
        "preset": "a", "topology": "v5e:4x4", "mesh": {"data": 1, "fsdp": 16}, "rows": 16,
        "seq_len": 2048, "remat": "full", "peak_gib": 9.05,
    }  # fmt: skip
    assert parts.table_gaps(page(*rows), plans, ["a"], [measured, {"exit": 1}]) == []
    (gap,) = parts.table_gaps(page(*rows), plans, ["a"], [measured | {"peak_gib": 9.7}])
    assert gap == "row 1 (a on v5e:4x4) says 9.0 GiB, measured 9.7"
    assert parts.table_gaps(page(*rows), plans, ["a"], [measured | {"seq_len": 1}]) == []


def bench_answer(ratio, **changes):
    rounds = [{"tokens_per_s": 30.0, "peer_tokens_per_s": 20.0}] * 5
    found = {"malloc": "default", "ratio": ratio, "rounds": rounds}
    return json.dumps(found | {"hugepages": {"ratio": 9.0, "rounds": rounds}} | changes)


def test_a_benchmark(parts, clone):
    def judge(answer, status=0, **options):
        return parts.bench("torch", **options)(clone([("--peer=torch", status, answer)]), {})

    promised = {"at_least": 1.0, "target": 1.3}
    outcome = judge(bench_answer(1.2), **promised)
    assert outcome.held and outcome.figures["met"] is False
    assert outcome.figures["round_ratios"] == [1.5] * 5 and outcome.figures["environment_made"]
    assert outcome.figures["hugepages"]["ratio"] == 9.0
    assert judge(bench_answer(1.3), **promised).figures["met"]
    assert not judge(bench_answer(0.9), **promised).held
    assert not judge(bench_answer(1.2, malloc="other"), **promised).held
    assert not judge(bench_answer(1.2, rounds=[]), **promised).held
    reported = judge(bench_answer(0.5))
    assert reported.held and "hugepages" not in reported.figures


def test_no_figure_of_a_program_may_grow(parts):
    def ratios(*values):
        names = ("peak_bytes", "sent_bytes", "flops", "temp_bytes")
        return {"fsdp=8": {"ratio": dict(zip(names, values, strict=True))}}

    assert parts.no_worse(ratios(1.0, 0.8, 1.009, 1.02))
    for at in range(3):
        assert not parts.no_worse(ratios(*(1.02 if i == at else 1.0 for i in range(4))))
    assert not parts.no_worse({})


def test_largest_differences_are_read(parts):
    output = """....
============ largest differences ============
llama logits from position 0 on: 3.1e-06
qwen3 gradients, relative: 2e-05
============ 61 passed in 100.00s ============
later: 1
"""
    assert parts.largest_differences(output) == {
        "llama logits from position 0 on": 3.1e-06,
        "qwen3 gradients, relative": 2e-05,
    }
    assert parts.largest_differences("61 passed") == {}


GOOD = {"exit": 2, "errors": ["error: tensor 'x' is missing"], "traceback": False}


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"device_bytes": 8}, True),  # a PRNG key
        ({"device_bytes": 4096}, False),
        ({"device_bytes": None}, False),  # nothing was told
        ({"exit": 1}, False),
        ({"errors": []}, False),
        ({"errors": GOOD["errors"] * 2}, False),
        ({"errors": ["error: tensor 'y' is missing"]}, False),
        ({"traceback": True}, False),
    ],
)
def test_a_refusal_is_right(modules, changes, held):
    answer = GOOD | {"device_bytes": 0} | changes
    assert modules("refusals").right(answer, "tensor 'x'") is held


def test_the_witness_counts_what_is_alive_when_an_error_is_told(modules):
    witness = modules("refusals").Witness(sys.stderr)
    kept = jnp.ones((1024,), jnp.float32)
    witness.write("a warning\n")
    assert witness.device_bytes is None
    witness.write("error: no\n")
    assert witness.device_bytes >= kept.nbytes
    assert witness.isatty() == sys.stderr.isatty()


def test_each_way_to_spoil_a_folder_meets_training_and_serving(modules, tmp_path):
    refusals = modules("refusals")
    cases = {case.name: case for case in refusals.cases(tmp_path)}
    for name in refusals.SPOILT:
        for launcher in ("train", "serve"):
            flags = cases[f"{launcher}-{name}"].flags
            assert any(flag.endswith(f"={tmp_path / name}") for flag in flags)
    assert cases["train-mesh"].devices == 4 and "plan-mesh" in cases and "train-whole" in cases
