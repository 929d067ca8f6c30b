"""The Renderer of a model with its own chat template.

    initial(messages) = encode(template(messages, tools) + generation prompt)
    next prompt       = stored ids (sampled ids as they were) + delta(new messages)

Where a template is append-only and a completion re-encodes to itself, the ids so built equal those
of the whole conversation rendered at once. Where a template would rewrite what came before (drop
old thinking, trim), the stored ids stay: the model sees what it said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_jax.agents.parsing import LENGTH_CUT, NO_CALL
from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import Message, ToolCall, ToolDef
from skyrl_jax.generation.renderer.encode import Encoder
from skyrl_jax.generation.renderer.follow import Follow
from skyrl_jax.generation.renderer.formats import REASONING_FORMATS, find_call_format, reasoning
from skyrl_jax.generation.renderer.template import ChatTemplate, Dicts, tool_dicts
from skyrl_jax.generation.tokenizer import Tokenizer

_OPENING = (Message(role="user", content="one"),)


class TemplateRenderer:
    """Messages <-> token ids by a chat template.

    Args:
        template: the model's.
        tokenizer: the model's.
        tools: what the model is offered.
        call_format: how it writes tool calls: "hermes", "qwen_xml", "llama_json", "openhands" or
            "none" (formats/).
        reasoning_format: "think" or "none".
        variables: of the template, e.g. ``{"enable_thinking": False}``.
        stop_tokens: end-of-sequence tokens as text; those that end a turn are found besides.
        expect_calls: calls are read also where no tools are offered (the scaffold's prompt
            documents them), and an answer without one is an error.
        check: says what is wrong with a call that could be read, or ``None``, for a scaffold that
            takes checked calls alone.

    Raises:
        ConfigError: an unknown format, a template that cannot be continued turn by turn, or tools
            for one that has none.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[ToolDef] = (),
        call_format: str,
        reasoning_format: str,
        variables: Mapping[str, Any] | None = None,
        stop_tokens: Sequence[str] = (),
        expect_calls: bool = False,
        check: Callable[[ToolCall], str | None] | None = None,
    ) -> None:
        """Try the template and find what ends a turn; ``with_tools`` does not do it again."""
        if reasoning_format not in REASONING_FORMATS:
            raise ConfigError(
                f"reasoning format {reasoning_format!r} is none of {', '.join(REASONING_FORMATS)}"
            )
        self.template = template
        self.tokenizer = tokenizer
        self.tools: tuple[ToolDef, ...] = ()
        self.call_format = call_format
        self._format = find_call_format(call_format)
        self._variables = dict(variables or {})
        self._expect_calls = expect_calls
        self._check = check
        self._encoder = Encoder(tokenizer)
        self._follow = Follow(
            template, self._encoder, variables=self._variables, stop_tokens=stop_tokens
        )
        self.stop_token_ids = tuple(tokenizer.token_id(token) for token in self._follow.ends)
        self._thinks = reasoning_format == "think"
        prompt = template.render(_OPENING, generate=True, **self._variables)
        self._opened = prompt.rstrip().endswith(reasoning.OPEN)
        self._set_tools(tools)

    def with_tools(self, tools: Sequence[ToolDef]) -> TemplateRenderer:
        """Return this renderer for a model that is offered ``tools``.

        Raises:
            ConfigError: the template has no tools.
        """
        other = copy.copy(self)
        other._set_tools(tools)
        return other

    @property
    def stop_id(self) -> int:
        """The id that ends an assistant turn in the template."""
        return self.stop_token_ids[0]

    @property
    def tool_problem(self) -> str:
        """Why agents with tools cannot use this template ("": they can)."""
        return self._follow.tool_problem

    def initial(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render the opening messages and the generation prompt.

        Raises:
            DataError: no message, or the template refuses these.
        """
        if not messages:
            raise DataError("a conversation needs a message")
        return tuple(self._encoder.encode(*self._text(messages, generate=True)))

    def delta(
        self, messages: Sequence[Message], *, stopped: bool, after: Message | None = None
    ) -> tuple[int, ...]:
        """Render what follows a sampled completion, boundary tokens included.

        Args:
            messages: the new ones. A run of tool messages is rendered as one group.
            stopped: the completion's last id is a stop token; else the end of turn, which was
                never sampled, is part of the delta.
            after: the message that the completion was parsed to.

        Raises:
            DataError: the template refuses these messages.
        """
        follow = self._follow.text(messages, self._shown(after), self._template_tools)
        ids = self._encoder.encode(*follow)
        return tuple(ids[1:] if stopped else ids)

    def parse(self, token_ids: Sequence[int], finish_reason: str) -> Message:
        """Turn a completion into an assistant message with tool calls, or with ``error`` set.

        A call in a completion that was cut (``finish_reason`` is not "stop") is not run.
        """
        body = list(token_ids)
        if body and body[-1] in self.stop_token_ids:
            body.pop()
        thought, content = None, self.tokenizer.decode(body)
        if self._thinks:
            thought, content = reasoning.split(content, opened=self._opened)
        cut = finish_reason != "stop"
        calls, error = (), None
        if self._format is not None and (self.tools or self._expect_calls):
            reading = self._format.read(content, self.tools)
            problem = reading.problem or self._wrong(reading.calls)
            if problem:
                error = f"error: {problem}"
            elif reading.calls and not cut:
                calls, content = reading.calls, reading.content
            elif self._expect_calls and not reading.calls:
                error = NO_CALL
            if cut and (error or reading.calls):
                error = LENGTH_CUT
        return Message(
            role="assistant", content=content, tool_calls=calls, error=error, reasoning=thought
        )

    def assistant_ids(self, text: str) -> tuple[int, ...]:
        """Return what a policy would have sampled to say ``text``: its tokens, end of turn."""
        return (*self.tokenizer.encode_markup(text), self.stop_id)

    def answer_ids(self, message: Message) -> tuple[int, ...]:
        """Return what a policy would have sampled to say ``message``, as the template writes it.

        Raises:
            DataError: the template does not write this message behind its own generation prompt.
        """
        prompt, _ = self._text(_OPENING, generate=True)
        whole, mark = self._text((*_OPENING, message), generate=False)
        ends = [found.end() for found in self._follow.end_pattern.finditer(whole, len(prompt))]
        if not whole.startswith(prompt) or not ends:
            raise DataError(
                f"the chat template writes this answer as {whole[-200:]!r}, which does not "
                f"continue its generation prompt {prompt[-80:]!r}"
            )
        return tuple(self._encoder.encode(whole[len(prompt) : ends[-1]], mark))

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a whole conversation at once, with the generation prompt (a reference)."""
        return self.initial(messages)

    def text(self, messages: Dicts, generate: bool) -> str:
        """Return the text of raw messages, as matrix.py asks for it."""
        tools = tool_dicts(self._template_tools)
        return self.template.render_dicts(messages, tools, generate=generate, **self._variables)

    @property
    def _template_tools(self) -> tuple[ToolDef, ...]:
        return () if self._format is not None and self._format.in_text else self.tools

    def _wrong(self, calls: Sequence[ToolCall]) -> str | None:
        """Say what is wrong with the first bad one of calls that could be read."""
        found = map(self._check, calls) if self._check is not None else ()
        return next((problem for problem in found if problem), None)

    def _set_tools(self, tools: Sequence[ToolDef]) -> None:
        if self.tool_problem and (tools or self._expect_calls):
            raise ConfigError(f"tools cannot be used with this model: {self.tool_problem}")
        self.tools = tuple(tools)

    def _text(self, messages: Sequence[Message], *, generate: bool) -> tuple[str, str]:
        """Return the rendered text and the mark of what was guarded in it (encode.py)."""
        shown = [item for item in map(self._shown, messages) if item is not None]
        value = (self.template.dicts(shown), tool_dicts(self._template_tools))
        (dicts, tools), mark = self._encoder.guard(value)
        text = self.template.render_dicts(dicts, tools, generate=generate, **self._variables)
        return text, mark

    def _shown(self, message: Message | None) -> Message | None:
        """Return what the template is told of a message: calls in the text are told once."""
        if message is None or self._format is None or not self._format.in_text:
            return message
        return Message(role=message.role, content=message.content, reasoning=message.reasoning)
