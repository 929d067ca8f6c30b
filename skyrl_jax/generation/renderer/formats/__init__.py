"""What a model says, read from its text: reasoning, and tool calls in the form it was trained on.

hermes      <tool_call>{"name": ..., "arguments": {...}}</tool_call>  (Hermes, Qwen 2.5 and 3)
qwen_xml    <tool_call><function=NAME><parameter=KEY>...  (Qwen3-Coder, Qwen3.5, Nemotron 3)
llama_json  {"name": ..., "parameters": {...}} and nothing else  (Llama 3.1 and later)
openhands   <function=NAME><parameter=KEY>... documented in the scaffold's own prompt
"""

from __future__ import annotations

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.generation.renderer.formats import hermes, llama_json, openhands, qwen_xml
from skyrl_jax.generation.renderer.formats.common import CallFormat, Reading

CALL_FORMATS = {
    "hermes": CallFormat(read=hermes.read),
    "qwen_xml": CallFormat(read=qwen_xml.read),
    "llama_json": CallFormat(read=llama_json.read),
    "openhands": CallFormat(read=openhands.read, in_text=True),
}
REASONING_FORMATS = ("think", "none")

__all__ = [
    "CALL_FORMATS",
    "REASONING_FORMATS",
    "CallFormat",
    "Reading",
    "find_call_format",
    "guess_call_format",
]


def find_call_format(name: str) -> CallFormat | None:
    """Return the format of that name; "none" is ``None``: calls are not read.

    Raises:
        ConfigError: no such format.
    """
    if name == "none":
        return None
    if name not in CALL_FORMATS:
        raise ConfigError(f"call format {name!r} is none of {', '.join([*CALL_FORMATS, 'none'])}")
    return CALL_FORMATS[name]


def guess_call_format(source: str) -> str:
    """Return the call format that a chat template writes, or "none"."""
    if "<function=" in source:
        return "qwen_xml"
    if "<tool_call>" in source and "arguments" in source and "<arg_key>" not in source:
        return "hermes"
    if '"parameters": ' in source and "ipython" in source:
        return "llama_json"
    return "none"
