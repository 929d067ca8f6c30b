"""Why does a history not simply go on? The causes by which forks are counted.

retry       the same history, sampled again
branch      back to an earlier turn of ours, and on from there otherwise
system      another system message before the same opening
tools       the same history with other tools (they are part of the prompt)
reasoning   an answer of ours came back with other reasoning
content     an answer of ours came back with other text or other calls
compaction  something else stands where an answer of ours was, from which the agent had gone on
rejected    the same of an answer from which nothing went on: the agent asks again, with a complaint
edit        an earlier message of the client's own was changed
new         nothing of ours is in it: a sub-agent, or a history that was summed up as a whole

They are in the counts of a session, in the turns, and in the metrics (forks/CAUSE).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skyrl_jax.core.types import Message
from skyrl_jax.gateway.graph import Call, Match
from skyrl_jax.gateway.matching import likeness


def cause(
    history: tuple[Message, ...], match: Match, other: Match, openings: Iterable[Call]
) -> str:
    """Return why a row begins where a history does not go on from the end of a known one.

    Args:
        history: what the client sent.
        match: how far it is known among the calls with the same tools.
        other: the same among the calls with other tools.
        openings: the calls that begin a tree, with the same tools.
    """
    if match.same:
        return "retry"
    if other.shared > max(match.shared, _systems(history)):
        return "tools"
    changed = _change(history, match)
    if changed != "new" or match.shared:
        return changed
    return "system" if any(_system_changed(call.added, history) for call in openings) else "new"


def _change(history: tuple[Message, ...], match: Match) -> str:
    """Look at the place where the history leaves the stored one."""
    went_back = "new" if match.call is None else "branch"
    near, at = match.near, match.shared
    stored = None if near is None else near.at(at)
    if near is None or stored is None or at >= len(history):
        return went_back
    if stored is near.answer:
        return _answer_change(stored, history[at], continued=bool(near.children))
    following = near.at(at + 1)
    if following is None or at + 1 >= len(history) or not likeness(following, history[at + 1]):
        return went_back
    return "system" if stored.role == "system" else "edit"


def _answer_change(stored: Message, sent: Message, *, continued: bool) -> str:
    """Tell apart what became of an answer of ours."""
    if sent.role != stored.role:
        return "compaction" if continued else "rejected"
    same_text = stored.content.strip() == sent.content.strip()
    return "reasoning" if same_text and stored.tool_calls == sent.tool_calls else "content"


def _system_changed(stored: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Return whether two openings go on alike after their system messages."""
    ours, theirs = stored[_systems(stored) :], sent[_systems(sent) :]
    return bool(ours and theirs and likeness(ours[0], theirs[0]))


def _systems(messages: Sequence[Message]) -> int:
    """Count the system messages at the beginning."""
    roles = [message.role for message in messages]
    return next((at for at, role in enumerate(roles) if role != "system"), len(roles))
