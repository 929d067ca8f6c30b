"""Small function templates that synthetic repair tasks are made from."""

from __future__ import annotations

from skyrl_jax.tasks.swe.templates.base import Function, Template, render
from skyrl_jax.tasks.swe.templates.numeric import NUMERIC
from skyrl_jax.tasks.swe.templates.sequences import SEQUENCES
from skyrl_jax.tasks.swe.templates.tables import TABLES
from skyrl_jax.tasks.swe.templates.text import TEXT

TEMPLATES: tuple[Template, ...] = NUMERIC + SEQUENCES + TEXT + TABLES

__all__ = ["TEMPLATES", "Function", "Template", "render"]
