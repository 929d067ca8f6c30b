"""OpenAI's responses: POST /v1/responses, with previous_response_id.

Source: https://platform.openai.com/docs/api-reference/responses. A turn of the assistant is a run
of items (reasoning, message, function calls); here it is one Message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.gateway.bodies import Bodies
from skyrl_jax.gateway.calls import Answer, ChatRequest
from skyrl_jax.gateway.dialects import fields, openai
from skyrl_jax.gateway.dialects.base import TokenBytes, event, pieces
from skyrl_jax.gateway.history import History
from skyrl_jax.gateway.memory import Memory, Past
from skyrl_jax.gateway.refusals import Cause, Refused, invalid, unsupported

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = {"system": "system", "developer": "system", "user": "user"}
_ECHOED = ("instructions", "metadata", "previous_response_id", "tools", "max_output_tokens")
_NOT_HERE = ("background", "conversation", "prompt")
_LOGPROBS = "message.output_text.logprobs"


class OpenAIResponses:
    """The responses dialect.

    Args:
        token_bytes: the bytes of a token, for log-probs; ``None`` names tokens by id.
    """

    keep_alive = b": keep-alive\n\n"

    def __init__(self, token_bytes: TokenBytes | None = None) -> None:
        """Keep the tokenizer's half."""
        self._token_bytes = token_bytes

    def memory(self, past: Past) -> Memory:
        """Return an empty memory for a session."""
        return Memory(Bodies("input"), History(_read_run), past)

    def parse(self, body: Mapping[str, Any], memory: Memory) -> ChatRequest:
        """Read a body; instructions come first and are not carried on, as with OpenAI."""
        for name in _NOT_HERE:
            if body.get(name):
                raise unsupported(f"{name} is not served here", name)
        openai.refuse_alternatives(body)
        before = _before(body, memory.past)
        history = (*before, *_input(body.get("input"), before, memory.history))
        if not history:
            raise invalid("input must be a text or a list of items", "input")
        fields.check_last(history[-1].role, "input")
        store = body.get("store") is None or fields.flag(body, "store")
        return ChatRequest(
            messages=(*_instructions(body), *history),
            tools=openai.tools(body, nested=False),
            model=fields.required(body, "model", str),
            max_tokens=fields.whole(body, "max_output_tokens", 1),
            stream=fields.flag(body, "stream"),
            logprobs=_LOGPROBS in _include(body),
            show_reasoning=body.get("reasoning") is not None,
            asked=_asked(body),
            carried=history if store else None,
            echo=fields.set_values(body, _ECHOED),
        )

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """Write a response object."""
        status = "incomplete" if answer.cut else "completed"
        sampled = len(answer.completion.token_ids)
        return {
            **self._head(request, answer),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
            "output": self._output(request, answer, status),
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + sampled,
            },
        }

    def events(self, request: ChatRequest, answer: Answer) -> Iterator[bytes]:
        """Write the response.* events, numbered from 0."""
        whole = self.answer(request, answer)
        begun = {**self._head(request, answer), "status": "in_progress", "output": []}
        listed: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(whole["output"]):
            listed += _item_events(index, item)
        listed.append({"type": f"response.{whole['status']}", "response": whole})
        for number, data in enumerate(listed):
            yield event({**data, "sequence_number": number}, data["type"])

    def error(self, refused: Refused, request_id: str) -> dict[str, Any]:
        """Write {"error": {...}}."""
        del request_id
        return openai.error_body(refused)

    def late_error(self, refused: Refused, request_id: str) -> bytes:
        """Write an error event; the official client raises what stands under "error"."""
        body = self.error(refused, request_id)
        inner = body["error"]
        flat = {name: inner[name] for name in ("code", "message", "param")}
        return event({"type": "error", "sequence_number": 0, **flat, **body}, "error")

    def _head(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        return {
            "id": response_id(answer),
            "object": "response",
            "created_at": answer.created,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "model": request.model,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": request.carried is not None,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **request.echo,
        }

    def _output(self, request: ChatRequest, answer: Answer, status: str) -> list[dict[str, Any]]:
        message, ident = answer.message, answer.ident
        output: list[dict[str, Any]] = []
        if request.show_reasoning and message.reasoning:
            part = {"type": "reasoning_text", "text": message.reasoning}
            item = {"type": "reasoning", "id": f"rs_{ident}", "summary": [], "content": [part]}
            output.append(item)
        if message.content or not message.tool_calls:
            output.append(
                {
                    "type": "message",
                    "id": f"msg_{ident}",
                    "role": "assistant",
                    "status": status,
                    "content": [self._text(request, answer)],
                }
            )
        for index, call in enumerate(message.tool_calls):
            output.append(
                {
                    "type": "function_call",
                    "id": f"fc_{ident}{index}",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": fields.dump_arguments(call),
                    "status": "completed",
                }
            )
        return output

    def _text(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        logprobs: list[dict[str, Any]] = []
        if request.logprobs:
            logprobs = openai.token_logprobs(answer.completion, self._token_bytes)
        content = answer.message.content
        return {"type": "output_text", "text": content, "annotations": [], "logprobs": logprobs}


def response_id(answer: Answer) -> str:
    """Return the name by which a later request can continue an answer."""
    return f"resp_{answer.ident}"


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of one output item: added, deltas, done."""
    at = {"output_index": index}
    of = {**at, "item_id": item["id"]}
    if item["type"] == "function_call":
        bare = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", **at, "item": bare}
        name = "response.function_call_arguments"
        for piece in pieces(item["arguments"]):
            yield {"type": f"{name}.delta", **of, "delta": piece}
        yield {
            "type": f"{name}.done",
            **of,
            "name": item["name"],
            "arguments": item["arguments"],
        }
    else:
        bare = {**item, "content": []}
        if item["type"] == "message":
            bare["status"] = "in_progress"
        yield {"type": "response.output_item.added", **at, "item": bare}
        for number, part in enumerate(item["content"]):
            yield from _part_events({**of, "content_index": number}, part)
    yield {"type": "response.output_item.done", **at, "item": dict(item)}


def _part_events(at: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    name = f"response.{part['type']}"  # output_text or reasoning_text
    more: dict[str, Any] = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty: dict[str, Any] = {"logprobs": []} if more else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": "", **empty}}
    for piece in pieces(part["text"]):
        yield {"type": f"{name}.delta", **at, "delta": piece, **empty}
    yield {"type": f"{name}.done", **at, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **at, "part": dict(part)}


def _before(body: Mapping[str, Any], past: Past) -> tuple[Message, ...]:
    ident = body.get("previous_response_id")
    if ident is None:
        return ()
    found = past(ident.removeprefix("resp_")) if isinstance(ident, str) else None
    if found is None:
        raise Refused(
            Cause.PREVIOUS,
            f"Previous response with id {ident!r} not found: it is none of this session's, or was "
            "made with store=false",
            param="previous_response_id",
        )
    return found


def _instructions(body: Mapping[str, Any]) -> tuple[Message, ...]:
    if body.get("instructions") is None:
        return ()
    return (Message(role="system", content=fields.required(body, "instructions", str)),)


def _include(body: Mapping[str, Any]) -> list[Any]:
    value = body.get("include")
    if value is not None and not isinstance(value, list):
        raise invalid("include must be a list", "include")
    return value or []


def _asked(body: Mapping[str, Any]) -> dict[str, Any]:
    found = openai.asked(body)
    for name, usual in (("text", {"format": {"type": "text"}}), ("truncation", "disabled")):
        if body.get(name) not in (None, usual):
            found[name] = body[name]
    return found


_Run = tuple[int, list[Mapping[str, Any]]]


def _input(value: Any, before: tuple[Message, ...], history: History) -> Sequence[Message]:
    """Return the messages of ``input``, which follow ``before``."""
    if isinstance(value, str):
        return [Message(role="user", content=value)]
    runs = _runs(fields.items({"input": value}, "input"))
    if not before:
        return history.messages(runs)
    # what the ids of calls before it allow is no matter of the input alone: nothing is remembered
    seen = {call.id for message in before for call in message.tool_calls}
    return [message for number, run in enumerate(runs) for message in _read_run(run, number, seen)]


def _runs(items: list[Mapping[str, Any]]) -> list[_Run]:
    """Part the items into those that are read together: (place of the first, items)."""
    runs: list[_Run] = []
    open_run = False
    for index, item in enumerate(items):
        assistants = item.get("type") in ("reasoning", "function_call")
        assistants = assistants or item.get("role") == "assistant"
        if assistants and open_run:
            runs[-1][1].append(item)
        else:
            runs.append((index, [item]))
        open_run = assistants
    return runs


def _read_run(run: _Run, number: int, seen: set[str]) -> list[Message]:
    """Read a run of the assistant's items, or one item of another."""
    del number
    reader = _Reader(seen)
    for index, item in enumerate(run[1], run[0]):
        reader.add(item, f"input[{index}]")
    return reader.end()


@dataclass(slots=True)
class _Reader:
    """Reads input items; the assistant's items of one turn become one message."""

    seen: set[str]
    messages: list[Message] = field(default_factory=list)
    # the assistant's turn that is being gathered
    reasoning: str | None = None
    content: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def end(self) -> list[Message]:
        """Return the messages."""
        self._flush()
        return self.messages

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Read the next item."""
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reason(item, where)
        elif kind == "function_call":
            call = ToolCall(
                name=fields.required(item, "name", str, f"{where}."),
                arguments=fields.parse_arguments(item.get("arguments"), f"{where}.arguments"),
                id=fields.required(item, "call_id", str, f"{where}."),
            )
            self.calls.append(call)
            self.seen.add(call.id)
        elif kind == "function_call_output":
            self._flush()
            path = f"{where}.call_id"
            ident = fields.check_calls(self.seen, item.get("call_id"), path, "function call output")
            content = fields.text(item.get("output"), f"{where}.output", _TEXTS)
            self.messages.append(Message(role="tool", content=content, tool_call_id=ident))
        else:
            raise unsupported(
                f"{where}.type is {kind!r}, which is not served here", f"{where}.type"
            )

    def _reason(self, item: Mapping[str, Any], where: str) -> None:
        self._begin(said=self.content is not None)
        parts = item.get("content") or item.get("summary") or []
        thought = fields.text(parts, f"{where}.content", _TEXTS)
        if thought:  # an encrypted one is nothing that we could read
            self.reasoning = f"{self.reasoning}\n{thought}" if self.reasoning else thought

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = fields.required(item, "role", str, f"{where}.")
        content = fields.text(item.get("content"), f"{where}.content", _TEXTS)
        if role == "assistant":
            self._begin(said=self.content is not None)
            self.content = content
        elif role in _ROLES:
            self._flush()
            self.messages.append(Message(role=_ROLES[role], content=content))
        else:
            known = "system, developer, user, assistant"
            raise invalid(f"{where}.role is {role!r}; known roles: {known}", f"{where}.role")

    def _begin(self, *, said: bool) -> None:
        """Start a new turn of the assistant where the last one is complete."""
        if self.calls or said:
            self._flush()

    def _flush(self) -> None:
        if self.reasoning is None and self.content is None and not self.calls:
            return
        self.messages.append(
            Message(
                role="assistant",
                content=self.content or "",
                tool_calls=tuple(self.calls),
                reasoning=self.reasoning,
            )
        )
        self.reasoning, self.content, self.calls = None, None, []
