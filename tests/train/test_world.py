"""A run keeps the tasks and the tokenizer it began with."""

import asyncio
import dataclasses

import pytest

from skyrl_jax.core.errors import DataError, GenerationError
from skyrl_jax.tasks.swe.suite import row_digest
from skyrl_jax.tasks.swe.synthesize import make_splits
from skyrl_jax.train.workdir import read_json, write_json
from skyrl_jax.train.world import check_pinned, ends_with, pinned_rows


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


def test_what_dies_ends_the_block_with_its_reason():
    async def block(dies_after: float, work) -> str:
        async def died() -> str:
            await asyncio.sleep(dies_after)
            return "the server ended with code -9: out of memory"

        async with ends_with(died):
            await work()
        return "whole"

    async def fails() -> None:
        raise GenerationError("cannot connect")

    for work in (lambda: asyncio.sleep(30), fails):
        with pytest.raises(GenerationError, match="code -9: out of memory"):
            asyncio.run(asyncio.wait_for(block(0.05, work), 10))
    assert asyncio.run(block(60, lambda: asyncio.sleep(0))) == "whole"


def test_a_cancel_from_outside_stays_a_cancel():
    async def never() -> str:
        await asyncio.sleep(60)
        return ""

    async def block() -> None:
        async with ends_with(never):
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(block())
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
