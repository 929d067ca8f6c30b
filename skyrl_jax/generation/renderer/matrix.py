"""Which parts of a chat template are append-only: one verdict per column.

    tool             [system, user, assistant + call, tool, assistant, user, assistant]
    think_tool       a tool loop with reasoning on every assistant turn
    think_user       an assistant turn with reasoning, then a user's message
    user_after_tool  a tool loop with reasoning, then a user's message
    ws               an assistant's content with white space at its edges
    par              two tool messages rendered one at a time against together: "same" or "DIFF"
    args             arguments of a call as an object against as JSON text: "same" or "DIFF"

P@k: the prompt of an earlier assistant turn is no prefix of the prompt of the one at index k.
H@k: the assistant message k is written in one way as the last message, in another as history.
"raises": the template refuses such messages. Prompts are compared as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from skyrl_jax.core.errors import DataError

Dicts = list[dict[str, Any]]
Render = Callable[[Dicts, bool], str]  # (messages, with generation prompt) -> text

COLUMNS = ("tool", "think_tool", "think_user", "user_after_tool", "ws", "par", "args")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cell: ``value`` ("ok", "P@4", ...), and the two texts that differ (or the refusal)."""

    value: str
    one: str = ""
    other: str = ""


def check_template(render: Render) -> dict[str, Verdict]:
    """Return a verdict for each of ``COLUMNS``.

    Args:
        render: raw messages (OpenAI's form) and whether a generation prompt follows -> text;
            raises ``DataError`` where the template refuses them.
    """
    checks: Mapping[str, Callable[[Render], Verdict]] = {
        "par": _check_parallel,
        "args": _check_arguments,
    }
    found: dict[str, Verdict] = {}
    for name in COLUMNS:
        try:
            check = checks.get(name)
            found[name] = check(render) if check else _check_history(render, _histories()[name])
        except DataError as error:
            found[name] = Verdict("raises", str(error))
    return found


def describe(name: str, value: str) -> str:
    """Say what training does about a verdict."""
    if value == "raises":
        return _RAISES[name]
    if name == "par":
        return "the results of one turn are rendered together, as one group"
    if name == "args":
        return "arguments are given to the template as objects, never as text"
    if value == "ok":
        return "append-only: stored tokens + new messages = the conversation rendered at once"
    if value.startswith("P"):
        return (
            "the template rewrites an earlier turn; a replayed turn stays as it was sampled: one "
            "row, and the model goes on seeing what it said"
        )
    return (
        "the template writes an answer otherwise once it is history; a replayed turn stays as it "
        "was sampled: one row"
    )


def summary(verdicts: Mapping[str, Verdict]) -> str:
    """Return one line for a log: ``tool ok, think_tool ok, ws P@4, ...``."""
    return ", ".join(f"{name} {verdict.value}" for name, verdict in verdicts.items())


_NO_TOOLS = "the template has no such messages: agents with tools are refused at the start"
_RAISES = {
    "tool": _NO_TOOLS,
    "think_tool": _NO_TOOLS,
    "think_user": "the template refuses such messages: a session that sends them gets an error",
    "user_after_tool": _NO_TOOLS,
    "ws": "the template refuses such messages: a session that sends them gets an error",
    "par": "the template refuses several calls in one turn; their results are still appended",
    "args": "one form of arguments is refused; training gives objects (text where only that works)",
}


def _check_history(render: Render, messages: Dicts) -> Verdict:
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = {place: render(messages[:place], True) for place in places}
    broken = [
        (later, earlier)
        for earlier, later in combinations(places, 2)
        if not prompts[later].startswith(prompts[earlier])
    ]
    if broken:
        later, earlier = min(broken)
        return Verdict(f"P@{later}", prompts[earlier], prompts[later])
    for place, later in pairwise(places):
        last = render(messages[: place + 1], False)
        if not prompts[later].startswith(last):
            return Verdict(f"H@{place}", last, prompts[later])
    return Verdict("ok")


def _check_parallel(render: Render) -> Verdict:
    """Compare a second result's text behind a first one's with the text it has alone."""
    start: Dicts = [_SYSTEM, _USER, _assistant("A1", calls=2)]
    first, second = _tool("RESULT-1", 0), _tool("RESULT-2", 1)
    alone, together = render([*start, first], False), render([*start, first, second], False)
    if alone == together:  # the template leaves tool messages out
        return Verdict("same")
    added = together[len(alone) :]
    before = render([*start, second], False).removesuffix(added)
    # what is before a lone result must be what is before any other message
    answered = render([*start, {"role": "user", "content": "U2"}], False)
    same = together == alone + added and answered.startswith(before)
    same = same and alone == before + added.replace("RESULT-2", "RESULT-1")
    return Verdict("same" if same else "DIFF", alone, together)


def _check_arguments(render: Render) -> Verdict:
    texts = [
        render([_SYSTEM, _USER, _assistant("A1", calls=1, as_text=as_text), _tool("T1", 0)], True)
        for as_text in (False, True)
    ]
    return Verdict("same" if texts[0] == texts[1] else "DIFF", *texts)


def _histories() -> dict[str, Dicts]:
    start: Dicts = [_SYSTEM, _USER]
    call = _assistant("A1", calls=1)
    thought_call = _assistant("A1", calls=1, reasoning="R1")
    thought = _assistant("A2", reasoning="R2")
    thought_more = _assistant("A2", calls=1, reasoning="R2")
    last = _assistant("A3", reasoning="R3")
    tool, more = _tool("T1", 0), {"role": "user", "content": "U2"}
    return {
        "tool": [*start, call, tool, _assistant("A2"), more, _assistant("A3")],
        "think_tool": [*start, thought_call, tool, thought_more, _tool("T2", 0), last],
        "think_user": [*start, thought, more, last],
        "user_after_tool": [*start, thought_call, tool, thought, more, last],
        "ws": [*start, _assistant("  A1 \n\n"), more, _assistant("A2")],
    }


_SYSTEM = {"role": "system", "content": "S"}
_USER = {"role": "user", "content": "U1"}
_ARGUMENTS = {"command": "ls", "limit": 3}


def _assistant(
    content: str, *, calls: int = 0, reasoning: str | None = None, as_text: bool = False
) -> dict[str, Any]:
    arguments: Any = dict(_ARGUMENTS)
    if as_text:  # as clients send them
        arguments = json.dumps(arguments, separators=(",", ":"))
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = [_call(number, arguments) for number in range(calls)]
    return made


def _call(number: int, arguments: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": arguments}
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def _tool(content: str, number: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "name": "bash",
        "tool_call_id": f"call{number:05d}",
        "content": content,
    }


def difference(one: str, other: str, *, around: int = 60) -> Sequence[str]:
    """Return where two texts part, as two short pieces of text."""
    place = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return [repr(text[max(0, place - around) : place + around]) for text in (one, other)]
