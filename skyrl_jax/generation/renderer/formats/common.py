"""What the readers of tool calls share: their result, JSON that is really JSON, typed values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_jax.core.types import ToolCall, ToolDef

_SPACE = re.compile(r"\s*")
_SHOWN = 60  # characters of a text that are quoted in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A model's words, read.

    ``content`` is the text beside the calls. ``problem`` says what is malformed; then there are no
    calls, and ``content`` is the whole text.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A form of tool calls.

    ``read(text, tools)`` never raises. ``in_text``: the scaffold documents the form in its own
    prompt, so calls stay in the content and the chat template is told of neither tools nor calls.
    """

    read: Callable[[str, Sequence[ToolDef]], Reading]
    in_text: bool = False


def skip_space(text: str, position: int) -> int:
    """Return the first position from ``position`` on that is no white space."""
    found = _SPACE.match(text, position)
    return found.end() if found else position


def join_content(pieces: Sequence[str]) -> str:
    """Join the text around calls; the newlines that templates put beside calls are layout."""
    kept = [piece.strip("\n") for piece in pieces[1:]]
    return "\n".join(piece for piece in [pieces[0].rstrip("\n"), *kept] if piece)


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """Read one JSON value that starts at ``position``.

    Returns:
        the value and the position behind it.

    Raises:
        ValueError: no JSON, a number that is not finite, text that is no Unicode, or nesting
            deeper than Python reads: such values could be neither compared nor sent on.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
    try:
        value, end = decoder.raw_decode(text, position)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a string is no Unicode text") from None
    return value, end


def make_call(value: Any, keys: Sequence[str]) -> ToolCall:
    """Make a call of a JSON object with "name" and one of ``keys`` for the arguments.

    Raises:
        ValueError: something is missing or of the wrong kind; the text says what.
    """
    if not isinstance(value, dict):
        raise ValueError("a tool call must be a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('a tool call needs "name", the name of a tool')
    given = [key for key in keys if key in value]
    if not given:
        raise ValueError(f'the call of {name[:_SHOWN]} needs "{keys[0]}", a JSON object')
    arguments = value[given[0]]
    if isinstance(arguments, str):  # a model that writes them as OpenAI's interface does
        arguments = read_json(arguments)[0]
    if not isinstance(arguments, dict):
        raise ValueError(f'"{given[0]}" of {name[:_SHOWN]} must be a JSON object')
    return ToolCall(name=name, arguments=arguments)


def typed(call: ToolCall, tools: Sequence[ToolDef]) -> ToolCall:
    """Give values that were written as text the kind that the tool's schema asks for.

    What does not fit stays text: the tool's owner says so better than we can.
    """
    schema = next((tool.parameters for tool in tools if tool.name == call.name), {})
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return call
    arguments = {key: _typed(value, properties.get(key)) for key, value in call.arguments.items()}
    return ToolCall(name=call.name, arguments=arguments, id=call.id)


def _typed(value: Any, schema: Any) -> Any:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(value, str) or not isinstance(kinds, list) or "string" in kinds:
        return value
    text = value.strip()
    if "boolean" in kinds and text in ("True", "False"):
        return text == "True"
    try:
        found, end = read_json(text)
    except ValueError:
        return value
    return found if end == len(text) else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is no number")
    return number
