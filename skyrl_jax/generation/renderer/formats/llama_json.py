"""Tool calls of Llama 3.1 and later: the whole answer is a JSON object.

    {"name": "bash", "parameters": {"command": "ls"}}

Several are separated by ``;``. The tag ``<|python_tag|>`` may stand before. An answer that is some
other JSON is an answer, not a malformed call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyrl_jax.core.types import ToolCall, ToolDef
from skyrl_jax.generation.renderer.formats.common import Reading, make_call, read_json, skip_space

_TAG = "<|python_tag|>"
_CALL = re.compile(r'\{\s*"name"\s*:')


def read(text: str, tools: Sequence[ToolDef]) -> Reading:
    """Read the calls of an answer that begins like one."""
    del tools
    body = text.strip().removeprefix(_TAG).strip()
    if not _CALL.match(body):
        return Reading(content=text)
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        try:
            value, position = read_json(body, position)
            calls.append(make_call(value, ("parameters", "arguments")))
        except ValueError as error:
            return Reading(content=text, problem=f"the tool call cannot be read: {error}")
        position = skip_space(body, position)
        if body.startswith(";", position):
            position = skip_space(body, position + 1)
        elif position < len(body):
            return Reading(content=text, problem="there is text after the tool call")
    return Reading(content="", calls=tuple(calls))
