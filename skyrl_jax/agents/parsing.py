"""Read tool calls in the function-call text form of OpenHands.

    <function=NAME>
    <parameter=KEY>VALUE</parameter>
    </function>

A value ends at the first ``</parameter>`` that is followed by another parameter or by the end of
the call, so it may itself contain any markup but that. One newline at each edge of a value is
layout, not value. What cannot be read becomes ``Message.error``, which goes back to the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyrl_jax.agents.tools import TOOLS, ToolSpec, check_call
from skyrl_jax.core.types import Message, ToolCall

OPEN = re.compile(r"<function=([^<>\n]*)>")
_NEXT = re.compile(r"\s*(?:<parameter=([^<>\n]*)>|(</function>))")
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_SHOWN = 40  # characters of a name the model made up

NO_CALL = "error: no tool call"
LENGTH_CUT = "error: answer too long, not run"


def parse_assistant(text: str, length_cut: bool, tools: Sequence[ToolSpec] = TOOLS) -> Message:
    """Return the assistant message of a completion's text, with its calls or its error.

    ``length_cut``: the completion ran into its token limit; whatever it holds is not run, and the
    model is told so instead of "no tool call" (it could not know).
    """
    if length_cut:
        return Message(role="assistant", content=text, error=LENGTH_CUT)
    calls, malformed = read_calls(text)
    problems = [call_problem(call, tools) for call in calls]
    problem = next((found for found in [*problems, malformed] if found), None)
    if problem:
        return Message(role="assistant", content=text, error=f"error: {problem}")
    if not calls:
        return Message(role="assistant", content=text, error=NO_CALL)
    return Message(role="assistant", content=text, tool_calls=calls)


def call_problem(call: ToolCall, tools: Sequence[ToolSpec] = TOOLS) -> str | None:
    """Say what is wrong with a call, with names that the model made up cut short, or ``None``."""
    return check_call(_shown(call), tools)


def read_calls(text: str) -> tuple[tuple[ToolCall, ...], str | None]:
    """Return the calls of ``text`` up to the first malformed one, and what is wrong with that."""
    calls: list[ToolCall] = []
    position = 0
    while opened := OPEN.search(text, position):
        call, position, problem = read_call(text, opened)
        if problem:
            return tuple(calls), problem
        calls.append(call)
    return tuple(calls), None


def read_call(text: str, opened: re.Match[str]) -> tuple[ToolCall, int, str | None]:
    """Read one call; return it, the position after it, and what is wrong with it.

    Args:
        text: the whole text.
        opened: where ``OPEN`` matched in it.
    """
    name = opened.group(1).strip()
    arguments: dict[str, str] = {}
    position = opened.end()
    problem: str | None = None
    while problem is None:
        found = _NEXT.match(text, position)
        if found is None:
            problem = f"{name[:_SHOWN]}: expected <parameter=...> or </function>"
        elif found.group(2):
            return ToolCall(name=name, arguments=arguments), found.end(), None
        else:
            key = found.group(1).strip()
            end = _VALUE_END.search(text, found.end())
            if end is None:
                problem = (
                    f"{name[:_SHOWN]}: parameter {key[:_SHOWN]!r} is not closed by </parameter>"
                )
            elif key in arguments:
                problem = f"{name[:_SHOWN]}: parameter {key[:_SHOWN]!r} is given twice"
            else:
                value = text[found.end() : end.start()]
                arguments[key] = value.removeprefix("\n").removesuffix("\n")
                position = end.end()
    return ToolCall(name=name, arguments=arguments), position, problem


def _shown(call: ToolCall) -> ToolCall:
    """Return the call with made-up names cut short: they are quoted in what the model is told."""
    arguments = {key[:_SHOWN]: value for key, value in call.arguments.items()}
    return ToolCall(name=call.name[:_SHOWN], arguments=arguments)
