"""A client and an engine in one: says scripted answers, knows every token it sampled."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.types import Completion, Message, ToolCall, ToolDef
from skyrl_jax.gateway.conversation import Conversation, Placement
from skyrl_jax.generation.renderer import ChatMLRenderer
from tests.actor.fakes import make_tokenizer
from tests.batching.make import episode

TOKENIZER = make_tokenizer()
TOOLS = (ToolDef(name="bash", description="Run it.", parameters={"type": "object"}),)
OTHER_TOOLS = (ToolDef(name="sh", description="Run it.", parameters={"type": "object"}),)


def read(text: str, length_cut: bool) -> Message:
    """Parse ``<think>R</think>CONTENT<call>{...}</call>``: enough of a format for any history."""
    reasoning = None
    if text.startswith("<think>") and "</think>" in text:
        reasoning, _, text = text.removeprefix("<think>").partition("</think>")
    content, opened, rest = text.partition("<call>")
    if length_cut or not opened:
        return Message(role="assistant", content=text, reasoning=reasoning)
    try:
        name, arguments = json.loads(rest.removesuffix("</call>"))
    except ValueError:  # a malformed call is told as text
        return Message(role="assistant", content=text, reasoning=reasoning, error="no JSON")
    calls = (ToolCall(name=name, arguments=arguments, id="ours"),)
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


RENDERER = ChatMLRenderer(TOKENIZER, read)


class ToolRenderer(ChatMLRenderer):
    """Tells the tools in front of everything, as templates do."""

    def __init__(self, tools: tuple[ToolDef, ...]) -> None:
        super().__init__(TOKENIZER, read)
        self._opening = Message(role="system", content=" ".join(tool.name for tool in tools))

    def initial(self, messages) -> tuple[int, ...]:
        return super().initial([self._opening, *messages])


def renderer_for(tools: tuple[ToolDef, ...]) -> ChatMLRenderer:
    return ToolRenderer(tools) if tools else RENDERER


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str, call: str = "") -> Message:
    return Message(role="tool", content=text, tool_call_id=call)


def said(text: str, reasoning: str | None = None, *calls: ToolCall) -> Message:
    """An assistant message as a client sends it."""
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)


def ids_of(text: str) -> tuple[int, ...]:
    """Return ids by which the text is sampled, end of turn included."""
    return (*TOKENIZER.encode(text), RENDERER.stop_id)


@dataclass
class Talk:
    """A session played by hand. Every sampled token has a log-prob of its own: its name."""

    conversation: Conversation = field(default_factory=lambda: Conversation(renderer_for))
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    sampled: int = 0
    version: int = 1

    def call(self, history, answer, tools=(), *, finish="stop", kind="agent") -> Message:
        """Ask, and answer by a text or by ids; return what the client gets."""
        placement = self.conversation.place(history, tools)
        return self.answer(placement, answer, finish=finish, kind=kind)

    def answer(self, placement: Placement, answer, *, finish="stop", kind="agent") -> Message:
        """Answer what was placed; return what the client gets."""
        ids = ids_of(answer) if isinstance(answer, str) else tuple(answer)
        completion = self.complete(ids, finish)
        message = self.parse(ids, finish)
        self.prompts.append(tuple(placement.prompt_ids))
        self.completions.append(completion)
        self.conversation.record(placement, completion, message, kind=kind)
        return message

    def parse(self, ids: tuple[int, ...], finish: str) -> Message:
        """Return the message that ids are."""
        return RENDERER.parse(ids, finish)

    def complete(self, ids, finish="stop") -> Completion:
        names = range(self.sampled + 1, self.sampled + 1 + len(ids))
        self.sampled += len(ids)
        half = len(ids) // 2  # the engine changes its weights in the middle of an answer
        versions = (self.version,) * half + (self.version + 1,) * (len(ids) - half)
        return Completion(
            token_ids=ids,
            logprobs=tuple(-name / 1024 for name in names),
            weight_versions=versions,
            finish_reason=finish,
        )

    def full(self, number: int) -> tuple[int, ...]:
        """Return prompt and completion of a call."""
        return (*self.prompts[number], *self.completions[number].token_ids)

    def rows(self, **options):
        return make_rows(episode(*self.conversation.turns()), **options)

    def trained(self, **options) -> list[float]:
        """Return the names of all tokens with mask 1, with repetitions."""
        names = []
        for row in self.rows(**options).sequences:
            names += row.behavior_logprobs[row.mask > 0].tolist()
        return sorted(names)

    def names(self, *numbers: int) -> list[float]:
        """Return the names of the tokens of some calls."""
        return sorted(name for n in numbers for name in self.completions[n].logprobs)
