"""Foreign test programs of real rows: how each is started, and its canary tests."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_jax.core.errors import DataError
from skyrl_jax.tasks.swe.diffs import touched_paths
from skyrl_jax.tasks.swe.grading import Canaries, Expectation
from skyrl_jax.tasks.swe.logs import PARSERS
from skyrl_jax.tasks.swe.reward import Grading, Operation, make_nonce
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.second_look import change_values, places

# -S and -E keep the image's site-packages, sitecustomize and environment out of the test process;
# the test program is imported before the tree is on the path, so that the tree cannot shadow it.
_START = ("python3", "-S", "-E", "-c")
_PYTEST = (
    "import sys; sys.path[:1] = ['/opt/env', '/opt/swe']; import pytest, swe_pytest; "
    "sys.path[:1] = {path!r}; sys.exit(pytest.main(['-p', 'swe_pytest', '-p', "
    "'no:cacheprovider', '-o', 'addopts=', '-rA', '--tb=short', '--show-capture=no', "
    "'--rootdir=.', '-q', *sys.argv[1:]]))"
)
_SYMPY = (
    "import sys; sys.path[:0] = {path!r}; import sympy; "
    "sys.exit(not sympy.test(*sys.argv[1:], verbose=True, colors=False))"
)
_UNITTEST = (
    "import sys; sys.path[:1] = []; import unittest; sys.path[:0] = {path!r}; "
    "unittest.main(module=None, argv=['unittest', '-v', *sys.argv[1:]])"
)
_DULL = ("test", "tests", "self", "none", "class", "import")
_WORDS = ("basic", "empty", "nested", "order", "default", "missing", "simple", "value")
_PROGRAMS = {"pytest": _PYTEST, "sympy": _SYMPY, "unittest": _UNITTEST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A test program. ``python_path``: folders put before everything on ``sys.path``.

    Example: ``Harness(kind="pytest", python_path=("/testbed/src", "/opt/env"))``.
    """

    kind: str
    python_path: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse an unknown kind."""
        if self.kind not in _PROGRAMS:
            raise DataError(f"unknown harness {self.kind!r}; known: {', '.join(_PROGRAMS)}")

    def command(self, files: Sequence[str]) -> tuple[str, ...]:
        """Return the command line that runs test files."""
        names = [_module(path) for path in files] if self.kind == "unittest" else files
        return (*_START, _PROGRAMS[self.kind].format(path=list(self.python_path)), *names)

    def parse(self, log: str) -> dict[str, str]:
        """Read the program's log."""
        return PARSERS[self.kind](log)

    def canaries(self, folder: str, like: Sequence[str] = ()) -> tuple[Canaries, str, str]:
        """Return fresh canaries, their file's path and its text; names are made of ``like``'s."""
        rng, number = random.SystemRandom(), random.SystemRandom().randrange(100)
        taken = "\n".join(like)
        found = {word for word in re.findall("[a-z]{3,12}", taken) if word not in _DULL}
        words = sorted(found | set(_WORDS))
        tried = ("test_" + "_".join(rng.sample(words, 3)) for _ in range(99))
        good, bad, name = [new for new in dict.fromkeys(tried) if new not in taken][:3]
        path = f"{folder}/{name}.py" if folder else f"{name}.py"
        checks = {good: f"{number} + 1 == {number + 1}", bad: f"{number} + 1 == {number}"}
        if self.kind == "unittest":
            body = "".join(
                f"    def {test}(self):\n        self.assertTrue({check})\n"
                for test, check in checks.items()
            )
            group = name.title().replace("_", "")
            text = f"import unittest\n\n\nclass {group}(unittest.TestCase):\n{body}"
            ids = {test: f"{test} ({_module(path)}.{group})" for test in checks}
        else:
            text = "\n\n".join(f"def {test}():\n    assert {c}\n" for test, c in checks.items())
            ids = {test: f"{path}::{test}" if self.kind == "pytest" else test for test in checks}
        return Canaries(passing=ids[good], failing=ids[bad]), path, text


def harness_grading(
    row: SweRow, harness: Harness, diff: str, excluded: Sequence[str] | None
) -> Grading:
    """Plan the grading of a real row: the files of test_patch are restored, then it is applied.

    What passes is looked at a second time, with expected values changed (second_look.py).

    Args:
        row: the task.
        harness: how its tests run.
        diff: the submission.
        excluded: PASS_TO_PASS tests that the approximate tree cannot run; ``None``: the tree is the
            row's own.
    """
    paths = touched_paths(row.test_patch)
    tests = [path for path in paths if path.endswith(".py") and _is_test(path)]
    if not tests:
        raise DataError(f"{row.instance_id}: field 'test_patch' touches no Python test file")
    where = places(harness.kind, row.fail_to_pass, tests)
    kept, changed = change_values(tuple(where))
    expectation = Expectation(
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=tuple(name for name in row.pass_to_pass if name not in set(excluded or ())),
        canaries=Canaries(passing="", failing=""),
        nonce="",
        parent_facts=harness.kind == "pytest",
        extra={} if excluded is None else {"approximate": True, "p2p_excluded": len(excluded)},
        changeable=tuple(where.values()),
    )
    first, second = (
        _one_look(row, harness, diff, tests, value, expectation) for value in (kept, changed)
    )
    return replace(first, second=second)


def _one_look(
    row: SweRow,
    harness: Harness,
    diff: str,
    tests: Sequence[str],
    change: bytes,
    expectation: Expectation,
) -> Grading:
    """Plan one run of the tests, with canaries and a nonce of its own."""
    paths = touched_paths(row.test_patch)
    like = (*row.fail_to_pass, *row.pass_to_pass, *paths)
    canaries, path, text = harness.canaries(tests[0].rpartition("/")[0], like)
    operations: list[Operation] = [("apply", diff.encode("utf-8", "surrogateescape"))]
    operations.append(("restore_config", "\0".join(paths).encode()))
    operations += [(f"restore {name}", b"") for name in paths]
    operations.append(("apply_tests", row.test_patch.encode()))
    operations.append((f"write {path}", text.encode()))
    operations.append(("change", change))
    operations.append(("exec", "\0".join(harness.command([*tests, path])).encode()))
    shown = replace(expectation, canaries=canaries, nonce=make_nonce())
    return Grading(operations=tuple(operations), expectation=shown)


def _is_test(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith("test_") or name.endswith("_test.py") or name == "tests.py"


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")
