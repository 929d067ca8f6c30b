"""Reading the fields of a request body: every value is checked before anything else sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_jax.core.types import ToolCall
from skyrl_jax.gateway.bodies import Bodies
from skyrl_jax.gateway.refusals import Cause, Refused, invalid, unsupported
from skyrl_jax.gateway.strict import DECODER, decode

_LARGEST = 2**31


def read_json(raw: bytes, bodies: Bodies | None = None) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Args:
        raw: as it arrived.
        bodies: earlier ones of the session; the result is the same, what they had is not decoded.

    Raises:
        Refused: it is no UTF-8, no JSON (NaN and Infinity are none), no object, nested too deep, or
            a string in it is no text (half of a surrogate pair): no tokenizer could take it.
    """
    try:
        body = decode(raw) if bodies is None else bodies.read(raw)
    except RecursionError:
        raise Refused(Cause.MALFORMED, "the body is nested too deeply") from None
    except ValueError as error:  # UnicodeError is one too
        raise Refused(Cause.MALFORMED, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(Cause.MALFORMED, "the body must be a JSON object")
    return body


def parse_arguments(text: Any, param: str) -> dict[str, Any]:
    """Parse a call's arguments as clients send them: the text of a JSON object ("" is empty)."""
    if text is None or text == "":
        return {}
    if isinstance(text, str):
        try:
            value = DECODER.decode(text)
        except (ValueError, RecursionError):
            raise invalid(f"{param} must be the text of a JSON object", param) from None
        if isinstance(value, dict):
            return value
    raise invalid(f"{param} must be the text of a JSON object", param)


def dump_arguments(call: ToolCall) -> str:
    """Write a call's arguments as the text of a JSON object."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def required(body: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Return a field that must be there and be of ``kind``; ``where`` is the path before it."""
    value = body.get(name)
    if not isinstance(value, kind):
        found = "missing" if value is None else f"a {type(value).__name__}"
        path = f"{where}{name}"
        raise invalid(f"{path} must be a {_NAMES[kind]}; it is {found}", path)
    return value


_NAMES: dict[type, str] = {str: "string", list: "list", dict: "object"}


def items(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return a list of objects; absent or null is empty."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise invalid(f"{name} must be a list of objects", name)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean; absent or null is False."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false", name)
    return bool(value)


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """Return a finite number in [low, high]; absent or null is None."""
    value = body.get(name)
    if value is None:
        return None
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not low <= value <= high:  # NaN and the infinities are in no range
        raise invalid(f"{name} must be a number from {low:g} to {high:g}", name)
    return float(value)


def whole(body: Mapping[str, Any], name: str, low: int, high: int = _LARGEST) -> int | None:
    """Return an integer in [low, high]; absent or null is None."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(f"{name} must be a whole number of at least {low}", name)
    return value


def text(content: Any, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content: a string, null (empty), or a list of text parts.

    Parts are joined by a newline. A part of any other kind (an image, audio, a file) is refused:
    a text model never saw it, and training on a history without it would be training on another.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise invalid(f"{param} must be a string or a list of parts", param)
    return "\n".join([_part(part, f"{param}[{i}]", kinds) for i, part in enumerate(content)])


def _part(part: Any, param: str, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        raise invalid(f"{param} must be an object with a type", param)
    kind = part.get("type")
    if kind == "refusal":
        return str(required(part, "refusal", str, f"{param}."))
    if kind not in kinds:
        raise unsupported(
            f"{param} is of type {kind!r}; this model takes text only (parts of type "
            f"{', '.join(kinds)})",
            f"{param}.type",
        )
    return str(required(part, "text", str, f"{param}."))


def only_one(body: Mapping[str, Any]) -> None:
    """Refuse n other than 1: each sample would be a branch that the agent may drop."""
    count = whole(body, "n", 1)
    if count not in (None, 1):
        raise unsupported(f"n must be 1; it is {count}: ask once for each answer", "n")


def set_values(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return those of ``names`` that the client set."""
    return {name: body[name] for name in names if body.get(name) is not None}


def check_calls(seen: set[str], ident: Any, param: str, what: str) -> str:
    """Return the id of the call that a tool message answers; an unknown one is refused."""
    if not isinstance(ident, str) or not ident:
        raise invalid(f"{param} must name the call that the {what} answers", param)
    if ident not in seen:
        raise invalid(
            f"{param} is {ident!r}, but no tool call before it has this id: a {what} must "
            "answer a tool call of an assistant message before it",
            param,
        )
    return ident


def check_last(role: str, param: str) -> None:
    """Refuse a history that ends with the assistant's own words."""
    if role == "assistant":
        raise unsupported(
            f"{param}: the last message is the assistant's; a started answer cannot be continued "
            "here: end with a user or tool message",
            param,
        )
