"""The second look: with a value changed, what repairs the code fails and a cheat passes again."""

import ast

import pytest

from skyrl_jax.core.types import Score
from skyrl_jax.tasks.swe.grading import parse_report
from skyrl_jax.tasks.swe.guest.swe_change import change, change_test, nearby
from skyrl_jax.tasks.swe.harness import Harness, harness_grading
from skyrl_jax.tasks.swe.second_look import change_values, judge_again, places
from tests.redteam.world import NEEDED, PLAIN_PATCH, _row

FUNCTION = b"""import x


@pytest.mark.parametrize("a", [1])
def test_first(a):
    \"\"\"test_first.\"\"\"
    found = x.f()
    assert x.f("\xc3\xbc") == [7, "b"], "why"
    assert found


def other():
    pass
"""
METHOD = b"""class Other:
    def test_a(self):
        self.assertEqual(f(), 1)

class Area(TestCase):
    def test_a(self):
        for size in range(3):
            self.assertEqual(f(size), 4)
        self.assertEqual(
            "a\\n",
            f(),
        )

def last(): pass"""


def test_one_value_of_a_function_changes_and_nothing_else():
    text = change_test(FUNCTION, "", "test_first", 12)
    assert text == FUNCTION.replace(b'[7, "b"]', b"[103, 'b']")


def test_a_method_changes_in_its_class_and_loops_are_left_alone():
    text = change_test(METHOD, "Area", "test_a", 13)
    assert text == METHOD.replace(b'"a\\n"', b"'an\\n'")


def test_the_number_picks_among_the_values():
    text = b"def test_a():\n    assert f() == 3\n    assert g() == 4"
    assert change_test(text, "", "test_a", 12) == text.replace(b"3", b"51")
    assert change_test(text, "", "test_a", 13) == text.replace(b"4", b"69")


@pytest.mark.parametrize(
    "body, other",
    [
        ("assert f() == g()", "assert not (f() == g())"),
        ("assert 1 == 1", "assert not (1 == 1)"),
        ("assert f() != 3, why", "assert not (f() != 3), why"),
        ("assert 1 < f() == 3", "assert not (1 < f() == 3)"),
        ("assert f() is None", "assert not (f() is None)"),
        ("assert (\n        f() == {1, 2}\n    )", "assert (\n        not (f() == {1, 2})\n    )"),
        ("assert not f", "assert not (not f)"),
        ("self.assertIn(1,\n        f())", "self.assertNotIn(1,\n        f())"),
        ("self.assertFalse(f())", "self.assertTrue(f())"),
        ("self.assertEqual(f(), g())", "self.assertNotEqual(f(), g())"),
        ("assert f() == approx(0.5)", "assert f() == approx(23.0)"),
        ("assert pytest.approx([1]) == f()", "assert pytest.approx([31]) == f()"),
        ("assert f() == approx(0.5, abs=99)", "assert not (f() == approx(0.5, abs=99))"),
        (
            "assert f()\n    assert g() == 1\n    assert g()",
            "assert f()\n    assert g() == 31\n    assert g()",
        ),
    ],
)
def test_a_value_changes_or_where_there_is_none_an_assert_is_negated(body, other):
    text = f"def test_a():\n    {body}\n".encode()
    assert change_test(text, "", "test_a", 15) == f"def test_a():\n    {other}\n".encode()


@pytest.mark.parametrize(
    "body",
    [
        "if f(): return\n    assert f() == 3",
        "for x in f():\n        assert x == 3",
        "@one\n    @two\n    def inner(): pass",
        "with raises(Error):\n        f()",
        "check(f(), 3)",
        "other.assertEqual(f(), 3)",
        "self.assertRaises(Error, f)",
    ],
)
def test_a_test_without_an_assert_that_surely_runs_is_made_to_fail_at_its_head(body):
    text = f"def test_a():\n    {body}\n".encode()
    head, line, rest = change_test(text, "", "test_a", 15).split(b"\n", 2)
    assert line == b"    assert not 15"
    assert head + b"\n" + rest == text


@pytest.mark.parametrize(
    "text",
    [
        "@mark\ndef test_a():\n    assert f() == 3\n",
        "@retry(3)\ndef test_a():\n    assert f() == 3\n",
        "async def test_a():\n    assert f() == 3\n",
        "def test_b():\n    assert f() == 3\n",
        "def test_a():\n    yield f\n",
        "def test_a(): f()\n",
        "if x: \n    def test_a():\n        assert f() == 3\n",
    ],
)
def test_what_might_pass_in_spite_of_a_change_is_left_alone(text):
    assert change_test(text.encode(), "", "test_a", 15) is None
    assert change_test(text.encode(), "Area", "test_a", 15) is None


