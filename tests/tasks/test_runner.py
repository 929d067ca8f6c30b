"""The programs laid into the sandbox, run here as plain subprocesses."""

import subprocess
import sys

import pytest

from skyrl_jax.tasks.swe.guest import swe_runner
from skyrl_jax.tasks.swe.layers import GUEST

MODULE = "def clamp(x, lo, hi):\n    return min(max(x, lo), hi + 1)\n"
TESTS = """from app.nums import clamp

def test_good():
    assert clamp(3, 1, 5) == 3

def test_bad():
    assert clamp(9, 1, 2) == 2

def test_raises():
    assert clamp(None, 1, 2) == 2

def test_other():
    raise ValueError("no\\nwonder")
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "app" / "nums.py").write_text(MODULE)
    (tmp_path / "tests" / "test_nums.py").write_text(TESTS)
    return tmp_path


def run(tree, program, *arguments):
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(GUEST / program), *arguments],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_the_log_names_each_test_and_says_why_in_one_short_line(tree):
    code, log = run(tree, "runner.py", "tests/test_nums.py")
    assert code == 1
    assert log.splitlines() == [
        "PASSED tests/test_nums.py::test_good",
        "FAILED tests/test_nums.py::test_bad - clamp(9, 1, 2) = 3, want 2",
        "FAILED tests/test_nums.py::test_raises - clamp(None, 1, 2) raised TypeError, want 2",
        "FAILED tests/test_nums.py::test_other - ValueError: no",
        "1 passed, 3 failed",
    ]


def test_all_passed_is_exit_code_0_and_no_tests_are_not(tree):
    (tree / "app" / "nums.py").write_text(MODULE.replace("hi + 1", "hi"))
    (tree / "tests" / "test_nums.py").write_text(TESTS.partition("\ndef test_raises")[0])
    assert run(tree, "runner.py", "tests/test_nums.py") == (
        0,
        "PASSED tests/test_nums.py::test_good\nPASSED tests/test_nums.py::test_bad\n"
        "2 passed, 0 failed\n",
    )
    (tree / "tests" / "test_nums.py").write_text("")
    assert run(tree, "runner.py", "tests/test_nums.py")[0] == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("def clamp(:\n", "ERROR tests/test_nums.py - SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(0)\n", "ERROR tests/test_nums.py - SystemExit: 0"),
        ("import os\nos._exit(0)\n", "0 passed, 0 failed (exit)"),
        ("import os\nos.kill(os.getpid(), 9)\n", "0 passed, 0 failed (signal)"),
        ("while True:\n    pass\n", "ERROR tests/test_nums.py - timeout"),
        (
            "def clamp(*a):\n    while True:\n        try:\n            sum(range(9999))\n"
            "        except BaseException:\n            pass\n",
            "0 passed, 0 failed (signal)",
        ),
    ],
)
def test_whatever_the_module_does_the_parent_reports(tree, module, line):
    (tree / "app" / "nums.py").write_text(module)
    code, log = run(tree, "runner.py", "tests/test_nums.py")
    assert code == 1
    assert line in log.splitlines()


def test_a_module_cannot_shadow_the_standard_library(tree):
    (tree / "textwrap.py").write_text("raise RuntimeError\n")
    (tree / "app" / "nums.py").write_text("import textwrap\n" + MODULE)
    assert "PASSED tests/test_nums.py::test_good" in run(tree, "runner.py", "tests/test_nums.py")[1]


def test_no_bytecode_is_left_in_the_tree(tree):
    run(tree, "runner.py", "tests/test_nums.py")
    assert not list(tree.rglob("__pycache__"))


def test_an_edit_runs_the_tests_in_the_same_process(tree):
    arguments = ("str_replace", "app/nums.py", "hi + 1", "hi", "tests/test_nums.py")
    code, log = run(tree, "edit.py", *arguments)
    assert code == 1
    assert log.startswith("ok\nPASSED tests/test_nums.py::test_good\nPASSED")
    assert "hi + 1" not in (tree / "app" / "nums.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("str_replace", "app/nums.py", "lo, hi)", "x"), "2 matches: lo, hi)"),
        (("str_replace", "app/nums.py", "zz", "x"), "no match: zz"),
        (("str_replace", "app/nums.py", "", "x"), "old_str is empty"),
        (("str_replace", "app/nums.py", "hi + 1", "hi + 1"), "no change: hi + 1"),
        (("str_replace", "none.py", "a", "b"), "no file: none.py"),
        (("str_replace", "app", "a", "b"), "not a file: app"),
        (("create", "app/nums.py", "x"), "exists: app/nums.py"),
        (("insert", "app/nums.py", "9", "x"), "insert_line must be 0 to 2"),
        (("insert", "app/nums.py", "x", "x"), "insert_line must be 0 to 2"),
        (("insert", "app/nums.py", "-1", "x"), "insert_line must be 0 to 2"),
        (("insert", "app/nums.py", "\u00b2", "x"), "insert_line must be 0 to 2"),
        (("insert", "app/nums.py", "9" * 5000, "x"), "insert_line must be 0 to 2"),
        (("view", "app/nums.py", "x"), "view_range must be two line numbers"),
        (("view", "app/nums.py", "\u00b2"), "view_range must be two line numbers"),
        (("view", "app/nums.py", "1", "--1"), "view_range must be two line numbers"),
        (("view", "app/nums.py", "1", "9" * 5000), "view_range must be two line numbers"),
    ],
)
def test_a_refused_edit_says_why_and_changes_nothing(tree, arguments, answer):
    if answer.startswith("2 matches"):
        (tree / "app" / "nums.py").write_text("f(lo, hi)\ng(lo, hi)\n")
    before = (tree / "app" / "nums.py").read_text()
    assert run(tree, "edit.py", *arguments) == (2, answer + "\n")
    assert (tree / "app" / "nums.py").read_text() == before


def test_view_create_and_insert(tree):
    assert run(tree, "edit.py", "view", ".") == (0, "app/\ntests/\n")
    assert run(tree, "edit.py", "view", "app/nums.py", "2", "-1") == (
        0,
        "2\t    return min(max(x, lo), hi + 1)\n",
    )
    assert run(tree, "edit.py", "create", "new/a.py", "x\n") == (0, "ok\n")
    assert run(tree, "edit.py", "insert", "new/a.py", "1", "y") == (0, "ok\n")
    assert (tree / "new" / "a.py").read_text() == "x\ny\n"


@pytest.mark.parametrize(
    ("line", "sides"),
    [
        ("    assert f(1) == 2", ("f(1)", "2")),
        ("assert f(' == ') == '=='", ("f(' == ')", "'=='")),
        ("assert f(1)", None),
        ("x = 1 == 2", None),
    ],
)
def test_an_assertion_is_split_at_its_own_comparison(line, sides):
    assert swe_runner.split_assert(line) == sides


def test_shown_values_are_short_and_have_no_addresses():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert swe_runner.short(object()) == "<object object>"
    assert swe_runner.short(Broken()) == "<repr raised RuntimeError>"
    assert len(swe_runner.short("x" * 500)) == swe_runner.CUT
