"""A model's own chat template: messages and tools -> one text, as transformers renders it.

A template is foreign code. It runs in jinja2's sandbox with what transformers gives it: blocks
trimmed, ``tojson`` that leaves text as it is, ``raise_exception``, ``strftime_now``, loop controls
and the ``{% generation %}`` tag, which marks the assistant's part and changes no text here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import Message, ToolCall, ToolDef
from skyrl_jax.generation.renderer.chatml import ROLES

Dicts = list[dict[str, Any]]


class ChatTemplate:
    """A compiled template.

    Args:
        source: jinja2 text.
        specials: what the template may name, e.g. ``{"bos_token": "<s>", "eos_token": "</s>"}``.
        now: what ``strftime_now`` tells for the whole life of this value (default: now): a prompt
            must not change because midnight passed.

    Raises:
        ConfigError: ``source`` is no jinja2 template.

    Example: ``ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").render(
    [Message(role="user", content="hi")], generate=True) == "hi"``.
    """

    def __init__(
        self, source: str, *, specials: Mapping[str, str] | None = None, now: datetime | None = None
    ) -> None:
        """Compile once, and learn what form of arguments and reasoning the template reads."""
        self.source = source
        self.specials = dict(specials or {})
        try:
            self._template = _environment(now or datetime.now()).from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is no jinja2 template: {error}") from error
        self._reasoning_key = _reasoning_key(source)
        self._text_arguments = self._wants_text_arguments()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDef] = (),
        *,
        generate: bool,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: the conversation.
            tools: what the model is offered.
            generate: end with the head of the assistant's next turn.
            variables: whatever else the template reads, e.g. ``enable_thinking=False``.

        Raises:
            DataError: the template refuses these messages, or fails on them.
        """
        return self.render_dicts(
            self.dicts(messages), tool_dicts(tools), generate=generate, **variables
        )

    def render_dicts(
        self, messages: Dicts, tools: Dicts | None = None, *, generate: bool, **variables: Any
    ) -> str:
        """Return the text of messages that have the form templates read (see ``dicts``)."""
        values = self.specials | variables
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=generate,
                **values,
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # foreign code: anything may come out of it
            raise DataError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error

    def dicts(self, messages: Sequence[Message]) -> Dicts:
        """Return messages in the form templates read: OpenAI's, with arguments as objects.

        A call without an id gets one by its place, and a tool message without one answers the call
        of its place: some templates print them or look the name up by them.

        Raises:
            DataError: a role that no template knows.
        """
        made: Dicts = []
        names: list[tuple[str, str]] = []  # (id, name) of the calls not answered yet
        for message in messages:
            if message.role not in ROLES:
                raise DataError(f"message role {message.role!r} is none of {', '.join(ROLES)}")
            one: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "assistant":
                self._add_reasoning(one, message.reasoning)
                if message.tool_calls:
                    one["tool_calls"] = [
                        self._call(*item) for item in enumerate(message.tool_calls)
                    ]
                names = [
                    (call["id"], call["function"]["name"]) for call in one.get("tool_calls", ())
                ]
            elif message.role == "tool":
                one |= _answered(message.tool_call_id, names)
            made.append(one)
        return made

    def _call(self, place: int, call: ToolCall) -> dict[str, Any]:
        arguments: Any = dict(call.arguments)
        if self._text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "type": "function",
            "id": call.id or f"call{place:05d}",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _add_reasoning(self, one: dict[str, Any], reasoning: str | None) -> None:
        if reasoning is None:
            return
        if self._reasoning_key:
            one[self._reasoning_key] = reasoning
        elif reasoning and "</think>" in self.source:
            one["content"] = f"<think>\n{reasoning}\n</think>\n\n{one['content']}"

    def _wants_text_arguments(self) -> bool:
        """Whether calls can be rendered with arguments as JSON text alone (DeepSeek V3)."""
        call = ToolCall(name="f", arguments={"x": "y"})
        stub = (
            Message(role="user", content="u"),
            Message(role="assistant", content="a", tool_calls=(call,)),
        )
        for as_text in (False, True):
            self._text_arguments = as_text
            try:
                self.render(stub, generate=False)
            except DataError:
                continue
            return as_text
        return False


def tool_dicts(tools: Iterable[ToolDef]) -> Dicts:
    """Return tools in the form templates read."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


def _answered(call_id: str, names: list[tuple[str, str]]) -> dict[str, str]:
    """Return id and name of the call that a tool message answers, and take it off the list."""
    place = next((i for i, (known, _) in enumerate(names) if known == call_id), 0)
    if not names:
        return {"tool_call_id": call_id} if call_id else {}
    known, name = names.pop(place)
    return {"tool_call_id": call_id or known, "name": name}


def _reasoning_key(source: str) -> str:
    """Return the name under which a template reads an assistant's thinking ("": under none)."""
    for key in ("reasoning_content", "thinking", "reasoning"):
        if re.search(rf"\.{key}\b|['\"]{key}['\"]", source):
            return key
    return ""


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: the text inside, as a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - the form that jinja2 reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = now.strftime
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; jinja2's own filter would escape ``<``, ``>``, ``&`` and quotes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
