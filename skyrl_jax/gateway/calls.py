"""What dialects and sessions exchange: a request, its answer, and what a session leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_jax.core.errors import DataError, HostError
from skyrl_jax.core.protocols import Renderer
from skyrl_jax.core.types import Completion, Message, ToolDef, Turn

RendererFor = Callable[[tuple[ToolDef, ...]], Renderer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request, whatever dialect it came in.

    Args:
        messages: the whole history; the last one is not an assistant's.
        tools: what the client offers the model.
        model: the name that the client asked for.
        max_tokens: the client's own limit of this answer; the session's holds beside it.
        stream: answer as server-sent events. ``stream_usage``: with a usage chunk (chat only).
        logprobs: the answer tells the log-prob of each sampled token.
        show_reasoning: the client asked for the model's thinking and can read it.
        asked: sampling parameters that the client set; the session's are used in their place.
        carried: what a later request can continue by naming this answer (Responses only).
        echo: fields of the body that the answer repeats (Responses only).

    Example: ``ChatRequest(messages=(Message(role="user", content="hi"),), model="policy")``.
    """

    messages: tuple[Message, ...]
    model: str
    tools: tuple[ToolDef, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    show_reasoning: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)
    carried: tuple[Message, ...] | None = None
    echo: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A recorded answer; dialects write it down, each in its own form.

    ``ident`` (hex) is the same for every replay, ``created`` is in Unix seconds.
    Example: ``Answer(ident="00ff", created=0, message=message, completion=completion,
    prompt_tokens=12)``.
    """

    ident: str
    created: int
    message: Message
    completion: Completion
    prompt_tokens: int

    @property
    def cut(self) -> bool:
        """Whether the answer ran into its token limit."""
        return self.completion.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a closed session leaves.

    Args:
        turns: every call with the ids, log-probs and versions that the generator returned.
        counts: what happened how often: forks by cause, replays, refusals, ignored parameters.
        messages: the last history with its answer.
        fault: the host's first failure that no retry of the client healed. The episode is then
            FAILED whatever the agent made of it: raise it.
        limit: the budget ("turns", "tokens", "context") whose refusal was the last answer that the
            agent got; "" where it ended otherwise.
        lacking: what the generator did not return and training needs; "" = nothing.
        asked: per sampling parameter the values that the agent set and did not get.

    Example: ``Recorded(turns=(), counts={}, messages=())``.
    """

    turns: tuple[Turn, ...]
    counts: Mapping[str, int]
    messages: tuple[Message, ...]
    fault: HostError | None = None
    limit: str = ""
    lacking: str = ""
    asked: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def for_training(self) -> tuple[Turn, ...]:
        """Return the turns of an episode that may be trained.

        Raises:
            HostError: the host failed; the episode is FAILED.
            DataError: the generator returned no ids or log-probs: good for evaluation only.
        """
        if self.fault is not None:
            raise self.fault
        if self.lacking:
            raise DataError(evaluation_only(self.lacking))
        return self.turns


def evaluation_only(lacking: str) -> str:
    """Say why a generator's answers cannot be trained on."""
    return (
        f"the generator returned no {lacking}: it can serve evaluation (open(..., training=False)) "
        "but nothing it says can be trained; training needs the sampled ids and their log-probs, "
        "as SGLang's /generate returns them"
    )
