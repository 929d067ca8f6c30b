"""Small function templates that synthetic repair tasks are made from."""

from __future__ import annotations

from skyrl_jax.tasks.swe.templates.base import Function, Template, render
from skyrl_jax.tasks.swe.templates.numeric import NUMERIC
from skyrl_jax.tasks.swe.templates.sequences import SEQUENCES
from skyrl_jax.tasks.swe.templates.tables import TABLES
from skyrl_jax.tasks.swe.templates.text import TEXT

TEMPLATES: tuple[Template, ...] = NUMERIC + SEQUENCES + TEXT + TABLES

__all__ = ["TEMPLATES", "Function", "Template", "pool", "render"]


def pool(count: int, *, unseen: bool) -> list[Template]:
    """Return the shortest templates: ``count`` seen ones, or a quarter as many unseen ones.

    A count of 0 means all of them.
    """
    kind = [template for template in TEMPLATES if template.unseen == unseen]
    if count == 0:
        return kind
    size = -(-count // 4) if unseen else count
    return sorted(kind, key=lambda template: (len(template.source), template.name))[:size]
