"""Task making: deterministic, one line broken, splits apart, no test of the other side shown."""

import hashlib
import json
import random
import subprocess
import sys

import pytest

from skyrl_jax.tasks.swe import cases
from skyrl_jax.tasks.swe.diffs import added_files, change_diff, new_file_diff, touched_paths
from skyrl_jax.tasks.swe.mutate import KINDS, SFT_KINDS, apply_mutant, mutants
from skyrl_jax.tasks.swe.synthesize import function_key, make_split, make_splits
from skyrl_jax.tasks.swe.templates import TEMPLATES, render

SPLITS = make_splits(120, 40, 30, seed=3)
ROWS = [row for rows in SPLITS.values() for row in rows]
_DIGEST = (
    "import hashlib, json\nfrom skyrl_jax.tasks.swe.synthesize import make_splits\n"
    "rows = [r.to_json() for s in make_splits(20, 5, 5, 3).values() for r in s]\n"
    "print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())"
)


def test_there_are_enough_templates_and_kinds():
    assert len(TEMPLATES) >= 36
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES)
    assert sum(template.unseen for template in TEMPLATES) >= 6
    assert len(KINDS) >= 8
    assert 0.5 <= len(SFT_KINDS) / len(KINDS) <= 0.7
    made = {m.kind for t in TEMPLATES for m in mutants(render(t, random.Random(0)).source)}
    assert made == KINDS


def test_the_same_seed_gives_the_same_rows_in_any_process(child_env):
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**child_env, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    rows = [r.to_json() for s in make_splits(20, 5, 5, 3).values() for r in s]
    assert digests == {hashlib.sha256(json.dumps(rows).encode()).hexdigest()}
    other = [r.to_json() for s in make_splits(20, 5, 5, 4).values() for r in s]
    assert rows != other


def test_more_training_tasks_do_not_change_the_held_out_ones():
    assert make_splits(5, 10, 10, 3)["heldout"] == make_splits(9, 10, 10, 3)["heldout"]


def test_ids_and_broken_functions_are_unique_over_all_splits():
    assert len({row.instance_id for row in ROWS}) == len(ROWS)
    keys = [function_key(row.extra["function"]) for row in ROWS]
    assert len(set(keys)) == len(keys)


def test_a_broken_function_of_another_split_is_not_made_again():
    first = make_split("train", 5, 3, set())
    keys = {row.extra["key"] for row in first}
    again = make_split("train", 5, 3, set(keys))
    assert not keys & {row.extra["key"] for row in again}
    assert make_split("train", 5, 3, set()) == first


def test_unseen_templates_occur_nowhere_else():
    unseen = {template.name for template in TEMPLATES if template.unseen}
    assert {row.extra["template"] for row in SPLITS["unseen"]} <= unseen
    for split in ("train", "heldout"):
        assert not {row.extra["template"] for row in SPLITS[split]} & unseen


@pytest.mark.parametrize("row", ROWS[::4], ids=lambda row: row.instance_id)
def test_a_row_is_a_sound_one_line_repair(row):
    extra, files = row.extra, row.extra["files"]
    text = files[extra["path"]]
    assert text.count(extra["buggy_line"]) == 1
    assert extra["function"] in text
    lines = row.patch.splitlines()
    removed = [line for line in lines if line.startswith("-") and not line.startswith("---")]
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert [removed[0][1:].strip()] == [extra["buggy_line"]] and len(removed) == 1
    assert [added[0][1:].strip()] == [extra["fixed_line"]] and len(added) == 1
    assert touched_paths(row.patch) == (extra["path"],)
    assert extra["sft"] == (extra["mutation"] in SFT_KINDS)
    assert 1 <= len(extra["failures"]) <= 2
    assert all(failure in row.problem_statement for failure in extra["failures"])
    assert extra["visible_log"] in row.problem_statement


@pytest.mark.parametrize("row", ROWS[::4], ids=lambda row: row.instance_id)
def test_hidden_tests_use_other_inputs_than_the_visible_ones(row):
    hidden = added_files(row.test_patch)
    assert hidden is not None and not set(hidden) & set(row.extra["files"])
    visible = row.extra["files"][row.extra["test_files"][0]]
    shown = {line.strip() for line in visible.splitlines() if "assert" in line}
    target = row.extra["function"].partition("(")[0].removeprefix("def ")
    secret = {
        line.strip()
        for text in hidden.values()
        for line in text.splitlines()
        if f"assert {target}(" in line
    }
    assert secret and not secret & shown
    ids = {*row.fail_to_pass, *row.pass_to_pass}
    assert row.fail_to_pass and row.pass_to_pass and len(ids) >= 2


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_mutant_differs_in_one_line_and_compiles(template):
    for seed in range(3):
        source = render(template, random.Random(seed)).source
        found = mutants(source)
        assert found
        for mutant in found:
            broken = apply_mutant(source, mutant)
            before, after = source.splitlines(), broken.splitlines()
            assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 1
            compile(broken, "mutant", "exec")


def test_an_endless_loop_is_stopped_and_such_bugs_are_not_used():
    template = next(t for t in TEMPLATES if t.name == "gcd")
    function = render(template, random.Random(0))
    looping = f"def {function.name}(a, b):\n    while True:\n        a = a\n"
    found = cases.compare(function, looping, random.Random(0))
    assert {case.failure for case in found} == {"timeout"}
    assert all("timeout" not in row.problem_statement for row in ROWS)


def test_diffs_round_trip():
    files = {"tests/test_a.py": "x = 1\n\ny = 2\n", "b.py": "+\n-\n"}
    diff = "".join(new_file_diff(path, text) for path, text in files.items())
    assert added_files(diff) == files
    change = change_diff("b.py", "a\nb\n", "a\nc\n")
    assert added_files(change) is None and added_files(diff + change) is None
    assert touched_paths(diff + change) == ("tests/test_a.py", "b.py")
