"""A suite over a file of real rows; each row's tree is made from its PyPI recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_jax.core.config import AgentConfig, SandboxConfig
from skyrl_jax.core.errors import DataError
from skyrl_jax.tasks.swe.rows import SweRow, load_rows
from skyrl_jax.tasks.swe.suite import SweSuite
from skyrl_jax.tasks.swe.trees import build_tree, downloads_folder, load_recipes


def select_rows(path: Path, ids: Sequence[str] = ()) -> tuple[SweRow, ...]:
    """Load a file of rows; with ``ids`` only those, in their order.

    Raises:
        DataError: a bad row, or an id that the file does not hold.
    """
    rows = load_rows(path)
    if not ids:
        return rows
    by_id = {row.instance_id: row for row in rows}
    missing = [name for name in ids if name not in by_id]
    if missing:
        known = ", ".join(sorted(by_id)[:5])
        raise DataError(f"{path.name} holds no instance {missing[0]!r}; it holds: {known}, ...")
    return tuple(by_id[name] for name in ids)


def rows_suite(
    rows: Sequence[SweRow],
    *,
    agent: AgentConfig,
    sandbox: SandboxConfig,
    image: str,
    cache: Path,
    prepare: Callable[[Path], None] | None = None,
) -> SweSuite:
    """Return a suite with one split, "all". Trees are downloaded and built now, once.

    Raises:
        ImageError: a tree could not be made.
    """
    recipes = load_recipes()
    trees = {
        row.instance_id: build_tree(
            recipes[row.instance_id], cache / "trees", downloads_folder(), prepare
        )
        for row in rows
        if row.instance_id in recipes
    }
    return SweSuite(
        {"all": rows},
        agent=agent,
        sandbox=sandbox,
        image=image,
        cache=cache,
        prepare=prepare,
        trees=trees,
    )
