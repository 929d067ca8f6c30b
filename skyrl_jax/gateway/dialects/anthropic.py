"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens.

Source: https://docs.anthropic.com/en/api/messages and /errors: {"type": "error", "error": {"type",
"message"}, "request_id"}. A used-up budget is a permission error (403): a rate limit or an
overload would be asked again for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_jax.core.types import Message, ToolCall, ToolDef
from skyrl_jax.gateway.bodies import Bodies
from skyrl_jax.gateway.calls import Answer, ChatRequest
from skyrl_jax.gateway.dialects import fields
from skyrl_jax.gateway.dialects.base import dumps, event, pieces
from skyrl_jax.gateway.history import History
from skyrl_jax.gateway.memory import Memory, Past
from skyrl_jax.gateway.refusals import STATUS, Cause, Refused, invalid, unsupported

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "api_error",
}
_SAMPLING = ("temperature", "top_p", "top_k", "stop_sequences", "output_config")


class Anthropic:
    """The messages dialect."""

    keep_alive = event({"type": "ping"}, "ping")

    def memory(self, past: Past) -> Memory:
        """Return an empty memory for a session; bodies of count_tokens share it."""
        return Memory(Bodies("messages"), History(_message), past)

    def parse(self, body: Mapping[str, Any], memory: Memory) -> ChatRequest:
        """Read a body; ``max_tokens`` is required, as with Anthropic."""
        limit = fields.whole(body, "max_tokens", 1)
        if limit is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        return self._read(body, memory, limit)

    def parse_count(self, body: Mapping[str, Any], memory: Memory) -> ChatRequest:
        """Read a body of count_tokens."""
        return self._read(body, memory, None)

    def _read(self, body: Mapping[str, Any], memory: Memory, limit: int | None) -> ChatRequest:
        system = fields.text(body.get("system"), "system")
        opening = (Message(role="system", content=system),) if system else ()
        thinking = body.get("thinking")
        shown = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
        return ChatRequest(
            messages=(*opening, *_messages(fields.items(body, "messages"), memory.history)),
            tools=_tools(body),
            model=fields.required(body, "model", str),
            max_tokens=limit,
            stream=fields.flag(body, "stream"),
            show_reasoning=shown,
            asked=_asked(body),
        )

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """Write a message object."""
        return {
            **_head(request, answer),
            "content": _blocks(request, answer.message),
            "stop_reason": stop_reason(answer),
            "usage": _usage(answer, len(answer.completion.token_ids)),
        }

    def events(self, request: ChatRequest, answer: Answer) -> Iterator[bytes]:
        """Write message_start ... message_stop."""
        begun = {**_head(request, answer), "content": [], "usage": _usage(answer, 1)}
        yield _event("message_start", message=begun)
        for index, block in enumerate(_blocks(request, answer.message)):
            yield from _block_events(index, block)
        ended = {"stop_reason": stop_reason(answer), "stop_sequence": None}
        yield _event(
            "message_delta",
            delta=ended,
            usage={"output_tokens": len(answer.completion.token_ids)},
        )
        yield _event("message_stop")

    def error(self, refused: Refused, request_id: str) -> dict[str, Any]:
        """Write {"type": "error", "error": {...}}."""
        message = refused.message
        if refused.cause is Cause.CONTEXT and refused.tokens is not None:
            message = "prompt is too long: {} tokens > {} maximum".format(*refused.tokens)
        error = {"type": _TYPES[STATUS[refused.cause]], "message": message}
        return {"type": "error", "error": error, "request_id": request_id}

    def late_error(self, refused: Refused, request_id: str) -> bytes:
        """Write an error event: the official client raises it."""
        return event(self.error(refused, request_id), "error")


def stop_reason(answer: Answer) -> str:
    """Say why the answer ended."""
    if answer.cut:
        return "max_tokens"
    return "tool_use" if answer.message.tool_calls else "end_turn"


