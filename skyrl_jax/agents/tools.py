"""The tools of the CodeAct scaffold: names, parameters, and the text a large model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_jax.core.types import ToolCall, ToolDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a tool. ``default`` None = required; ``choices`` () = free text."""

    name: str
    doc: str
    default: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool the model may call. Example: ``ToolSpec(name="submit", doc="...", parameters=())``."""

    name: str
    doc: str
    parameters: tuple[Parameter, ...] = ()


BASH = ToolSpec(
    name="bash",
    doc="Run a command in a shell of the sandbox and read its output. There is no network.",
    parameters=(Parameter(name="command", doc="The command line to run."),),
)
EDITOR = ToolSpec(
    name="str_replace_editor",
    doc=(
        "View, create and edit text files. old_str must occur exactly once in the file; it is "
        "replaced by new_str."
    ),
    parameters=(
        Parameter(
            name="command",
            doc="What to do.",
            default="str_replace",
            choices=("view", "create", "str_replace", "insert"),
        ),
        Parameter(name="path", doc="The file, relative to the repository root or absolute."),
        Parameter(name="old_str", doc="str_replace: the text to replace.", default=""),
        Parameter(name="new_str", doc="str_replace, insert: the new text.", default=""),
        Parameter(name="file_text", doc="create: the content of the new file.", default=""),
        Parameter(name="insert_line", doc="insert: the line after which to insert.", default=""),
        Parameter(name="view_range", doc="view: two line numbers, e.g. [1, 40].", default=""),
    ),
)
SUBMIT = ToolSpec(name="submit", doc="End the work. The changes made to the repository are graded.")
TOOLS = (BASH, EDITOR, SUBMIT)


def check_call(call: ToolCall, tools: Sequence[ToolSpec] = TOOLS) -> str | None:
    """Say what is wrong with a call, or return ``None``."""
    spec = next((tool for tool in tools if tool.name == call.name), None)
    if spec is None:
        return f"unknown tool {call.name!r}; tools: {', '.join(tool.name for tool in tools)}"
    known = {parameter.name: parameter for parameter in spec.parameters}
    for name in call.arguments:
        if name not in known:
            return f"{call.name} has no parameter {name!r}; it has: {', '.join(known) or 'none'}"
    for parameter in spec.parameters:
        value = call.arguments.get(parameter.name, parameter.default)
        if value is None:
            return f"{call.name} needs the parameter {parameter.name!r}"
        if parameter.choices and value not in parameter.choices:
            return (
                f"{call.name}: {parameter.name} is {value!r}; it must be one of "
                f"{', '.join(parameter.choices)}"
            )
    return None


def format_call(name: str, arguments: Mapping[str, str]) -> str:
    """Write a call in the text form that parsing.py reads."""
    inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{inner}</function>"


def system_prompt(tools: Sequence[ToolSpec] = TOOLS) -> str:
    """Return the system message of the "full" prompt style: the rules and every tool."""
    parts = [
        "You are a programmer who repairs a repository with tools. Call one tool per answer, in "
        "this form, and write nothing after it:",
        format_call("tool_name", {"parameter_name": "value"}),
        "The tools:",
        *(_describe(tool) for tool in tools),
    ]
    return "\n\n".join(parts)


def _describe(tool: ToolSpec) -> str:
    lines = [f"{tool.name}: {tool.doc}"]
    for parameter in tool.parameters:
        need = "required" if parameter.default is None else f"default {parameter.default!r}"
        choices = f" One of: {', '.join(parameter.choices)}." if parameter.choices else ""
        lines.append(f"  - {parameter.name} ({need}): {parameter.doc}{choices}")
    return "\n".join(lines)


def specs_of(tools: Sequence[ToolDef]) -> tuple[ToolSpec, ...]:
    """Return a client's tools as our parser knows them: their names and what they need."""
    return tuple(
        ToolSpec(
            name=tool.name,
            doc=tool.description,
            parameters=tuple(
                Parameter(
                    name=name,
                    doc="",
                    default=None if name in (tool.parameters.get("required") or ()) else "",
                )
                for name in (tool.parameters.get("properties") or {})
            ),
        )
        for tool in tools
    )
