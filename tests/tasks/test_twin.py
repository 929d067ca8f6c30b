"""The twin of a hidden test: it calls the same code, expects another value, and cannot pass."""

import ast

import pytest

from skyrl_jax.core.protocols import ExecResult
from skyrl_jax.tasks.swe.grading import Canaries, Expectation, judge
from skyrl_jax.tasks.swe.guest.swe_twin import add_twin, nearby, write_twin
from skyrl_jax.tasks.swe.harness import Harness, harness_grading
from tests.redteam.world import NEEDED, PLAIN_PATCH, _row

FUNCTION = b"""import x


def test_first():
    \"\"\"test_first.\"\"\"
    found = x.f()
    assert x.f("\xc3\xbc") == [7, "b"], "why"
    assert found


def other():
    pass
"""
METHOD = b"""class Other:
    def test_a(self):
        self.assertEqual(1, 1)

class Area(TestCase):
    def test_a(self):
        for size in range(3):
            self.assertEqual(f(size), 4)
        self.assertEqual(
            "a\\n",
            f(),
        )

    other = 1

def last(): pass"""


def test_the_twin_of_a_function_stands_at_the_end_with_one_value_changed():
    text = add_twin(FUNCTION, "", "test_first", "test_second", 12)
    assert text == FUNCTION + (
        b'\ndef test_second():\n    """test_first."""\n    found = x.f()\n'
        b'    assert x.f("\xc3\xbc") == [19, \'b\'], "why"\n    assert found\n'
    )


def test_the_twin_of_a_method_stands_in_its_class_and_loops_are_left_alone():
    text = add_twin(METHOD, "Area", "test_a", "test_b", 1)
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert [ast.unparse(node).count("def ") for node in classes] == [1, 2]
    twin = classes[1].body[-1]
    assert twin.name == "test_b"
    assert ast.unparse(twin.body[1]) == "self.assertEqual('a\\n\\n', f())"
    assert ast.unparse(twin.body[0]).endswith("self.assertEqual(f(size), 4)")
    assert text.endswith(b"\n\ndef last(): pass") and text.count(b"test_a") == 2


def test_a_file_without_a_last_line_end_is_no_trouble():
    text = add_twin(b"def test_a():\n    assert f() == 3", "", "test_a", "test_b", -12)
    assert text == b"def test_a():\n    assert f() == 3\n\ndef test_b():\n    assert f() == -9\n"


@pytest.mark.parametrize(
    "body",
    [
        "assert f() == g()",
        "assert 1 == 1",
        "assert f() != 3",
        "assert 1 < f() == 3",
        "assert f() == None",
        "assert f() == {1, 2}",
        "if f(): return\n    assert f() == 3",
        "for x in f():\n        assert x == 3",
        "self.assertEqual(f(), 3, 'why')",
    ],
)
def test_what_might_pass_in_spite_of_the_change_gets_no_twin(body):
    text = f"def test_a():\n    {body}\n".encode()
    assert add_twin(text, "", "test_a", "test_b", 5) is None


def test_decorated_async_and_missing_tests_get_no_twin():
    for head in ("@mark\ndef test_a", "async def test_a", "def test_c"):
        text = f"{head}():\n    assert f() == 3\n".encode()
        assert add_twin(text, "", "test_a", "test_b", 5) is None
        assert add_twin(text, "Area", "test_a", "test_b", 5) is None


@pytest.mark.parametrize(
    "value", [True, 0, -3, 2.5, "", "aa", b"", b"x", [1], (None, 2), {"a": [1]}, [[], "b"]]
)
def test_another_value_of_the_same_type_is_never_equal(value):
    for number in (-29, -11, 11, 29):
        assert nearby(value, number) != value and type(nearby(value, number)) is type(value)


@pytest.mark.parametrize("value", [None, [], (), {}, {1}, 1e30, float("inf"), [None]])
def test_a_value_without_another_is_left_alone(value):
    assert nearby(value, 11) is None


