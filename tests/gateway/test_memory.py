"""What a session remembers of its requests changes what a turn costs, and nothing else."""

import asyncio
import gc
import json
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.gateway.dialects.anthropic import Anthropic
from skyrl_jax.gateway.dialects.base import read_request
from skyrl_jax.gateway.dialects.fields import read_json
from skyrl_jax.gateway.dialects.openai_chat import OpenAIChat
from skyrl_jax.gateway.dialects.openai_responses import OpenAIResponses
from skyrl_jax.gateway.refusals import Refused
from tests.gateway.world import SAMPLING, ByteRenderer, Client, call, chat, gateway, run, says

USER = {"role": "user", "content": "hi"}


def called(ident, arguments='{"n": 1}'):
    function = {"name": "bash", "arguments": arguments}
    calls = [{"id": ident, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def used(ident, **arguments):
    block = {"type": "tool_use", "id": ident, "name": "bash", "input": arguments}
    return {"role": "assistant", "content": [{"type": "text", "text": "I look"}, block]}


def result(ident):
    block = {"type": "tool_result", "tool_use_id": ident, "content": "out"}
    return {"role": "user", "content": [block, {"type": "text", "text": "and?"}]}


def item(ident, arguments="{}"):
    return {"type": "function_call", "call_id": ident, "name": "bash", "arguments": arguments}


# per dialect: the key of its list, and what may stand in it, the good ones first
POOLS = {
    OpenAIChat: (
        "messages",
        [
            USER,
            {"role": "user", "content": [{"type": "text", "text": "\ud83d\ude00"}]},
            called("c1"),
            {"role": "tool", "tool_call_id": "c1", "content": "out"},
            called("c2", '{"n": true}'),
            {"role": "tool", "tool_call_id": "c2", "content": "out"},
            {"role": "assistant", "content": "ä", "reasoning_content": "hm"},
            {"role": "wizard", "content": "x"},
            {"role": "user", "content": [{"type": "image_url"}]},
            7,
        ],
    ),
    Anthropic: (
        "messages",
        [
            USER,
            used("c1", n=1),
            used("c1", n=True),
            result("c1"),
            used("c2"),
            result("c2"),
            {"role": "system", "content": "x"},
            {"role": "user", "content": []},
            None,
        ],
    ),
    OpenAIResponses: (
        "input",
        [
            USER,
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": "so"},
            item("c1"),
            {"type": "function_call_output", "call_id": "c1", "output": "out"},
            item("c2", '{"n": 1.0}'),
            {"type": "function_call_output", "call_id": "c2", "output": "out"},
            item("c3", "no JSON"),
            {"type": "web_search_call"},
        ],
    ),
}
HEADS = [{"model": "policy", "max_tokens": 9}, {"max_tokens": 8, "model": "ä"}, {"n": 1}]
HELD = ToolCall(name="bash", arguments={}, id="c2")
HOLDER = Message(role="assistant", content="", tool_calls=(HELD,))
PAST = {"aa": (Message(role="user", content="hi"), HOLDER)}


def outcome(dialect, raw, memory, *, counting=False):
    try:
        if counting:
            return dialect.parse_count(read_json(raw, memory.bodies), memory)
        return read_request(dialect, raw, memory)
    except Refused as refused:
        return refused.cause, refused.message, refused.param


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),  # how many of the last messages are taken back
        st.lists(st.integers(0, 99), max_size=4),
        st.integers(0, 2),  # what stands before the list
        st.booleans(),
        st.sampled_from([None, None, 1]),
    ),
    max_size=8,
)


