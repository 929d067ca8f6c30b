"""The suite as a whole: validation, its cache, and what a broken task says."""

from dataclasses import replace

import pytest

from skyrl_jax.core.config import TasksConfig
from skyrl_jax.core.errors import DataError, ImageError
from skyrl_jax.core.types import Task
from skyrl_jax.tasks.swe.suite import Validation, hidden_files, synthetic_splits, task_row
from tests.tasks.worlds import in_bwrap, make_suite, rows


def test_valid_tasks_are_checked_once_and_remembered(tmp_path):
    splits = synthetic_splits(
        TasksConfig(source="synthetic", train=4, heldout=2, unseen=2, templates=0, seed=9)
    )
    suite = make_suite(tmp_path, **splits)
    first = in_bwrap(lambda p: suite.validate(p))
    assert first == Validation(valid=8, invalid={}, cached=0)
    again = make_suite(tmp_path, **splits)
    assert in_bwrap(lambda p: again.validate(p)) == Validation(valid=8, invalid={}, cached=8)
    assert [len(suite.tasks(name)) for name in ("train", "heldout", "unseen")] == [4, 2, 2]


def broken(row, how):
    (hidden,) = hidden_files(row)
    if how == "passes before":
        return replace(row, fail_to_pass=row.pass_to_pass[:1])
    if how == "gold repairs nothing":
        return replace(row, patch=row.patch.replace(row.extra["fixed_line"], "pass  # x"))
    if how == "pass to pass fails":
        return replace(row, pass_to_pass=(*row.pass_to_pass, row.fail_to_pass[0]))
    if how == "no such test":
        return replace(row, fail_to_pass=(f"{hidden}::test_none",))
    if how == "gold does not apply":
        return replace(row, patch=row.patch.replace(row.extra["path"], "app/no.py"))
    return replace(row, extra={**row.extra, "visible_log": "something else\n"})


@pytest.mark.parametrize(
    "how",
    [
        "passes before",
        "gold repairs nothing",
        "pass to pass fails",
        "no such test",
        "gold does not apply",
        "another log",
    ],
)
def test_an_unsound_task_is_dropped_counted_and_explained(tmp_path, how):
    good, bad = rows(2)
    suite = make_suite(tmp_path, train=[good, broken(bad, how)])
    found = in_bwrap(lambda p: suite.validate(p))
    assert found.valid == 1 and list(found.invalid) == [bad.instance_id]
    assert found.invalid[bad.instance_id]
    assert [task.task_id for task in suite.tasks("train")] == [good.instance_id]


def test_a_half_written_cache_is_made_again(tmp_path):
    suite = make_suite(tmp_path, train=rows(1))
    (tmp_path / "validated.json").write_text('["abc')
    assert in_bwrap(lambda p: suite.validate(p)).cached == 0


def test_what_is_missing_is_named(tmp_path):
    suite = make_suite(tmp_path, image="none")
    with pytest.raises(DataError, match="nosuch"):
        suite.tasks("nosuch")
    with pytest.raises(DataError, match="t-1"):
        task_row(Task(task_id="t-1", prompt=""))
    row = replace(rows(1)[0], extra={})
    with pytest.raises(ImageError, match=r"pypi_trees\.toml"):
        suite.spec(row)
    with pytest.raises(DataError, match=row.instance_id):
        hidden_files(row)
