"""The responses dialect by itself."""

import json

import pytest

from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.gateway.calls import ChatRequest
from skyrl_jax.gateway.dialects.openai_responses import OpenAIResponses
from skyrl_jax.gateway.refusals import Refused
from tests.gateway.world import answer, events

DIALECT = OpenAIResponses()
CALL = {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"n": 1}'}
USER = {"role": "user", "content": "hi"}
OUT = {"type": "function_call_output", "call_id": "c1", "output": "out"}
TOOL = {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": True}


def parse(value, past=None, **fields):
    memory = DIALECT.memory(past or (lambda _: None))
    return DIALECT.parse({"model": "policy", "input": value, **fields}, memory)


def test_a_text_is_one_user_message():
    request = parse("hi", instructions="be", tools=[TOOL], max_output_tokens=4, temperature=0.5)
    assert request.messages == (
        Message(role="system", content="be"),
        Message(role="user", content="hi"),
    )
    assert request.carried == (Message(role="user", content="hi"),)
    assert (request.tools[0].name, request.tools[0].description) == ("bash", "")
    assert (request.max_tokens, request.asked) == (4, {"temperature": 0.5})
    assert parse("hi", store=False).carried is None


def test_a_run_of_items_is_one_turn_of_the_assistant():
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a"}],
    }
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    request = parse([USER, thought, said, CALL, OUT, said, said, {**USER, "content": "end"}])
    call = ToolCall(name="bash", arguments={"n": 1})
    assert request.messages == (
        Message(role="user", content="hi"),
        Message(role="assistant", content="a", tool_calls=(call,), reasoning="t"),
        Message(role="tool", content="out"),
        Message(role="assistant", content="a"),
        Message(role="assistant", content="a"),
        Message(role="user", content="end"),
    )


def test_two_calls_are_one_turn_and_encrypted_reasoning_is_left_out():
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
    second = {**CALL, "call_id": "c2"}
    request = parse([hidden, CALL, second, OUT, {**OUT, "call_id": "c2"}])
    assert [message.role for message in request.messages] == ["assistant", "tool", "tool"]
    assert len(request.messages[0].tool_calls) == 2
    assert request.messages[0].reasoning is None


def test_a_kept_answer_is_continued():
    known = (
        Message(role="user", content="hi"),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(name="bash", arguments={}, id="c1"),),
        ),
    )
    request = parse([OUT], past={"ab": known}.get, previous_response_id="resp_ab")
    assert request.messages == (*known, Message(role="tool", content="out"))
    assert request.carried == request.messages
    with pytest.raises(Refused, match="'resp_no' not found") as caught:
        parse("hi", past={"ab": known}.get, previous_response_id="resp_no")
    error = DIALECT.error(caught.value, "")["error"]
    assert error["code"] == "previous_response_not_found"
    with pytest.raises(Refused, match="cannot be continued"):
        parse([], past={"ab": known}.get, previous_response_id="resp_ab")


@pytest.mark.parametrize(
    ("value", "fields", "param"),
    [
        (None, {}, "input"),
        ([], {}, "input"),
        (3, {}, "input"),
        (["hi"], {}, "input"),
        ([{"role": "wizard", "content": "x"}], {}, "input[0].role"),
        ([OUT], {}, "input[0].call_id"),
        ([{"type": "item_reference", "id": "x"}], {}, "input[0].type"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            {},
            "input[0].content[0].type",
        ),
        ("hi", {"background": True}, "background"),
        ("hi", {"conversation": "c"}, "conversation"),
        ("hi", {"temperature": "hot"}, "temperature"),
        ("hi", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("hi", {"include": "x"}, "include"),
        ("hi", {"top_logprobs": 3}, "top_logprobs"),
        ("hi", {"instructions": 3}, "instructions"),
        ("hi", {"previous_response_id": 3}, "previous_response_id"),
    ],
)
def test_a_bad_body_names_its_field(value, fields, param):
    with pytest.raises(Refused) as caught:
        parse(value, **fields)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_an_answer_and_its_events_agree():
    calls = (ToolCall(name="bash", arguments={"i": 1}, id="c1"),)
    message = Message(role="assistant", content="x" * 5000, reasoning="hm", tool_calls=calls)
    request = ChatRequest(
        messages=(), model="m", show_reasoning=True, carried=(), echo={"metadata": {"a": "b"}}
    )
    whole = DIALECT.answer(request, answer(message))
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert (whole["status"], whole["store"], whole["metadata"]) == ("completed", True, {"a": "b"})
    assert whole["id"] == "resp_" + "0f" * 16
    listed = events(b"".join(DIALECT.events(request, answer(message))))
    assert [data["sequence_number"] for _, data in listed] == list(range(len(listed)))
    assert all(name == data["type"] for name, data in listed)
    assert [listed[0][0], listed[1][0], listed[-1][0]] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert listed[-1][1]["response"] == whole
    texts = [d["delta"] for n, d in listed if n == "response.output_text.delta"]
    assert len(texts) == 2 and "".join(texts) == message.content
    done = [d["item"] for n, d in listed if n == "response.output_item.done"]
    assert done == whole["output"]
    arguments = [d["delta"] for n, d in listed if n == "response.function_call_arguments.delta"]
    assert json.loads("".join(arguments)) == {"i": 1}


def test_a_cut_answer_is_incomplete():
    request = ChatRequest(messages=(), model="m")
    cut = answer(Message(role="assistant", content="x"), "length")
    whole = DIALECT.answer(request, cut)
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert events(b"".join(DIALECT.events(request, cut)))[-1][0] == "response.incomplete"


def test_thinking_is_shown_only_to_who_asked_for_it():
    message = Message(role="assistant", content="x", reasoning="hm")
    plain = DIALECT.answer(ChatRequest(messages=(), model="m"), answer(message))
    assert [item["type"] for item in plain["output"]] == ["message"]


def test_logprobs_are_of_the_sampled_tokens_and_have_no_alternatives():
    request = parse("hi", include=["message.output_text.logprobs"], top_logprobs=0)
    (message,) = DIALECT.answer(request, answer(Message(role="assistant", content="<")))["output"]
    told = message["content"][0]["logprobs"]
    assert told and all(entry["top_logprobs"] == [] for entry in told)
