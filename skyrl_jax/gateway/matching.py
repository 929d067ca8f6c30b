"""Is the message a client sent the one that is stored? And if not, what did it change?

Clients replay their history with other tool-call ids, without reasoning, with the whitespace at the
edges of an answer cut. None of that is a change: the turn was sampled once and its stored tokens
stay. Other content, other calls, or reasoning that differs instead of being left out is one; so is
any other character in a message that the client wrote itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyrl_jax.core.types import Message

# How a replayed message is the stored one.
EXACT = "exact"
TRIMMED = "trimmed"  # but for whitespace at its edges
UNREASONED = "unreasoned"  # but for its reasoning, which was left out


def likeness(stored: Message, sent: Message) -> str:
    """Return how ``sent`` is ``stored``: EXACT, TRIMMED or UNREASONED; "" where it is another one.

    Ids of calls do not count; arguments compare as JSON values. A malformed call was told to the
    client as text and compares by that text. What was sent without reasoning and comes back with
    some is another message: the stored tokens do not hold it.
    """
    if stored is sent:
        return EXACT
    if stored.role != sent.role or stored.tool_calls != sent.tool_calls:
        return ""
    how = EXACT
    if stored.content != sent.content:
        if stored.role != "assistant" or stored.content.strip() != sent.content.strip():
            return ""
        how = TRIMMED
    ours, theirs = (stored.reasoning or "").strip(), (sent.reasoning or "").strip()
    if ours == theirs:
        return how
    return "" if theirs else UNREASONED


def mistakable(one: Message, other: Message) -> bool:
    """Return whether a client could send one message that is like both."""
    if one is other:
        return True
    bare = replace(other, reasoning=None)
    return bool(likeness(replace(one, reasoning=None), bare))


def agreeing(stored: Sequence[Message], sent: Sequence[Message]) -> int:
    """Return how many of the first messages of two lists are alike."""
    if stored == sent[: len(stored)]:  # one C loop, and identity alone where nothing was parsed
        return len(stored)
    count = 0
    for ours, theirs in zip(stored, sent, strict=False):
        if not likeness(ours, theirs):
            break
        count += 1
    return count
