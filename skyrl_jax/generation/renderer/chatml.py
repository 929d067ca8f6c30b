r"""ChatML for the tiny vocabulary: messages <-> token ids, incrementally.

    <|im_start|>{role}\n{content}<|im_end|>\n ... <|im_start|>assistant\n

The next prompt is always stored ids + ``delta(...)``: what was sampled is never rendered again.
Every piece is encoded on its own, so a prompt built turn by turn equals the one rendered at once.
Content of others is encoded without special tokens; only assistant text written by us may use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import Message, ToolDef
from skyrl_jax.generation.tokenizer import END, START, Tokenizer

ROLES = ("system", "user", "assistant", "tool")


class ChatMLRenderer:
    """The Renderer of the tiny policy.

    Args:
        tokenizer: a tokenizer with the ChatML tokens.
        parse: turns the text of a completion into a message: ``parse(text, length_cut)``
            (agents/parsing.py has ours).
    """

    def __init__(self, tokenizer: Tokenizer, parse: Callable[[str, bool], Message]) -> None:
        """Look the boundary tokens up once."""
        self.tokenizer = tokenizer
        self._parse = parse
        self.stop_id = tokenizer.token_id(END)
        self._start_id = tokenizer.token_id(START)
        self._newline = tuple(tokenizer.encode("\n"))
        self._heads = {role: (self._start_id, *tokenizer.encode(f"{role}\n")) for role in ROLES}

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant turn."""
        return (self.stop_id,)

    def initial(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render the opening messages and the generation prompt."""
        return (*self._render(messages), *self._heads["assistant"])

    def delta(
        self, messages: Sequence[Message], *, stopped: bool, after: Message | None = None
    ) -> tuple[int, ...]:
        """Render what follows a sampled completion, boundary tokens included.

        The sampled turn ends with ``<|im_end|>`` when ``stopped``; the newline after it was never
        sampled and belongs to the delta, as does the missing ``<|im_end|>`` of a cut turn.
        """
        boundary = self._newline if stopped else (self.stop_id, *self._newline)
        return (*boundary, *self._render(messages), *self._heads["assistant"])

    def parse(self, token_ids: Sequence[int], finish_reason: str) -> Message:
        """Turn a completion into an assistant message with tool calls, or with ``error`` set."""
        body = list(token_ids)
        if body and body[-1] == self.stop_id:
            body.pop()
        return self._parse(self.tokenizer.decode(body), finish_reason == "length")

    def assistant_ids(self, text: str) -> tuple[int, ...]:
        """Return what a policy would have sampled to say ``text``: markup tokens, end of turn."""
        return (*self.tokenizer.encode_markup(text), self.stop_id)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Render a whole conversation at once, with the generation prompt (a reference)."""
        return self.initial(messages)

    def with_tools(self, tools: Sequence[ToolDef]) -> ChatMLRenderer:
        """Return this renderer: its tools are in the scaffold's prompt, not in the form."""
        del tools
        return self

    def text(self, messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
        """Return the text of raw messages, as matrix.py asks for it."""
        said = [Message(role=item["role"], content=item["content"]) for item in messages]
        ids = self.initial(said) if generate else self._render(said)
        return self.tokenizer.decode(ids)

    def _render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids: list[int] = []
        for role, run in groupby(messages, key=lambda message: message.role):
            if role not in self._heads:
                raise DataError(f"message role {role!r} is none of {', '.join(ROLES)}")
            contents = [message.content for message in run]
            # a run of tool results answers one assistant turn: one block, or turns would multiply
            for content in ["\n".join(contents)] if role == "tool" else contents:
                ids += self._heads[role]
                if role == "assistant":
                    ids += self.tokenizer.encode_markup(content)
                else:
                    ids += self.tokenizer.encode(content)
                ids += (self.stop_id, *self._newline)
        return tuple(ids)
