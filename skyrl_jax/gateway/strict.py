"""JSON as every client reads it: UTF-8, finite numbers, strings that are text."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large a number")
    return value


# NaN and Infinity are Python's extension of JSON: no other client could read them again
DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def decode(raw: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no UTF-8, no JSON, or a string in it is half of a surrogate pair, which no
            tokenizer could take.
        RecursionError: it is nested too deep.
    """
    text = raw.decode("utf-8")
    value = DECODER.decode(text)
    check_text(text, value)
    return value


def check_text(text: str, value: Any) -> None:
    """Refuse halves of surrogate pairs in a decoded value; ``text`` is what it was decoded from.

    Raises:
        ValueError: there is one.
    """
    if _SURROGATE.search(text):  # only an escape can make one: UTF-8 has none
        json.dumps(value, ensure_ascii=False).encode("utf-8")
