"""A suite over a file of real rows; each row's tree is made from its PyPI recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from skyrl_jax.core.config import AgentConfig, SandboxConfig
from skyrl_jax.core.errors import DataError
from skyrl_jax.tasks.swe.rows import SweRow, load_rows
from skyrl_jax.tasks.swe.suite import SweSuite
from skyrl_jax.tasks.swe.trees import Tree, TreeRecipe, build_tree, downloads_folder, load_recipes


class ReadyImage(Protocol):
    """An image that was made ready for agents (sandbox/image_prepare.py)."""

    @property
    def image(self) -> str:
        """Its name; "" = it could not be had."""
        ...

    @property
    def commit(self) -> str:
        """HEAD of its tree."""
        ...

    @property
    def path(self) -> str:
        """A folder with the task's Python, for PATH."""
        ...

    @property
    def why_not(self) -> str:
        """Why there is none."""
        ...


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
    images: Mapping[str, ReadyImage] | None = None,
) -> SweSuite:
    """Return a suite with one split, "all". Trees are downloaded and built now, once.

    Args:
        rows: real rows.
        agent: decides the prompt style.
        sandbox: limits of every sandbox.
        image: root filesystem of rows without an image of their own.
        cache: layers are kept here.
        prepare: gives a layer to the agent's uid.
        images: {instance id: its own image, made ready, or why not}; ``None``: trees are made from
            PyPI releases in their place.

    Raises:
        ImageError: a tree could not be made.
    """
    recipes = load_recipes()
    if images is not None:
        trees, missing = _of_images(rows, images, recipes)
        return SweSuite(
            {"all": rows},
            agent=agent,
            sandbox=sandbox,
            image=image,
            cache=cache,
            prepare=prepare,
            trees=trees,
            missing=missing,
        )
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


def _of_images(
    rows: Sequence[SweRow], images: Mapping[str, ReadyImage], recipes: Mapping[str, TreeRecipe]
) -> tuple[dict[str, Tree], dict[str, str]]:
    trees: dict[str, Tree] = {}
    missing: dict[str, str] = {}
    for row in rows:
        name, found = row.instance_id, images[row.instance_id]
        if not found.image:
            missing[name] = found.why_not
        elif name not in recipes:
            missing[name] = (
                f"{name}: no test program is known for it; name one in tasks/swe/pypi_trees.toml"
            )
        else:
            trees[name] = Tree(
                recipe=recipes[name],
                layers=(),
                commit=found.commit,
                image=found.image,
                path=found.path,
            )
    return trees, missing
