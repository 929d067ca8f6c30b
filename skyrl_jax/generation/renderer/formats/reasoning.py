"""Tell a model's thinking from its answer: ``<think> ... </think>`` at the start of its words.

The generation prompt of some templates has opened the thought already; then the text begins inside
it, and one that is never closed is thinking to its end.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split(text: str, *, opened: bool) -> tuple[str | None, str]:
    r"""Return (reasoning, content); reasoning is ``None`` where there is none.

    Newlines at the edges of both are layout.
    Example: ``split("<think>\nhm\n</think>\n\nyes", opened=False) == ("hm", "yes")``.

    Args:
        text: the model's words.
        opened: the generation prompt ends inside a thought.
    """
    words = text.lstrip()
    if not opened and not words.startswith(OPEN):
        return None, text
    inside = words.removeprefix(OPEN) if words.startswith(OPEN) else text
    thought, _, content = inside.partition(CLOSE)
    return thought.strip("\n"), content.lstrip("\n")
