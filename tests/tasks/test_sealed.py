"""Sealed tests say what plain ones say; a diff cannot steer a foreign test program."""

import importlib
import random
import subprocess
import sys

import pytest

from skyrl_jax.tasks.swe.diffs import change_diff, new_file_diff
from skyrl_jax.tasks.swe.layers import GUEST
from skyrl_jax.tasks.swe.reward import encode_request
from skyrl_jax.tasks.swe.sealed import literal_assert, nearby, seal

PATH = "tests/test_m.py"
HEAD = "from m import f, g\n"
NONCE = "0123456789abcdef"
MODULE = """class Odd:
    pass


def g(x):
    return {"a": [x, (1.0, None)]}


def f(x):
    if x == 9:
        while True:
            pass
    return {0: 3, 1: True, 2: Odd(), 3: "x" * 99, 4: [1, 2]}[x]
"""


@pytest.fixture
def swe_check(monkeypatch):
    """Return the guest module; in the sandbox its folder is on the path."""
    monkeypatch.syspath_prepend(str(GUEST))
    yield importlib.import_module("swe_check")
    for name in ("swe_check", "swe_runner"):
        sys.modules.pop(name, None)


def grade(tree, operations, tail=NONCE):
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(GUEST / "grade.py")],
        cwd=tree,
        input=encode_request(operations, [tail]),
        capture_output=True,
        timeout=60,
    )
    return done.returncode, done.stdout.decode()


def both(tree, module, tests):
    """Return what plain and sealed grading of a test file print."""
    (tree / "tests").mkdir()
    (tree / "m.py").write_text(module)
    text = HEAD + "".join(f"\n\ndef test_{at}():\n{body}" for at, body in enumerate(tests))
    sealed = seal(PATH, text)
    tail = f"{len(sealed.answers)}\n{sealed.answers}{NONCE}"
    checked = grade(tree, [("check", sealed.calls.encode())], tail)
    assert not (tree / PATH).exists()
    return grade(tree, [(f"write {PATH}", text.encode()), ("run", PATH.encode())]), checked


@pytest.mark.parametrize(
    ("module", "tests"),
    [
        (
            MODULE,
            [
                "    assert f(0) == 3\n    assert g(4) == {'a': [4, (1, None)]}\n",
                "    assert f(1) == 1\n",
                "    assert f(0) == 3\n    assert f(0) == 4\n    assert f(4) == [2, 1]\n",
                "    assert f(2) == 5\n",
                "    assert f(3) == 'y'\n",
                "    assert f(7) == 'a == b'\n",
                "    assert f(9) == 1\n",
                "    assert f(0) == 3\n",
            ],
        ),
        ("def f(:\n", ["    assert f(0) == 3\n"]),
        ("import sys\nsys.exit(3)\n", ["    assert f(0) == 3\n"]),
        ("import os\nos._exit(0)\n", ["    assert f(0) == 3\n"]),
        ("import os\nos.kill(os.getpid(), 9)\n", ["    assert f(0) == 3\n"]),
        ("while True:\n    pass\n", ["    assert f(0) == 3\n"]),
        ("import os\ng = 1\ndef f(x):\n    os._exit(0)\n", ["    assert f(0) == 3\n"]),
    ],
)
def test_the_log_is_that_of_the_plain_runner(tmp_path, module, tests):
    plain, sealed = both(tmp_path, module, tests)
    assert sealed == plain
    assert f"REPORT {NONCE} " in plain[1]


def test_a_value_counts_only_if_it_is_plain(tmp_path):
    module = (
        "class Any:\n    def __eq__(self, other):\n        return True\n"
        "    def __repr__(self):\n        return '3'\n"
        "class Three(int):\n    pass\n"
        "def f(x):\n    return [Any(), [Any()], Three(3), {3: Any()}, 3][x]\n"
        "g = 1\n"
    )
    tests = [f"    assert f({x}) == {want}\n" for x, want in enumerate((3, [3], 3, {3: 3}, 3))]
    _, (_, log) = both(tmp_path, module, tests)
    assert [line[:6] for line in log.splitlines()[:5]] == ["FAILED"] * 4 + ["PASSED"]


@pytest.mark.parametrize(
    "text", ["x", "().__class__", "(lambda: 1)()", "open('x')", "[y for y in ()]", "1 +", "(" * 999]
)
def test_text_that_is_not_a_literal_is_no_value(swe_check, text):
    with pytest.raises((ValueError, SyntaxError, MemoryError, RecursionError)):
        swe_check.plain_value(text)
    assert not swe_check.same(text, "1")


