"""Real SWE-bench rows over trees made from PyPI releases: gold passes, nothing else does."""

import asyncio
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from launchers import evaluate
from skyrl_jax.core.errors import ConfigError, DataError, InfraError, SandboxGone
from skyrl_jax.sandbox.bwrap import prepare_layer
from skyrl_jax.sandbox.fake import FakeProvider
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.tasks.swe.diffs import new_file_diff
from skyrl_jax.tasks.swe.harness import Harness, harness_grading
from skyrl_jax.tasks.swe.rows_suite import rows_suite, select_rows
from skyrl_jax.tasks.swe.suite import HARNESS_TIMEOUT_S, SweSuite, task_row
from skyrl_jax.tasks.swe.trees import Tree, load_recipes, unpack
from skyrl_jax.train.evaluate_rows import evaluate_rows
from tests.tasks.worlds import CACHE, SANDBOX, agent, bash, in_bwrap, make_suite

ROOT = Path(__file__).resolve().parents[2]
LITE = ROOT.parent / "shared" / "data" / "swebench_lite_dev.json"
SYMPY = "sympy__sympy-20916"
WHEEL_ROWS = "responses_api_agents/mini_swe_agent_2/data/example.jsonl"
# The rows of the shared data set, where it is; the sympy row always.
LITE_IDS = [name for name in load_recipes() if name != SYMPY and LITE.exists()]


