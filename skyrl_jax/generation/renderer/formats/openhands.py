"""Tool calls in OpenHands' text form (agents/parsing.py), which the scaffold's prompt documents.

The calls stay in the content: the scaffold's history holds the text as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_jax.agents.parsing import read_calls
from skyrl_jax.core.types import ToolDef
from skyrl_jax.generation.renderer.formats.common import Reading, typed


def read(text: str, tools: Sequence[ToolDef]) -> Reading:
    """Read every ``<function=NAME>...</function>`` of ``text``."""
    found, problem = read_calls(text)
    if not all(call.name for call in found):
        problem = "a tool call needs the name of a tool: <function=NAME>"
    if problem:
        return Reading(content=text, problem=problem)
    return Reading(content=text, calls=tuple(typed(call, tools) for call in found))