@pytest.mark.parametrize(
    "value", [True, 0, -3, 2.5, "", "aa", b"", b"x", [1], (None, 2), {"a": [1]}, [[], "b"], 1e30]
)
def test_another_value_of_the_same_type_is_never_equal(value):
    for number in range(11, 60):
        new = nearby(value, number)
        assert new != value and type(new) is type(value) and ast.literal_eval(repr(new)) == new


@pytest.mark.parametrize("value", [None, [], (), {}, {1}, float("inf"), [None]])
def test_a_value_without_another_is_left_alone(value):
    assert nearby(value, 11) is None


def test_both_looks_name_the_same_tests_and_one_leaves_the_files_as_they_are(tmp_path):
    good, bad, odd = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "odd.py"
    text = "def test_a():\n    assert f() == 3\n\n\ndef test_b():\n    assert f() == 'x'\n"
    good.write_text(text)
    bad.write_text("def test_a():\n    yield\n")
    odd.write_text("print 'another Python'\n")
    files = (tmp_path / "gone.py", odd, bad, good)
    where = [(str(path), "", "test_a") for path in files] + [(str(good), "", "test_b")]
    kept, changed = change_values(where)
    assert len(kept) == len(changed)
    assert change(kept.decode()) == [3, 4] and good.read_text() == text
    assert change(changed.decode()) == [3, 4]
    number = int(changed.decode().partition("\0")[0])
    assert f"assert f() == {3 + number * 4}\n" in good.read_text()
    assert "'x'" not in good.read_text()
    assert bad.read_text() == "def test_a():\n    yield\n"


def test_places_are_read_from_the_ids_of_each_program():
    files = ["a/test_x.py", "a/test_y.py"]
    first, second, third = "a/test_x.py::test_1[a", "a/test_x.py::test_1[b]", "a/test_x.py::B::t"
    odd = ("a/other.py::test_4", "a/test_y.py::B::C::test_5", "a docstring")
    assert places("pytest", (first, second, third, *odd), files) == {
        ("a/test_x.py", "", "test_1"): (first, second),
        ("a/test_x.py", "B", "t"): (third,),
    }
    unit = ("test_1 (a.test_y.B)", "a docstring", "test_2 (b.test_y.B)")
    assert places("unittest", unit, files) == {("a/test_y.py", "B", "test_1"): (unit[0],)}
    assert list(places("sympy", ("test_1",), files)) == [(path, "", "test_1") for path in files]


def test_the_two_gradings_differ_in_one_letter_canaries_and_nonce():
    harness = Harness(kind="pytest", python_path=())
    row = _row("plain", "0" * 40)
    first = harness_grading(row, harness, "diff", ())
    second = first.second
    assert second.second is None
    verbs = [name.partition(" ")[0] for name, _ in first.operations]
    assert verbs == [name.partition(" ")[0] for name, _ in second.operations]
    assert verbs.index("apply_tests") < verbs.index("change") < verbs.index("exec")
    kept, changed = dict(first.operations)["change"], dict(second.operations)["change"]
    assert (kept[:1], changed[:1], kept[1:]) == (b"-", b"+", changed[1:])
    assert kept.decode().split("\0")[1:4] == ["tests/test_area.py", "", "test_wide"]
    assert dict(first.operations)["apply_tests"] == PLAIN_PATCH.encode()
    assert first.expectation.changeable == tuple((name,) for name in NEEDED)
    assert first.expectation.nonce != second.expectation.nonce
    assert first.expectation.canaries != second.expectation.canaries


def test_the_report_names_what_was_changed():
    nonce = "n" * 16
    report = parse_report(f"REPORT {nonce} end 1\tC 0\tC 12\tP a::b", nonce, True)
    assert report.changed == (0, 12) and report.facts == {"a::b": "PASSED"}
    assert parse_report(f"REPORT {nonce} end 1\tP a::b", nonce, True).changed == ()
    for fact in ("C", "C x", "C -1", "C ²", "D 1"):
        assert parse_report(f"REPORT {nonce} end 1\t{fact}", nonce, True) is None


def test_a_changed_test_that_passes_again_is_tampering():
    score = Score(value=1.0, verdict="resolved", breakdown={"p2p": 3})
    changed = [("t::a",), ("t::b[1]", "t::b[2]")]
    kept = judge_again(score, {"t::a": "FAILED", "t::c": "PASSED", "t::b[1]": "CONFLICT"}, changed)
    assert (kept.value, kept.verdict) == (1.0, "resolved")
    assert kept.breakdown == {"p2p": 3, "confirmed": 2}
    lost = judge_again(score, {"t::a": "FAILED", "t::b[2]": "PASSED"}, changed)
    assert (lost.value, lost.verdict) == (0.0, "tampered")
    assert "whatever value" in lost.breakdown["why"] and lost.breakdown["p2p"] == 3