@pytest.fixture(scope="session")
def sympy_file(downloads, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "example.jsonl"
    (wheel,) = downloads.glob("nemo_gym-0.4.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(archive.read(WHEEL_ROWS))
    return path


def launch(child_env, path, who, ids):
    flags = [f"--tasks={path}", f"--agent={who}", f"--ids={','.join(ids)}"]
    config = "--config=configs/swe.py:quickstart"
    done = subprocess.run(
        [sys.executable, "launchers/evaluate.py", config, *flags, f"--cache_dir={CACHE}"],
        cwd=ROOT,
        env=child_env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xdist_group("real-rows")
def test_sympy_gold_is_resolved_and_noop_is_not(child_env, sympy_file):
    gold = launch(child_env, sympy_file, "gold", [SYMPY])
    assert (gold["resolved"], gold["total"], gold["infra_failures"]) == (1, 1, 0)
    assert gold["rows"][0]["approximate"] is True and gold["rows"][0]["p2p_excluded"] == 0
    assert gold["rows"][0]["p2p_passed"] == gold["rows"][0]["p2p"] == 1
    noop = launch(child_env, sympy_file, "noop", [SYMPY])
    assert (noop["resolved"], noop["total"], noop["infra_failures"]) == (0, 1, 0)
    assert noop["rows"][0]["approximate"] is True


@pytest.mark.xdist_group("real-rows")
@pytest.mark.parametrize("name", LITE_IDS)
def test_lite_rows_gold_is_resolved_and_noop_is_not(child_env, name):
    gold = launch(child_env, LITE, "gold", [name])
    assert (gold["resolved"], gold["infra_failures"]) == (1, 0)
    assert gold["rows"][0]["p2p_passed"] == gold["rows"][0]["p2p"] > 20
    noop = launch(child_env, LITE, "noop", [name])
    assert (noop["resolved"], noop["infra_failures"]) == (0, 0)


def real_suite(path, ids, cache):
    rows = select_rows(path, ids)
    return rows_suite(
        rows,
        agent=agent("full"),
        sandbox=SANDBOX,
        image=str(base_image(CACHE)),
        cache=cache,
        prepare=prepare_layer,
    )


@pytest.mark.xdist_group("real-rows")
@pytest.mark.parametrize("name", [name for name in LITE_IDS if "marshmallow" in name])
def test_patches_that_cheat_pytest_get_no_reward(name):
    suite = real_suite(LITE, [name], CACHE / "swe")
    (task,) = suite.tasks("all")
    passing = (
        "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\n"
        "def pytest_runtest_makereport(item, call):\n    outcome = yield\n"
        "    report = outcome.get_result()\n    report.outcome = 'passed'\n"
        "    report.longrepr = None\n"
    )
    diffs = {
        "a comment": new_file_diff("notes.txt", "nothing\n"),
        "conftest leaves": new_file_diff("conftest.py", "import os\nos._exit(0)\n"),
        "conftest passes all": new_file_diff("conftest.py", passing),
        "another pytest": new_file_diff("pytest.py", "def main(a):\n    return 1\n"),
        "sitecustomize": new_file_diff("sitecustomize.py", "import os\nos._exit(0)\n"),
    }

    async def work(provider):
        return [await suite.reward(task, diff, provider) for diff in diffs.values()]

    found = dict(zip(diffs, in_bwrap(work, 250.0), strict=True))
    assert {name: score.verdict for name, score in found.items()} == {
        "a comment": "unresolved",
        "conftest leaves": "unresolved",
        "conftest passes all": "unresolved",
        "another pytest": "unresolved",
        "sitecustomize": "unresolved",
    }


@pytest.mark.xdist_group("real-rows")
@pytest.mark.parametrize("name", [name for name in LITE_IDS if "marshmallow" in name])
def test_a_right_repair_counts_though_the_agent_broke_the_tests(name):
    suite = real_suite(LITE, [name], CACHE / "swe")
    (task,) = suite.tasks("all")

    async def work(provider):
        environment = suite.environment(task, provider)
        await environment.reset()
        assert await environment.apply_patch(task_row(task).patch)
        await environment.step([bash("rm -r tests/test_fields.py; echo 'x = (' > tests/base.py")])
        diff = await environment.submission()
        await environment.close()
        return diff, await suite.reward(task, diff, provider)

    diff, score = in_bwrap(work, 250.0)
    assert "tests/base.py" in diff and "tests/test_fields.py" in diff
    # its test file comes from the trusted copy, and so does what the tests import beside them
    assert score.verdict == "resolved" and score.breakdown["confirmed"] == 1


def test_excluded_tests_are_left_out_and_counted(sympy_file):
    (row,) = select_rows(sympy_file, [SYMPY])
    harness = load_recipes()[SYMPY].harness
    grading = harness_grading(row, harness, "diff", row.pass_to_pass)
    assert grading.expectation.pass_to_pass == ()
    assert [name for name, _ in grading.operations][:2] == ["apply", "restore_config"]
    assert grading.expectation.extra == {"approximate": True, "p2p_excluded": 1}
    with pytest.raises(DataError, match=SYMPY):
        harness_grading(replace(row, test_patch="x\n"), harness, "diff", ())


def test_canaries_are_named_like_the_tests_of_the_row():
    like = ("tests/test_fields.py::test_decimal_rounding",)
    for _ in range(20):
        canaries, path, _ = Harness(kind="pytest", python_path=()).canaries("tests", like)
        for name in (path.removesuffix(".py"), canaries.passing, canaries.failing):
            assert re.fullmatch("test(_[a-z]+){3}", re.split("/|::", name)[-1])


@pytest.mark.parametrize("kind", ["pytest", "sympy", "unittest"])
def test_canaries_of_every_program_have_the_ids_that_its_log_has(kind, tmp_path):
    harness = Harness(kind=kind, python_path=(str(tmp_path),))
    canaries, path, text = harness.canaries("tests/unit")
    (tmp_path / "tests/unit").mkdir(parents=True)
    (tmp_path / path).write_text(text)
    compile(text, path, "exec")
    if kind == "unittest":
        command = [sys.executable, *harness.command([path])[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        statuses = harness.parse(done.stderr)
        assert statuses == {canaries.passing: "PASSED", canaries.failing: "FAILED"}
    else:
        names = {name.rpartition("::")[2] for name in (canaries.passing, canaries.failing)}
        assert all(f"def {name}():" in text for name in names)


def test_a_row_without_a_tree_is_an_infra_failure_not_a_zero(sympy_file, tmp_path):
    suite = real_suite(sympy_file, ["django__django-10973"], tmp_path)
    tasks = suite.tasks("all")
    work = evaluate_rows(suite, tasks, FakeProvider(), agent="gold", concurrency=1)
    found = asyncio.run(work)
    assert (found["resolved"], found["total"], found["infra_failures"]) == (0, 1, 1)
    assert found["rows"][0]["score"] is None
    assert "pypi_trees.toml" in found["rows"][0]["why"]


class _Broken:
    """A world in which one step raises."""

    def __init__(self, error=None):
        self._error = error

    async def reset(self):
        if self._error is not None:
            raise self._error

    async def apply_patch(self, patch):
        return False

    async def close(self):
        pass


@pytest.mark.parametrize(
    ("world", "verdict"),
    [
        (_Broken(InfraError("x", cause="docker")), "infra:docker"),
        (_Broken(SandboxGone("x")), "agent"),
        (_Broken(), "no_apply"),
    ],
)
def test_rows_that_end_early_say_that_they_are_approximate(
    sympy_file, tmp_path, monkeypatch, world, verdict
):
    (row,) = select_rows(sympy_file, [SYMPY])
    recipe = replace(load_recipes()[SYMPY], excluded={"a": "x", "b": "y"})
    suite = SweSuite(
        {"all": [row]},
        agent=agent("full"),
        sandbox=SANDBOX,
        image="none",
        cache=tmp_path,
        trees={SYMPY: Tree(recipe=recipe, commit="c", layers=())},
    )
    monkeypatch.setattr(suite, "environment", lambda task, provider: world)
    work = evaluate_rows(suite, suite.tasks("all"), FakeProvider(), agent="gold", concurrency=1)
    (found,) = asyncio.run(work)["rows"]
    assert (found["verdict"], found["approximate"], found["p2p_excluded"]) == (verdict, True, 2)
    line = f"{SYMPY}: {verdict} (approximate tree, 2 PASS_TO_PASS tests excluded)"
    assert evaluate._line(found) == line


def test_sandboxes_of_real_rows_outlive_their_tests():
    roomy = evaluate._roomy(replace(SANDBOX, lifetime_s=300.0))
    assert roomy.lifetime_s == HARNESS_TIMEOUT_S + 120.0
    assert evaluate._roomy(replace(SANDBOX, lifetime_s=9000.0)).lifetime_s == 9000.0


def test_an_unknown_agent_is_refused(tmp_path):
    suite = make_suite(tmp_path, image="none")
    with pytest.raises(ConfigError, match="gold, noop"):
        asyncio.run(evaluate_rows(suite, (), FakeProvider(), agent="x", concurrency=1))


def test_bad_recipes_are_named(tmp_path):
    path = tmp_path / "trees.toml"
    path.write_text('[a]\nrelease = "a==1"\n')
    with pytest.raises(DataError, match=r"trees\.toml: a: .*source"):
        load_recipes(path)
    path.write_text("[")
    with pytest.raises(DataError, match=r"trees\.toml"):
        load_recipes(path)
    text = (
        'release = "a==1"\nrequires = []\npython = "3"\nharness = "x"\nsource = ""\nexcluded = []'
    )
    path.write_text(f"[a]\n{text}\n")
    with pytest.raises(DataError, match="harness"):
        load_recipes(path)


def test_a_wheel_is_unpacked_without_its_records(tmp_path):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/__init__.py", "x = 1\n")
        archive.writestr("a-1.dist-info/METADATA", "Name: a\n")
    unpack(wheel, tmp_path / "tree")
    assert sorted(path.name for path in (tmp_path / "tree").iterdir()) == ["a"]
