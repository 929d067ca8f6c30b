"""The messages dialect by itself."""

import json

import pytest

from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.gateway.calls import ChatRequest
from skyrl_jax.gateway.dialects.anthropic import Anthropic
from skyrl_jax.gateway.refusals import Cause, Refused
from tests.gateway.world import answer, events

DIALECT = Anthropic()
USE = {"type": "tool_use", "id": "c1", "name": "bash", "input": {"n": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "out"}


def body(*messages, **fields):
    made = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    return {"model": "policy", "max_tokens": 64, "messages": made, **fields}


def parse(value):
    return DIALECT.parse(value, DIALECT.memory(lambda _: None))


def test_a_history_is_read():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "a"},
        USE,
    ]
    request = parse(
        body(
            "hi",
            {"role": "assistant", "content": blocks},
            {
                "role": "user",
                "content": [RESULT, {"type": "text", "text": "t1"}, {"type": "text", "text": "t2"}],
            },
            system=[
                {"type": "text", "text": "s1", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "s2"},
            ],
            tools=[{"name": "bash", "description": "Run.", "input_schema": {"type": "object"}}],
            tool_choice={"type": "auto"},
        )
    )
    assert request.messages == (
        Message(role="system", content="s1\ns2"),
        Message(role="user", content="hi"),
        Message(
            role="assistant",
            content="a",
            reasoning="hm",
            tool_calls=(ToolCall(name="bash", arguments={"n": 1}),),
        ),
        Message(role="tool", content="out"),
        Message(role="user", content="t1\nt2"),
    )
    assert request.messages[3].tool_call_id == "c1"
    assert (request.max_tokens, request.asked, request.show_reasoning) == (64, {}, False)
    assert request.tools[0].parameters == {"type": "object"}
    assert parse(body("hi", thinking={"type": "enabled", "budget_tokens": 9})).show_reasoning


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "messages.0"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "bash"}]}, "tools[0].input_schema"),
        ({"stream": 1}, "stream"),
    ],
)
def test_a_bad_body_names_its_field(fields, param):
    with pytest.raises(Refused) as caught:
        parse({**body("hi"), **fields})
    assert caught.value.param == param
    shape = DIALECT.error(caught.value, "req_1")
    assert caught.value.status == 400
    assert shape["type"] == "error"
    assert shape["error"]["type"] == "invalid_request_error"
    assert shape["request_id"] == "req_1"


def test_an_answer_and_its_events_agree():
    calls = (ToolCall(name="bash", arguments={"cmd": "é" * 3000}, id="c1"),)
    message = Message(role="assistant", content="a", reasoning="hm", tool_calls=calls)
    request = ChatRequest(messages=(), model="m", show_reasoning=True)
    whole = DIALECT.answer(request, answer(message))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["stop_reason"] == "tool_use"
    assert whole["content"][2]["input"] == dict(calls[0].arguments)
    listed = events(b"".join(DIALECT.events(request, answer(message))))
    assert all(name == data["type"] for name, data in listed)
    assert [listed[0][0], listed[-2][0], listed[-1][0]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert listed[0][1]["message"]["content"] == []
    assert listed[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert listed[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    deltas = [d for n, d in listed if n == "content_block_delta"]
    joined = "".join(d["delta"]["partial_json"] for d in deltas if d["index"] == 2)
    assert json.loads(joined) == dict(calls[0].arguments)
    kinds = [d["delta"]["type"] for d in deltas]
    assert kinds[:2] == ["thinking_delta", "text_delta"]
    starts = [d["content_block"] for n, d in listed if n == "content_block_start"]
    assert starts[2]["input"] == {}


def test_thinking_is_shown_only_to_who_asked_for_it():
    message = Message(role="assistant", content="a", reasoning="hm")
    plain = DIALECT.answer(ChatRequest(messages=(), model="m"), answer(message))
    assert [block["type"] for block in plain["content"]] == ["text"]
    assert plain["stop_reason"] == "end_turn"
    cut = DIALECT.answer(ChatRequest(messages=(), model="m"), answer(message, "length"))
    assert cut["stop_reason"] == "max_tokens"


def test_errors_by_which_agents_tell_what_to_do():
    def shape(cause, **kwargs):
        return DIALECT.error(Refused(cause, "x", **kwargs), "r")["error"]

    full = shape(Cause.CONTEXT, tokens=(9, 4))
    assert full["message"] == "prompt is too long: 9 tokens > 4 maximum"
    assert full["type"] == "invalid_request_error"
    assert shape(Cause.BUDGET)["type"] == "permission_error"
    assert shape(Cause.KEY)["type"] == "authentication_error"
    assert shape(Cause.TOO_LARGE)["type"] == "request_too_large"
    assert shape(Cause.NO_MODEL)["type"] == "not_found_error"
    assert shape(Cause.FAULT)["type"] == "api_error"
    for cause in Cause:
        assert shape(cause)["message"]