@pytest.mark.parametrize("made", POOLS)
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_a_request_is_read_as_if_it_were_the_first(made, steps):
    dialect, (key, pool) = made(), POOLS[made]
    memory, sent = dialect.memory(PAST.get), []
    for back, new, head, odd, indent in steps:
        good = len(pool) if odd else len(pool) - 3
        sent = [*sent[: max(0, len(sent) - back)], *(pool[n % good] for n in new)]
        body = {**HEADS[head], key: sent}
        if odd and made is OpenAIResponses:
            body["previous_response_id"] = "resp_aa"
        raw = json.dumps(body, indent=indent).encode()
        counting = odd and made is Anthropic
        found = outcome(dialect, raw, memory, counting=counting)
        assert repr(found) == repr(
            outcome(dialect, raw, dialect.memory(PAST.get), counting=counting)
        )


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"messages": [1, NaN]}', "NaN is no JSON number"),
        (b'{"messages": [1, 1e999]}', "1e999 is too large a number"),
        (b'{"messages": [1, "\\ud800"]}', "surrogates not allowed"),
        (b'{"messages": [1, "\xff"]}', "invalid start byte"),
        (b'{"messages": [1, ' + b"[" * 200_000, "nested too deeply"),
        (b'{"messages": [1, 2', "Expecting ',' delimiter: line 1 column 19 (char 18)"),
        (b'[{"messages": [1, 2]}]', "must be a JSON object"),
    ],
)
def test_a_body_is_refused_in_the_same_words_with_and_without_memory(raw, said):
    memory = OpenAIChat().memory(PAST.get)
    read_json(b'{"messages": [1, 2]}', memory.bodies)
    words = []
    for bodies in (None, memory.bodies):
        with pytest.raises(Refused) as caught:
            read_json(raw, bodies)
        words.append(caught.value.message)
    assert words[0] == words[1] and said in words[0]


def test_a_run_of_items_that_was_read_comes_back_as_the_same_message():
    dialect = OpenAIResponses()
    memory, pool = dialect.memory(PAST.get), POOLS[OpenAIResponses][1]
    raw = [json.dumps({"model": "m", "input": pool[:end]}).encode() for end in (5, 7)]
    first, second = (read_request(dialect, one, memory).messages for one in raw)
    roles = [message.role for message in second]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    assert all(one is other for one, other in zip(first, second, strict=False))


def test_the_gateway_reads_a_turn_by_what_it_remembers_of_those_before():
    """Two clients take turns in one session; each one's history is decoded and parsed once."""

    async def action(client, session, gate):
        threads, firsts = [[USER], [{"role": "user", "content": "sub"}]], []
        for turn in range(4):
            for thread in threads:
                status, body, _ = await client.post("/v1/chat/completions", chat(*thread))
                assert status == 200
                said = body["choices"][0]["message"]
                ident = said["tool_calls"][0]["id"]
                more = {"role": "tool", "tool_call_id": ident, "content": f"out {turn}"}
                thread += [said, more]
            (memory,) = session._memories.values()
            assert len(memory.bodies._known) == len(memory.history._known) == 2
            firsts.append([known.raw[0] for known in memory.history._known])
            firsts.append([known.items[0] for known in memory.bodies._known])
        return threads, firsts

    generator = says(*(f"{n}" + call(command=f"ls {n}") for n in range(8)))
    (threads, firsts), recorded = run(action, generator)
    for later in firsts[1:]:
        assert all(one is other for one, other in zip(firsts[0], later, strict=True))
    for number, thread in enumerate(threads):
        said = [message["content"] for message in thread if message["role"] == "assistant"]
        assert said == [str(2 * turn + number) for turn in range(4)]
    assert recorded.counts["forks"] == 1  # the second thread's own root
    prompts = [bytes(i for i in ids if i < 256).decode() for ids, _, _ in generator.calls]
    for prompt in prompts[1::2]:
        assert "user\nsub" in prompt and "user\nhi" not in prompt


def test_counting_tokens_and_asking_share_what_was_read():
    body = {"model": "policy", "messages": [USER]}

    async def action(client, session, gate):
        _, counted, _ = await client.post("/v1/messages/count_tokens", body)
        (memory,) = session._memories.values()
        first = memory.bodies._known[-1].items[0]
        _, answer, _ = await client.post("/v1/messages", {"max_tokens": 9, **body})
        assert memory.bodies._known[-1].items[0] is first and len(memory.bodies._known) == 1
        return counted["input_tokens"], answer["usage"]["input_tokens"]

    (counted, used_up), _ = run(action, says("ok"))
    assert counted == used_up == len(ByteRenderer().initial([Message(role="user", content="hi")]))


def test_what_a_closed_session_remembered_is_freed_without_the_collector():
    async def inside():
        async with gateway(says("ok")) as gate:
            session = await gate.open("s", sampling=SAMPLING)
            async with Client(session) as client:
                assert (await client.chat("hi"))[0] == 200
            (memory,) = session._memories.values()
            left = [weakref.ref(memory.bodies), weakref.ref(memory.history)]
            kept = weakref.ref(session)
            del memory
            gc.disable()
            try:
                await session.close()
                found = [ref() for ref in left]
            finally:
                gc.enable()
            with pytest.raises(Refused):
                session.memory(OpenAIChat())
            return found, kept() is session

    assert asyncio.run(inside()) == ([None, None], True)