def test_the_first_test_that_can_have_a_twin_gets_it(tmp_path):
    good, bad, odd = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "odd.py"
    good.write_text("def test_a():\n    assert f() == 3\n")
    bad.write_text("def test_a():\n    f()\n")
    odd.write_text("print 'another Python'\n")
    places = [word for path in (tmp_path / "gone", odd, bad, good) for word in (path, "", "test_a")]
    assert write_twin("test_b", "\0".join(map(str, (11, *places))))
    assert good.read_text().endswith("\ndef test_b():\n    assert f() == 14\n")
    assert bad.read_text() == "def test_a():\n    f()\n"
    assert not write_twin("test_b", f"11\0{bad}\0\0test_a")


def test_places_are_read_from_the_ids_of_each_program():
    files = ["a/test_x.py", "a/test_y.py"]

    def places(kind, *ids):
        return Harness(kind=kind, python_path=()).places(ids, files)

    assert places(
        "pytest", "a/test_x.py::test_1", "a/test_x.py::B::test_2", "a/test_x.py::test_3[1]",
        "a/other.py::test_4", "a/test_y.py::B::C::test_5",
    ) == [("a/test_x.py", "", "test_1"), ("a/test_x.py", "B", "test_2")]  # fmt: skip
    assert places("unittest", "test_1 (a.test_y.B)", "a docstring", "test_2 (b.test_y.B)") == [
        ("a/test_y.py", "B", "test_1")
    ]
    assert places("sympy", "test_1") == [(path, "", "test_1") for path in files]


def test_a_grading_asks_for_a_twin_of_a_hidden_test_under_a_fresh_name():
    harness = Harness(kind="pytest", python_path=())
    row = _row("plain", "0" * 40)
    gradings = [harness_grading(row, harness, "diff", ()) for _ in range(5)]
    twins = [name for one in gradings for name, _ in one.operations if name.startswith("twin ")]
    assert twins == [f"twin {one.expectation.canaries.twin}" for one in gradings]
    assert len(set(twins)) == 5
    verbs = [name.partition(" ")[0] for name, _ in gradings[0].operations]
    assert verbs.index("apply_tests") < verbs.index("twin") < verbs.index("exec")
    (value,) = [v for name, v in gradings[0].operations if name.startswith("twin ")]
    number, *words = value.decode().split("\0")
    assert 11 <= abs(int(number)) <= 29 and len(words) == 3 * len(NEEDED)
    assert words[0] == "tests/test_more.py"  # the last file's
    assert PLAIN_PATCH in [v.decode() for name, v in gradings[0].operations if "tests" in name]


def verdict(twin_status, needed="PASSED"):
    log = {"t.py::test_1": needed, "c.py::good": "PASSED", "c.py::bad": "FAILED"}
    if twin_status:
        log["t.py::test_twin[1]"] = twin_status
    letters = {"PASSED": "P", "FAILED": "F"}
    facts = "".join(f"\t{letters[status]} {name}" for name, status in log.items())
    output = "".join(f"{status} {name}\n" for name, status in log.items())
    expectation = Expectation(
        fail_to_pass=("t.py::test_1",),
        pass_to_pass=(),
        canaries=Canaries(passing="c.py::good", failing="c.py::bad", twin="test_twin"),
        nonce="n" * 16,
    )
    result = ExecResult(returncode=1, output=f"{output}REPORT {'n' * 16} end 1{facts}\n")
    return judge(result, log, expectation)


def test_a_twin_that_passes_beside_its_test_is_tampering():
    assert verdict("FAILED").verdict == verdict("").verdict == "resolved"
    score = verdict("PASSED")
    assert (score.value, score.verdict) == (0.0, "tampered")
    assert "whatever value" in score.breakdown["why"]
    # a wrong repair may return just what the twin expects
    assert verdict("PASSED", needed="FAILED").verdict == "unresolved"
