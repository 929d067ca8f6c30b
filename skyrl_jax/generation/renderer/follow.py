r"""What a template writes after an assistant turn, at the cost of the new messages alone.

    [user, assistant SENTINEL, new messages ...] rendered with a generation prompt:

    ... SENTINEL</call>  <|im_end|>  \n<|im_start|>user\n<tool_response> ... <|im_start|>assistant
                         ^ end of turn   ^ what follows: the delta

A short conversation stands for the long one. That holds only for templates that write new messages
the same way whatever came before; it is tried at the start, and other templates are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import Message, ToolCall, ToolDef
from skyrl_jax.generation.renderer.encode import Encoder, alternatives
from skyrl_jax.generation.renderer.template import ChatTemplate, tool_dicts

_CALL = ToolCall(name="tool", arguments={})
_NEWEST = "newest words"
_USER = Message(role="user", content=_NEWEST)
_TOOL = Message(role="tool", content=_NEWEST)
_SAMPLE_TOOL = ToolDef(name="tool", description="A tool.", parameters={"type": "object"})


class Follow:
    """Renders what follows an assistant turn.

    Args:
        template: the model's.
        encoder: guards other people's text.
        variables: of the template.
        stop_tokens: special tokens at which the engine stops, as text: the tokenizer's end of
            sequence and what generation_config.json names.

    Raises:
        ConfigError: the template does not mark the end of an assistant turn by a special token, or
            what it writes after one depends on the conversation before.
    """

    def __init__(
        self,
        template: ChatTemplate,
        encoder: Encoder,
        *,
        variables: Mapping[str, Any],
        stop_tokens: Sequence[str],
    ) -> None:
        """Find out what ends a turn and whether the template can be used this way."""
        self._template = template
        self._encoder = encoder
        self._variables = dict(variables)
        self.ends = self._find_ends(stop_tokens)
        self.end_pattern = alternatives(self.ends)
        self._needs_tools = False
        self._check_user()
        self.tool_problem = self._find_tool_problem()
        self._needs_tools = self._depends_on_tools()

    def text(
        self, messages: Sequence[Message], after: Message | None, tools: Sequence[ToolDef] = ()
    ) -> tuple[str, str]:
        """Return what follows, from the end-of-turn token on, and its mark (see encode.py).

        Args:
            messages: the new ones; the last may be any but the one that is to be generated.
            after: what the turn was parsed to, for the names of its calls.
            tools: what the model is offered.

        Raises:
            DataError: the template refuses these messages.
        """
        if self.tool_problem and any(message.role == "tool" for message in messages):
            raise DataError(self.tool_problem)
        first_error: DataError | None = None
        for calls in _stubs(after, messages):
            try:
                return self._text(calls, messages, tools if self._needs_tools else ())
            except DataError as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _text(
        self,
        calls: Sequence[ToolCall],
        messages: Sequence[Message],
        tools: Sequence[ToolDef] = (),
        history: Sequence[Message] = (),
    ) -> tuple[str, str]:
        tail, mark = self._tail(calls, messages, tools, history)
        found = self.end_pattern.search(tail)
        if found is None:
            raise DataError(
                f"the chat template ends this assistant turn by none of {', '.join(self.ends)}"
            )
        return tail[found.start() :], mark

    def _tail(
        self,
        calls: Sequence[ToolCall],
        messages: Sequence[Message],
        tools: Sequence[ToolDef] = (),
        history: Sequence[Message] = (),
    ) -> tuple[str, str]:
        """Return what the template writes behind an assistant's last words, and the mark."""
        sentinel = _unused(messages)
        spoken = tuple(
            ToolCall(name=call.name, arguments={"x": sentinel}, id=call.id) for call in calls
        )
        turn = Message(role="assistant", content=sentinel, tool_calls=spoken)
        conversation = (*(history or (_USER,)), turn, *messages)
        dicts, mark = self._encoder.guard(self._template.dicts(conversation))
        text = self._template.render_dicts(
            dicts, tool_dicts(tools), generate=True, **self._variables
        )
        place = text.rfind(sentinel)
        if place < 0:
            raise DataError("the chat template leaves out what the assistant said before")
        return text[place + len(sentinel) :], mark

    def _find_ends(self, stop_tokens: Sequence[str]) -> tuple[str, ...]:
        """Return the tokens that end an assistant turn: before a user's, after calls, at eos."""
        known = [token for token in stop_tokens if self._encoder.pattern.fullmatch(token)]
        ends: list[str] = []
        for calls, message in (((), _USER), ((_CALL,), _TOOL)):
            try:
                tail, _ = self._tail(calls, (message,))
            except DataError as error:
                if message is _USER:
                    raise ConfigError(
                        f"the chat template cannot continue after an assistant turn: {error}"
                    ) from error
                continue  # no tools in this template: said by tool_problem
            # the end of a turn before the new words; a call may close by a token of its own first
            tail = tail.partition(_NEWEST)[0]
            found = alternatives([*known, *ends]).search(tail) or self._encoder.pattern.search(tail)
            if found is None:
                raise ConfigError(
                    "the chat template does not end an assistant turn by a special token of the "
                    f"tokenizer: after the assistant's words comes {tail[:80]!r}"
                )
            ends.append(found[0])
        return tuple(dict.fromkeys([*ends, *known]))

    def _check_user(self) -> None:
        """Compare a user's message after one turn and after two."""
        history = (_USER, Message(role="assistant", content="two"), _USER)
        try:
            short, long = (
                self._text((), (_USER,), history=before)[0] for before in ((_USER,), history)
            )
        except DataError as error:
            raise ConfigError(
                f"the chat template cannot be continued turn by turn: {error}"
            ) from error
        if short != long:
            raise ConfigError(_differs("a user's message", short, long))

    def _find_tool_problem(self) -> str:
        """Compare tool messages after one turn with calls and after two ("": they are equal)."""
        history = (
            _USER,
            Message(role="assistant", content="two", tool_calls=(_CALL,)),
            Message(role="tool", content="three"),
        )
        try:
            short, long = (
                self._text((_CALL,), (_TOOL,), history=before)[0] for before in ((_USER,), history)
            )
        except DataError as error:
            return f"the chat template has no tools: {error}"
        if _NEWEST not in short:  # Phi-3 drops it, Gemma 4 puts it before the assistant's words
            return f"behind a call the chat template writes {short[:200]!r}, not the tool's result"
        return "" if short == long else _differs("a tool's message", short, long)

    def _depends_on_tools(self) -> bool:
        """Whether what follows a turn is another text when tools are offered."""
        for calls, message in (((), _USER), ((_CALL,), _TOOL)):
            try:
                if self._text(calls, (message,)) != self._text(calls, (message,), (_SAMPLE_TOOL,)):
                    return True
            except DataError:
                continue
        return False


def _stubs(after: Message | None, messages: Sequence[Message]) -> Iterator[tuple[ToolCall, ...]]:
    """Yield the calls that the stub turn may make, until the template takes one."""
    calls = after.tool_calls if after is not None else ()
    yield calls
    if len(calls) > 1:
        yield calls[:1]  # templates of one call a turn
    if not calls and any(message.role == "tool" for message in messages):
        yield (_CALL,)  # a malformed call, answered by a tool message


def _unused(messages: Sequence[Message]) -> str:
    """Return a word that is in none of the messages."""
    number = 0
    while any(f"sentinel-{number}" in _words(message) for message in messages):
        number += 1
    return f"sentinel-{number}"


def _words(message: Message) -> str:
    calls = "".join(f"{call.name}{dict(call.arguments)}" for call in message.tool_calls)
    return f"{message.content}{message.reasoning}{calls}"


def _differs(what: str, short: str, long: str) -> str:
    return (
        f"the chat template writes {what} after the first assistant turn as {short[:200]!r} and "
        f"after the second as {long[:200]!r}: prompts cannot be continued from stored tokens"
    )
