"""Tool calls as JSON between tags: Hermes, Qwen 2.5, Qwen3.

Let me look.
<tool_call>
{"name": "bash", "arguments": {"command": "ls"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_jax.core.types import ToolCall, ToolDef
from skyrl_jax.generation.renderer.formats.common import (
    Reading,
    join_content,
    make_call,
    read_json,
    skip_space,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def read(text: str, tools: Sequence[ToolDef]) -> Reading:
    """Read every call of ``text``; a value may itself hold the closing tag."""
    del tools
    calls: list[ToolCall] = []
    pieces: list[str] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        pieces.append(text[position:start])
        try:
            value, end = read_json(text, skip_space(text, start + len(_OPEN)))
            calls.append(make_call(value, ("arguments",)))
        except ValueError as error:
            return Reading(content=text, problem=f"the tool call cannot be read: {error}")
        end = skip_space(text, end)
        if not text.startswith(_CLOSE, end):
            return Reading(content=text, problem=f"the tool call is not closed by {_CLOSE}")
        position = end + len(_CLOSE)
    if not calls:
        return Reading(content=text)
    return Reading(content=join_content([*pieces, text[position:]]), calls=tuple(calls))
