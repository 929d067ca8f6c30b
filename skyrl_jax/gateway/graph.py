"""The calls of a session as a tree: a call stands under the one whose answer its history continues.

Each call keeps only what it added: the messages and the prompt tokens after its parent's answer,
and its own completion. Calls know each other by number, so that a closed session leaves no cycle.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_jax.batching.sequences import AGENT
from skyrl_jax.core.types import Completion, Message
from skyrl_jax.gateway.matching import agreeing, likeness, mistakable


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One generation call that was answered.

    Args:
        number: in the order of the answers.
        parent: number of the call it continues; ``None``: it begins a tree.
        added: messages after the parent's answer, as the client sent them.
        delta: prompt tokens after the parent's completion.
        answer: what the completion was parsed to.
        depth: messages up to the answer, which is one of them.
        with_tools: whether it offered tools to the model.
        mark: "agent", or "aux" where the caller said so, or "lacking".
        fork: why a row begins here, "" where it goes on.
        children: numbers of the calls that continue it.
        used: its answer stands in the history of a call with other tools.
    """

    number: int
    parent: int | None
    added: tuple[Message, ...]
    delta: array[int]
    completion: Completion
    answer: Message
    depth: int
    with_tools: bool
    mark: str
    fork: str
    timings: Mapping[str, float]
    children: list[int] = field(default_factory=list)
    used: bool = False

    def at(self, position: int) -> Message | None:
        """Return the message at a position of the history, ``None`` outside of this call."""
        index = position - (self.depth - 1 - len(self.added))
        if index == len(self.added):
            return self.answer
        return self.added[index] if 0 <= index < len(self.added) else None


@dataclass(slots=True, kw_only=True)
class Match:
    """How far a history is known.

    Args:
        call: the deepest call whose history and answer it begins with; ``how`` that answer came
            back (gateway/matching.py).
        same: calls of exactly this history, in order.
        shared: how many of its messages agree with some call's; ``near`` is the latest such call.
    """

    call: Call | None = None
    how: str = ""
    same: list[Call] = field(default_factory=list)
    shared: int = 0
    near: Call | None = None


@dataclass(slots=True, kw_only=True)
class Graph:
    """All calls of a session."""

    calls: list[Call] = field(default_factory=list)

    def find(
        self, roots: Sequence[int], messages: tuple[Message, ...], start: Call | None = None
    ) -> Match:
        """Follow a history down from the given roots, or from a call that it is known to continue.

        The longest match wins, and of equals the latest.
        """
        match = Match(call=start, shared=start.depth if start else 0, near=start)
        todo = [start]
        while todo:
            above = todo.pop()
            for number in roots if above is None else above.children:
                child = self.calls[number]
                if self._try(child, messages, match):
                    todo.append(child)
        match.same.sort(key=lambda call: call.number)
        return match

    def goes_on(self, match: Match) -> bool:
        """Return whether a history continues a call that no work of the agent continued yet."""
        if match.call is None:
            return False
        return all(self.calls[number].mark != AGENT for number in match.call.children)

    def ambiguous(self, siblings: Sequence[int], call: Call) -> bool:
        """Return whether one history can go on from this call and from another of its parent."""
        ours = (*call.added, call.answer)
        others = (self.calls[number] for number in siblings)
        return any(all(map(mistakable, ours, (*other.added, other.answer))) for other in others)

    def path(self, call: Call) -> list[Call]:
        """Return the calls from the root down to this one."""
        path = [call]
        while path[-1].parent is not None:
            path.append(self.calls[path[-1].parent])
        return path[::-1]

    def _try(self, call: Call, messages: tuple[Message, ...], match: Match) -> bool:
        """Compare one call, whose parent the history continues; return whether it continues it."""
        answered = call.depth - 1
        start = answered - len(call.added)
        reached = start + agreeing(call.added, messages[start:answered])
        how = ""
        if reached == answered and reached == len(messages):
            match.same.append(call)
        elif reached == answered:
            how = likeness(call.answer, messages[reached])
            reached += bool(how)
        _note(match, call, reached)
        if how and (match.call is None or _rank(call) > _rank(match.call)):
            match.call, match.how = call, how
        return bool(how)


def _note(match: Match, call: Call, reached: int) -> None:
    """Remember the call that agrees longest with the history."""
    if match.near is None or (reached, call.number) > (match.shared, match.near.number):
        match.shared, match.near = reached, call


def _rank(call: Call) -> tuple[int, int]:
    return call.depth, call.number
