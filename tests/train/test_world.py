"""A run keeps the tasks and the tokenizer it began with."""

import dataclasses

import pytest

from skyrl_jax.core.errors import DataError
from skyrl_jax.tasks.swe.suite import row_digest
from skyrl_jax.tasks.swe.synthesize import make_splits
from skyrl_jax.train.workdir import read_json, write_json
from skyrl_jax.train.world import check_pinned, pinned_rows


def test_the_pinned_tasks_come_back_in_their_order_and_a_changed_one_is_named(tmp_path):
    splits = make_splits(4, 2, 0, seed=5, templates=25)
    kept = [splits["train"][2], splits["train"][0]]
    pinned = {"train": [[row.instance_id, row_digest(row)] for row in kept], "heldout": []}
    write_json(tmp_path / "tasks.json", pinned)  # the way to disk must not sort them
    pinned = read_json(tmp_path / "tasks.json")
    assert pinned_rows(splits, pinned) == {"train": kept, "heldout": []}
    changed = dataclasses.replace(kept[0], problem_statement="another")
    splits["train"][2] = changed
    with pytest.raises(DataError, match=kept[0].instance_id):
        pinned_rows(splits, pinned)
    with pytest.raises(DataError, match="new --workdir"):
        pinned_rows({"train": []}, pinned)


@pytest.mark.parametrize("value", [[], {}, {"train": []}, {"train": ["x"]}, {"train": [["x", 1]]}])
def test_a_damaged_list_of_tasks_is_refused(value):
    with pytest.raises(DataError, match="damaged"):
        check_pinned(value)