def _head(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.ident}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(answer: Answer, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _blocks(request: ChatRequest, message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if request.show_reasoning and message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        arguments = dict(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _block_events(index: int, block: Mapping[str, Any]) -> Iterator[bytes]:
    if block["type"] == "tool_use":
        bare, kind, key = {**block, "input": {}}, "input_json_delta", "partial_json"
        body = dumps(block["input"]).decode()
    elif block["type"] == "thinking":
        bare, kind, key = {**block, "thinking": ""}, "thinking_delta", "thinking"
        body = block["thinking"]
    else:
        bare, kind, key = {**block, "text": ""}, "text_delta", "text"
        body = block["text"]
    yield _event("content_block_start", index=index, content_block=bare)
    for piece in pieces(body):
        yield _event("content_block_delta", index=index, delta={"type": kind, key: piece})
    yield _event("content_block_stop", index=index)


def _asked(body: Mapping[str, Any]) -> dict[str, Any]:
    fields.number(body, "temperature", 0.0, 1.0)
    fields.number(body, "top_p", 0.0, 1.0)
    fields.whole(body, "top_k", 0)
    found = fields.set_values(body, _SAMPLING)
    choice = body.get("tool_choice")
    if choice is not None and not (isinstance(choice, dict) and choice.get("type") == "auto"):
        found["tool_choice"] = choice
    return found


def _tools(body: Mapping[str, Any]) -> tuple[ToolDef, ...]:
    read = []
    for index, item in enumerate(fields.items(body, "tools")):
        where = f"tools[{index}]"
        if item.get("type") not in (None, "custom"):
            raise unsupported(
                f"{where}.type is {item.get('type')!r}; only tools with an input_schema can be "
                "offered: nothing else is known to the model, and nothing is run here",
                f"{where}.type",
            )
        description = item.get("description") or ""
        if not isinstance(description, str):
            raise invalid(f"{where}.description must be a string", f"{where}.description")
        read.append(
            ToolDef(
                name=fields.required(item, "name", str, f"{where}."),
                description=description,
                parameters=fields.required(item, "input_schema", dict, f"{where}."),
            )
        )
    return tuple(read)


def _messages(raw: list[Mapping[str, Any]], history: History) -> tuple[Message, ...]:
    if not raw:
        raise invalid("messages: at least one message is required", "messages")
    read = history.messages(raw)
    fields.check_last(raw[-1]["role"], f"messages.{len(raw) - 1}")
    return read


def _message(item: Mapping[str, Any], index: int, seen: set[str]) -> list[Message]:
    where = f"messages.{index}"
    role = fields.required(item, "role", str, f"{where}.")
    if role == "assistant":
        return [_assistant(item.get("content"), f"{where}.content", seen)]
    if role == "user":
        return _user(item.get("content"), f"{where}.content", seen)
    raise invalid(
        f'{where}: Unexpected role "{role}". Allowed roles are "user" or "assistant"; the '
        "system prompt is the top-level system",
        f"{where}.role",
    )


def _content(content: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the blocks of a content."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(f"{where} must be a string or a list of blocks", where)
    return content


def _assistant(content: Any, where: str, seen: set[str]) -> Message:
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(_content(content, where)):
        path = f"{where}.{index}"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(fields.required(block, "thinking", str, f"{path}."))
        elif kind == "tool_use":
            calls.append(
                ToolCall(
                    name=fields.required(block, "name", str, f"{path}."),
                    arguments=fields.required(block, "input", dict, f"{path}."),
                    id=fields.required(block, "id", str, f"{path}."),
                )
            )
        elif kind != "redacted_thinking":  # nobody can read it: as if it had been left out
            texts.append(block)
    seen.update(call.id for call in calls)
    return Message(
        role="assistant",
        content=fields.text(texts, where),
        tool_calls=tuple(calls),
        reasoning="\n".join(thoughts) if thoughts else None,
    )


def _user(content: Any, where: str, seen: set[str]) -> list[Message]:
    """Read a user message: tool results become tool messages, a run of texts one user message."""
    read: list[Message] = []
    texts: list[Any] = []

    def flush() -> None:
        if texts:
            read.append(Message(role="user", content=fields.text(list(texts), where)))
            texts.clear()

    for index, block in enumerate(_content(content, where)):
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        flush()
        path = f"{where}.{index}"
        ident = block.get("tool_use_id")
        ident = fields.check_calls(seen, ident, f"{path}.tool_use_id", "tool_result block")
        result = fields.text(block.get("content"), f"{path}.content")
        read.append(Message(role="tool", content=result, tool_call_id=ident))
    flush()
    if not read:
        raise invalid(f"{where} must not be empty", where)
    return read
