"""The chat dialect by itself: what a body says, and how an answer looks."""

import json

import pytest

from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.gateway.calls import ChatRequest
from skyrl_jax.gateway.dialects.openai_chat import OpenAIChat
from skyrl_jax.gateway.refusals import STATUS, Cause, Refused
from tests.gateway.world import TOOL, answer, chat, events

CHAT = OpenAIChat(lambda token: bytes([token]) if token < 256 else b"<end>")
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"n": 1}'}}
    ],
}


def parse(body):
    return CHAT.parse(body, CHAT.memory(lambda ident: None))


def refusal(body):
    with pytest.raises(Refused) as caught:
        parse(body)
    error = CHAT.error(caught.value, "req_1")["error"]
    return caught.value.status, error


def test_a_history_is_read():
    request = parse(
        chat(
            {
                "role": "system",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            "hi",
            {**CALLED, "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "out"},
            tools=[TOOL],
            max_tokens=9,
            max_completion_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert request.messages == (
        Message(role="system", content="a\nb"),
        Message(role="user", content="hi"),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(name="bash", arguments={"n": 1}),),
            reasoning="hm",
        ),
        Message(role="tool", content="out"),
    )
    assert request.messages[2].tool_calls[0].id == request.messages[3].tool_call_id == "c1"
    assert request.tools[0].name == "bash"
    assert request.tools[0].parameters == {"type": "object"}
    assert (request.max_tokens, request.stream, request.stream_usage) == (7, True, True)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "list of objects"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'wizard'"),
        (
            {"messages": [{"role": ["user"], "content": "x"}]},
            "messages[0].role",
            "must be a string",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "must name"),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c9"}]},
            "messages[0].tool_call_id",
            "no tool call before it",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "known roles"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "text only",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a string or"),
        ({"messages": [CALLED]}, "messages[0]", "cannot be continued"),
        ({"n": 2}, "n", "n must be 1"),
        ({"n": True}, "n", "whole number"),
        ({"temperature": float("nan")}, "temperature", "from 0 to 2"),
        ({"temperature": float("inf")}, "temperature", "from 0 to 2"),
        ({"temperature": 10**400}, "temperature", "from 0 to 2"),
        ({"temperature": "NaN"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"top_p": 1.5}, "top_p", "from 0 to 1"),
        ({"seed": 0.5}, "seed", "whole number"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"model": 3}, "model", "must be a string"),
        ({"model": None}, "model", "missing"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": 1}, "stream_options", "an object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": {"a": 1}}, "tools", "list of objects"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "must be 0"),
    ],
)
def test_a_bad_body_names_its_field(body, param, words):
    status, error = refusal({**chat("hi"), **body})
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("arguments", ["[1]", "{", 3, "NaN", '{"x": NaN}'])
def test_arguments_must_be_the_text_of_an_object(arguments):
    bad = json.loads(json.dumps(CALLED))
    bad["tool_calls"][0]["function"]["arguments"] = arguments
    status, error = refusal(chat("hi", bad, "go"))
    assert (status, error["param"]) == (400, "messages[1].tool_calls[0].function.arguments")


def test_sampling_parameters_are_read_and_set_aside():
    request = parse(
        chat("hi", temperature=0.2, stop=["x"], tool_choice="required", parallel_tool_calls=True)
    )
    assert request.asked == {"temperature": 0.2, "stop": ["x"], "tool_choice": "required"}
    assert parse(chat("hi", tool_choice="auto", temperature=None)).asked == {}


def test_an_answer_with_calls():
    message = Message(
        role="assistant",
        content="",
        reasoning="hm",
        tool_calls=(ToolCall(name="bash", arguments={"cmd": "é"}, id="c1"),),
    )
    request = ChatRequest(messages=(), model="policy", logprobs=True)
    written = CHAT.answer(request, answer(message))
    choice = written["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "hm"
    function = choice["message"]["tool_calls"][0]
    assert (function["id"], function["type"]) == ("c1", "function")
    assert json.loads(function["function"]["arguments"]) == {"cmd": "é"}
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == written["usage"]["completion_tokens"]
    assert tokens[0] == {"token": "<", "logprob": -0.001, "bytes": [60], "top_logprobs": []}
    assert written["usage"]["total_tokens"] == 5 + len(tokens)


def test_a_cut_answer_says_length():
    written = CHAT.answer(
        ChatRequest(messages=(), model="m"),
        answer(Message(role="assistant", content="x"), "length"),
    )
    assert written["choices"][0]["finish_reason"] == "length"
    assert written["choices"][0]["logprobs"] is None


def test_tokens_without_a_tokenizer_are_named_by_id():
    request = ChatRequest(messages=(), model="m", logprobs=True)
    written = OpenAIChat().answer(request, answer(Message(role="assistant", content="A")))
    assert written["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:65"


def test_a_stream_adds_up_to_the_answer():
    text = "x" * 5000 + "\u2028é"  # longer than a piece; a character that ends lines elsewhere
    calls = tuple(ToolCall(name="bash", arguments={"i": i}, id=f"c{i}") for i in range(2))
    message = Message(role="assistant", content=text, reasoning="hm", tool_calls=calls)
    request = ChatRequest(messages=(), model="m", stream=True, stream_usage=True)
    raw = b"".join(CHAT.events(request, answer(message)))
    assert max(len(line) for line in raw.split(b"\n")) < 30_000
    chunks = events(raw)
    assert chunks[-1] == ("", "[DONE]")
    usage, *rest = [data for _, data in reversed(chunks[:-1])]
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == 5
    assert rest[0]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [data["choices"][0]["delta"] for data in reversed(rest)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == text
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    heads = [c for d in deltas for c in d.get("tool_calls", ()) if "id" in c]
    assert [(c["index"], c["id"], c["function"]["name"]) for c in heads] == [
        (0, "c0", "bash"),
        (1, "c1", "bash"),
    ]
    for index in range(2):
        parts = [c for d in deltas for c in d.get("tool_calls", ()) if c["index"] == index]
        text = "".join(c["function"]["arguments"] for c in parts)
        assert json.loads(text) == {"i": index}


def test_every_refusal_has_a_shape():
    for cause in Cause:
        error = CHAT.error(Refused(cause, "why", tokens=(9, 4)), "req_1")["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["type"], str)
        assert 400 <= STATUS[cause] < 600


def test_errors_by_which_agents_tell_what_to_do():
    """litellm reads these words and types: a wrong key, a full context and a used-up budget end
    an agent, where any "invalid_request_error" of 401 or 403 would be asked again."""
    error = CHAT.error(Refused(Cause.CONTEXT, "", tokens=(9, 4)), "")["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4 tokens")
    for cause in (Cause.KEY, Cause.CLOSED):
        error = CHAT.error(Refused(cause, "x"), "")["error"]
        assert error["message"].startswith("Incorrect API key provided")
    error = CHAT.error(Refused(Cause.BUDGET, "x"), "")["error"]
    assert error["type"] == error["code"] == "insufficient_quota"
    assert "rate" not in error["message"].lower()
