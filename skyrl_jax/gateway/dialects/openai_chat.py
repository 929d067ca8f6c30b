"""OpenAI's chat completions: POST /v1/chat/completions.

Source: https://platform.openai.com/docs/api-reference/chat. An assistant's thinking travels as
``reasoning_content`` (vLLM's and SGLang's name; clients that do not know it ignore it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.gateway.bodies import Bodies
from skyrl_jax.gateway.calls import Answer, ChatRequest
from skyrl_jax.gateway.dialects import fields, openai
from skyrl_jax.gateway.dialects.base import TokenBytes, event, pieces
from skyrl_jax.gateway.history import History
from skyrl_jax.gateway.memory import Memory, Past
from skyrl_jax.gateway.refusals import Refused, invalid, unsupported

_ROLES = {"system": "system", "developer": "system", "user": "user"}


class OpenAIChat:
    """The chat dialect.

    Args:
        token_bytes: the bytes of a token, for log-probs; ``None`` names tokens by id.
    """

    keep_alive = b": keep-alive\n\n"

    def __init__(self, token_bytes: TokenBytes | None = None) -> None:
        """Keep the tokenizer's half."""
        self._token_bytes = token_bytes

    def memory(self, past: Past) -> Memory:
        """Return an empty memory for a session."""
        return Memory(Bodies("messages"), History(read_message), past)

    def parse(self, body: Mapping[str, Any], memory: Memory) -> ChatRequest:
        """Read a body; roles function and audio, images and n > 1 are refused."""
        fields.only_one(body)
        openai.refuse_alternatives(body)
        for old in ("functions", "function_call"):
            if body.get(old) is not None:
                raise unsupported(f"{old} is the form of 2023; use tools", old)
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise invalid("stream_options must be an object", "stream_options")
        limits = [fields.whole(body, name, 1) for name in ("max_completion_tokens", "max_tokens")]
        return ChatRequest(
            messages=_messages(fields.items(body, "messages"), memory.history),
            tools=openai.tools(body, nested=True),
            model=fields.required(body, "model", str),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            stream=fields.flag(body, "stream"),
            stream_usage=fields.flag(options, "include_usage"),
            logprobs=fields.flag(body, "logprobs"),
            show_reasoning=True,
            asked=openai.asked(body),
        )

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """Write a chat.completion."""
        choice = {
            "index": 0,
            "message": write_message(answer.message),
            "logprobs": self._logprobs(request, answer),
            "finish_reason": finish_reason(answer),
        }
        head = _head(request, answer, "chat.completion")
        return {**head, "choices": [choice], "usage": usage(answer)}

    def events(self, request: ChatRequest, answer: Answer) -> Iterator[bytes]:
        """Write chat.completion.chunk events and the closing [DONE]."""
        head = _head(request, answer, "chat.completion.chunk")
        if request.stream_usage:
            head["usage"] = None

        def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": finish,
            }
            return event({**head, "choices": [choice]})

        # all log-probs come with the first chunk: a chunk's text is no run of whole tokens
        yield chunk({"role": "assistant", "content": ""}, logprobs=self._logprobs(request, answer))
        for piece in pieces(answer.message.reasoning or ""):
            yield chunk({"reasoning_content": piece})
        for piece in pieces(answer.message.content):
            yield chunk({"content": piece})
        for index, call in enumerate(answer.message.tool_calls):
            function = {"name": call.name, "arguments": ""}
            start = {"index": index, "id": call.id, "type": "function", "function": function}
            yield chunk({"tool_calls": [start]})
            for piece in pieces(fields.dump_arguments(call)):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, finish_reason(answer))
        if request.stream_usage:
            yield event({**head, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, refused: Refused, request_id: str) -> dict[str, Any]:
        """Write {"error": {...}}."""
        del request_id
        return openai.error_body(refused)

    def late_error(self, refused: Refused, request_id: str) -> bytes:
        """Write the error as a chunk: the official client raises it."""
        return event(self.error(refused, request_id)) + b"data: [DONE]\n\n"

    def _logprobs(self, request: ChatRequest, answer: Answer) -> dict[str, Any] | None:
        if not request.logprobs:
            return None
        content = openai.token_logprobs(answer.completion, self._token_bytes)
        return {"content": content, "refusal": None}


def _messages(raw: list[Mapping[str, Any]], history: History) -> tuple[Message, ...]:
    if not raw:
        raise invalid("messages must be a list of at least one message", "messages")
    read = history.messages(raw)
    fields.check_last(read[-1].role, f"messages[{len(raw) - 1}]")
    return read


def read_message(item: Mapping[str, Any], index: int, seen: set[str]) -> tuple[Message, ...]:
    """Read a chat message; a tool message must answer a call before it (see History)."""
    return (_message(item, f"messages[{index}]", seen),)


def _message(item: Mapping[str, Any], where: str, seen: set[str]) -> Message:
    role = fields.required(item, "role", str, f"{where}.")
    if role in _ROLES:
        return Message(role=_ROLES[role], content=_content(item, where))
    if role == "assistant":
        return _assistant(item, where, seen)
    if role == "tool":
        ident = item.get("tool_call_id")
        ident = fields.check_calls(seen, ident, f"{where}.tool_call_id", "message of role 'tool'")
        return Message(role="tool", content=_content(item, where), tool_call_id=ident)
    known = "system, developer, user, assistant, tool"
    raise invalid(f"{where}.role is {role!r}; known roles: {known}", f"{where}.role")


def _content(item: Mapping[str, Any], where: str) -> str:
    return fields.text(item.get("content"), f"{where}.content")


def _assistant(item: Mapping[str, Any], where: str, seen: set[str]) -> Message:
    if item.get("function_call") is not None:
        path = f"{where}.function_call"
        raise unsupported(f"{path} is the form of 2023; use tool_calls", path)
    reasoning = item.get("reasoning_content")
    if reasoning is None:
        reasoning = item.get("reasoning")
    calls = []
    for index, call in enumerate(fields.items(item, "tool_calls")):
        calls.append(_call(call, f"{where}.tool_calls[{index}]"))
    seen.update(call.id for call in calls)
    return Message(
        role="assistant",
        content=_content(item, where),
        tool_calls=tuple(calls),
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def _call(call: Mapping[str, Any], where: str) -> ToolCall:
    function = fields.required(call, "function", dict, f"{where}.")
    return ToolCall(
        name=fields.required(function, "name", str, f"{where}.function."),
        arguments=fields.parse_arguments(function.get("arguments"), f"{where}.function.arguments"),
        id=fields.required(call, "id", str, f"{where}."),
    )


def write_message(message: Message) -> dict[str, Any]:
    """Write an assistant message; content is null beside calls that have no text."""
    written: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if message.tool_calls else ""),
        "refusal": None,
    }
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": fields.dump_arguments(call)},
            }
            for call in message.tool_calls
        ]
    return written


def finish_reason(answer: Answer) -> str:
    """Say why the answer ended."""
    if answer.cut:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def usage(answer: Answer) -> dict[str, Any]:
    """Count the tokens of a call."""
    sampled = len(answer.completion.token_ids)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
    }


def _head(request: ChatRequest, answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.ident}",
        "object": kind,
        "created": answer.created,
        "model": request.model,
        "system_fingerprint": None,
    }
