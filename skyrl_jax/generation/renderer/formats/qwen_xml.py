"""Tool calls as tags: Qwen3-Coder, Qwen3.5 and later, Nemotron 3.

    <tool_call>
    <function=bash>
    <parameter=command>
    ls
    </parameter>
    </function>
    </tool_call>

The outer tags may be missing (the models leave them out at times). Values are text; they get the
kind that the tool's schema asks for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyrl_jax.agents.parsing import OPEN, read_call
from skyrl_jax.core.types import ToolCall, ToolDef
from skyrl_jax.generation.renderer.formats.common import (
    Reading,
    join_content,
    skip_space,
    typed,
)

_OUTER, _CLOSE = "<tool_call>", "</tool_call>"
_START = re.compile(rf"{_OUTER}|{OPEN.pattern}")


def read(text: str, tools: Sequence[ToolDef]) -> Reading:
    """Read every call of ``text``."""
    calls: list[ToolCall] = []
    pieces: list[str] = []
    position = 0
    while start := _START.search(text, position):
        pieces.append(text[position : start.start()])
        call, position, problem = _read_one(text, start)
        if problem or call is None:
            return Reading(content=text, problem=problem)
        calls.append(typed(call, tools))
    if not calls:
        return Reading(content=text)
    return Reading(content=join_content([*pieces, text[position:]]), calls=tuple(calls))


def _read_one(text: str, start: re.Match[str]) -> tuple[ToolCall | None, int, str | None]:
    """Read a call with or without its outer tags: the call, the position after it, a problem."""
    outer = start[0] == _OUTER
    head = OPEN.match(text, skip_space(text, start.end()) if outer else start.start())
    if head is None:
        return None, start.end(), f"expected <function=...> after {_OUTER}"
    call, position, problem = read_call(text, head)
    if not call.name:
        problem = "a tool call needs the name of a tool: <function=NAME>"
    if problem or not outer:
        return call, position, problem
    position = skip_space(text, position)
    if not text.startswith(_CLOSE, position):
        return None, position, f"{call.name}: the tool call is not closed by {_CLOSE}"
    return call, position + len(_CLOSE), None