@pytest.mark.parametrize(("text", "want"), [("1.0", "1"), ("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}")])
def test_equal_values_need_not_be_equal_text(swe_check, text, want):
    assert swe_check.same(text, want)
    assert not swe_check.same(text, "[1]")


@pytest.mark.parametrize(
    "body",
    [
        "    assert f(1) == 2, 'why'\n",
        "    assert f(1) == g(1)\n",
        "    assert f(1) == 2 == 2\n",
        "    x = 3\n    assert f(x) == 3\n",
        "    assert f(1)\n",
        "    if f(1):\n        assert f(1) == 3\n",
    ],
)
def test_other_tests_are_not_sealed(body):
    assert seal(PATH, HEAD + "\n\ndef test_a():\n    assert f(1) == 2\n")
    assert seal(PATH, HEAD + "\n\ndef test_a():\n" + body) is None
    assert seal(PATH, HEAD + "\nx = 1\n\n\ndef test_a():\n    assert f(1) == 2\n") is None


def test_a_right_side_may_hold_the_sign():
    assert literal_assert("    assert f('a == b') == 'c == d'") == ("f('a == b')", "'c == d'")


@pytest.mark.parametrize(
    "value", [0, True, 1.5, 1e300, "", "abc", [], [1], (), ("a", 2), {}, {"a": [1]}, None]
)
def test_a_nearby_value_is_another_of_the_same_type(value):
    for seed in range(9):
        other = nearby(value, random.Random(seed))
        assert other != value
        assert type(other) is type(value) or value is None


@pytest.fixture
def repository(tmp_path):
    files = {"setup.cfg": "a = 1\n", "pytest.ini": "b = 1\n", "m.py": "c = 1\n"}
    files |= {"tests/conftest.py": "d = 1\n", "tests/test_m.py": "e = 1\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "x")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=60)
    return tmp_path, files


RENAME = (
    "diff --git a/pytest.ini b/other.ini\nsimilarity index 100%\n"
    "rename from pytest.ini\nrename to other.ini\n"
)
DELETE = (
    "diff --git a/tests/conftest.py b/tests/conftest.py\ndeleted file mode 100644\n"
    "--- a/tests/conftest.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-d = 1\n"
)


@pytest.mark.parametrize(
    "diff",
    [
        new_file_diff("conftest.py", "x = 1\n"),
        new_file_diff("conftest.py", "x = 1\n").partition("\n--- ")[1][1:]
        + new_file_diff("conftest.py", "x = 1\n").partition("\n--- ")[2],
        new_file_diff("tests/deep/conftest.py", "x = 1\n"),
        new_file_diff("tox.ini", "[pytest]\n") + new_file_diff("sitecustomize.py", "x = 1\n"),
        new_file_diff("pyproject.toml", "x = 1\n") + new_file_diff("a.pth", "import os\n"),
        new_file_diff(".gitignore", "conftest.py\n") + new_file_diff("conftest.py", "x = 1\n"),
        change_diff("setup.cfg", "a = 1\n", "[tool:pytest]\n"),
        change_diff("tests/conftest.py", "d = 1\n", "import os\n"),
        DELETE,
        RENAME,
    ],
)
def test_a_diff_cannot_steer_the_test_program(repository, diff):
    tree, files = repository
    change = change_diff("m.py", "c = 1\n", "c = 2\n")
    assert grade(tree, [("apply", (diff + change).encode()), ("restore_config", b"")])[0] == 0
    kept = {".gitignore", "other.ini"}
    found = {
        str(path.relative_to(tree)): path.read_text()
        for path in tree.rglob("*")
        if path.is_file() and ".git" not in path.parts and path.name not in kept
    }
    assert found == {**files, "m.py": "c = 2\n"}


def test_what_the_test_patch_touches_is_left_to_it(repository):
    tree, _ = repository
    diff = change_diff("setup.cfg", "a = 1\n", "a = 2\n")
    diff += change_diff("pytest.ini", "b = 1\n", "b = 2\n")
    grade(tree, [("apply", diff.encode()), ("restore_config", b"x.py\0setup.cfg")])
    assert (tree / "setup.cfg").read_text() == "a = 2\n"
    assert (tree / "pytest.ini").read_text() == "b = 1\n"
