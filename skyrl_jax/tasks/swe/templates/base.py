"""What a function template is, the words that fill it, and helpers that draw test inputs.

A template is plain Python with placeholders: ``FN`` the function, ``L0`` a list, ``N0`` a number,
``S0`` a string, ``D0`` a table, ``E0`` a loop element, ``R0`` a result, ``I0`` a position, ``K0``
an integer literal, ``Q0`` a quoted character. Placeholders get different words in every rendering.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Short common words: with the words of the templates themselves they become single BPE tokens.
WORDS: dict[str, tuple[str, ...]] = {
    "L": ("items", "nums", "rows", "data", "vals", "cells", "parts", "marks"),
    "N": ("n", "k", "x", "size", "step", "limit", "low", "high", "width", "base"),
    "S": ("text", "word", "line", "name", "s", "msg", "label"),
    "D": ("table", "book", "stock", "pairs", "scores"),
    "E": ("v", "item", "cur", "val", "e", "key"),
    "R": ("total", "out", "best", "res", "count", "acc", "last", "found"),
    "I": ("i", "j", "pos", "at"),
}
QUOTES = (",", ":", "-", "=", ";", ".", "_", "/")
_SLOT = re.compile(r"\b(FN|[LNSDERIKQ]\d)\b")

Draw = Callable[[random.Random, Sequence[int], Sequence[str]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One small correct function.

    Args:
        name: of the template.
        names: function names it may get.
        source: text with placeholders.
        draw: (rng, integer literals, quoted characters) -> one tuple of arguments.
        ints: inclusive range of each integer literal ``K0, K1, ...``.
        unseen: kept out of training altogether.
    """

    name: str
    names: tuple[str, ...]
    source: str
    draw: Draw
    ints: tuple[tuple[int, int], ...] = field(default=())
    unseen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A rendered template: real source plus a source of inputs."""

    template: str
    name: str
    source: str
    draw: Callable[[random.Random], tuple[Any, ...]]


def render(template: Template, rng: random.Random, taken: frozenset[str] = frozenset()) -> Function:
    """Fill a template with words and literals.

    Args:
        template: what to fill.
        rng: the only source of chance.
        taken: function names that are used already in this repository.
    """
    slots = list(dict.fromkeys(_SLOT.findall(template.source)))
    names = [name for name in template.names if name not in taken] or list(template.names)
    ints = [rng.randint(low, high) for low, high in template.ints]
    quotes = rng.sample(QUOTES, 2)
    words = {"FN": rng.choice(names)}
    used = {words["FN"]}
    for slot in slots:
        kind, number = slot[0], slot[1:]
        if slot == "FN":
            continue
        if kind == "K":
            words[slot] = str(ints[int(number)])
        elif kind == "Q":
            words[slot] = f'"{quotes[int(number)]}"'
        else:
            words[slot] = rng.choice([word for word in WORDS[kind] if word not in used])
            used.add(words[slot])
    source = _SLOT.sub(lambda match: words[match.group(1)], template.source).strip() + "\n"
    return Function(
        template=template.name,
        name=words["FN"],
        source=source,
        draw=lambda r: template.draw(r, ints, quotes),
    )


def numbers(
    rng: random.Random, shortest: int = 0, longest: int = 5, low: int = 0, high: int = 9
) -> list[int]:
    """Return a short list of small integers."""
    return [rng.randint(low, high) for _ in range(rng.randint(shortest, longest))]


def word(rng: random.Random, shortest: int = 1, longest: int = 4, letters: str = "abcde") -> str:
    """Return a short word."""
    return "".join(rng.choice(letters) for _ in range(rng.randint(shortest, longest)))


def sentence(rng: random.Random, most: int = 3) -> str:
    """Return up to ``most`` short words (sometimes none)."""
    return " ".join(word(rng, 1, 3, "abc") for _ in range(rng.randint(0, most)))


def table(rng: random.Random, most: int = 3) -> dict[str, int]:
    """Return a small dictionary from letters to integers."""
    keys = rng.sample("abcde", rng.randint(0, most))
    return {key: rng.randint(0, 9) for key in keys}
