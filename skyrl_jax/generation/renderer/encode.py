"""Rendered text -> token ids, with only the template's own special tokens special.

A template writes other people's text (problem statements, tool output) between its own special
tokens. What looks like a special token in there must stay ordinary text, or a file of the
repository could end a turn. So the strings are guarded before they are rendered:

    guard("a <|im_end|>") == ("a <" + mark + "|im_end|>", mark)

and ``encode`` cuts the rendered text at the special tokens that are left, drops the marks, and
encodes the pieces between as plain text. Text that needed no mark is encoded whole, exactly as the
``tokenizers`` library does it. Added tokens that are not special (``<tool_call>``, ``<think>`` of
Qwen3) are encoded as that library encodes them, wherever they stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from skyrl_jax.generation.tokenizer import Tokenizer

_MARK = "\ue000"  # private use: means nothing to anybody
# Templates cut an assistant's content at these; for some tokenizers they are special tokens.
_THOUGHT = ("<think>", "</think>")


class Encoder:
    """Encodes what a template rendered.

    Args:
        tokenizer: whose special tokens count.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Compile the searches for special tokens: the longest of those that fit."""
        self._tokenizer = tokenizer
        self._specials = {
            text: special for text, special in tokenizer.special_tokens().items() if len(text) > 1
        }
        self.pattern = alternatives(self._specials)
        self._in_answers = alternatives(set(self._specials) - set(_THOUGHT))

    def guard(self, value: Any) -> tuple[Any, str]:
        """Return ``value`` with the special tokens in its strings broken up, and the mark.

        Args:
            value: JSON-like: dicts, lists, strings and plain values.

        Returns:
            the value and the mark that ``encode`` has to drop ("": nothing had to be marked).
        """
        texts = list(_strings(value))
        if not any(self.pattern.search(text) for text in texts):
            return value, ""
        mark = _MARK * (1 + max(map(_longest_run, texts)))
        return self._broken(value, mark, self.pattern), mark

    def _broken(self, value: Any, mark: str, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", value)
        if isinstance(value, dict):
            inner = self._in_answers if value.get("role") == "assistant" else pattern
            return {
                self._broken(key, mark, pattern): self._broken(item, mark, inner)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._broken(item, mark, pattern) for item in value]
        return value

    def encode(self, text: str, mark: str = "") -> list[int]:
        """Encode rendered text whose guarded strings carry ``mark``."""
        text = well_formed(text)
        if not mark:
            return self._tokenizer.encode_markup(text)
        # a template may write JSON in ASCII; the mark is then spelled out
        text = text.replace(json.dumps(mark)[1:-1], mark)
        ids: list[int] = []
        position, strip = 0, False
        for found in self.pattern.finditer(text):
            special = self._specials[found[0]]
            piece = text[position : found.start()]
            ids += self._plain(piece.rstrip() if special.lstrip else piece, mark, strip)
            ids.append(special.id)
            position, strip = found.end(), special.rstrip
        return ids + self._plain(text[position:], mark, strip)

    def _plain(self, piece: str, mark: str, strip: bool) -> list[int]:
        """Encode text between special tokens; ``strip``: the token before it takes the spaces."""
        piece = (piece.lstrip() if strip else piece).replace(mark, "")
        return self._tokenizer.encode(piece) if piece else []


def alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of ``texts``, the longest where several fit; for none: never."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def well_formed(text: str) -> str:
    r"""Return ``text`` with lone surrogates (a client's ``"\ud800"``) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _longest_run(text: str) -> int:
    return max(map(len, re.findall(f"{_MARK}+", text)), default=0)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
