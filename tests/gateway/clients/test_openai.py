"""The official openai client against the gateway: its own types, errors and retries."""

import asyncio
import json

import openai
import pytest

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.gateway.front import Limits
from tests.gateway.clients.door import door, until
from tests.gateway.world import TOOL, Slow, call, completion, says

USER = {"role": "user", "content": "hi"}
FLAT = {"type": "function", "name": "bash", "description": "Run.", "parameters": {"type": "object"}}
THOUGHT = "<think>hm</think>"


def client(at, **kwargs):
    return openai.OpenAI(**{"base_url": at.url, "api_key": at.key, "max_retries": 0, **kwargs})


def follow(client, messages, said):
    """Send the tool's output after an answer that called one."""
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "out"}
    return client.chat.completions.create(
        model="policy", messages=[*messages, said, result], tools=[TOOL]
    )


def test_chat_with_tools_over_two_turns():
    with door(says(THOUGHT + "I look." + call(command="ls"), "done")) as at:
        first = client(at).chat.completions.create(model="policy", messages=[USER], tools=[TOOL])
        said = first.choices[0].message
        second = follow(client(at), [USER], said)
        recorded = at.close()
    assert first.choices[0].finish_reason == "tool_calls"
    assert (said.content, said.reasoning_content) == ("I look.", "hm")
    assert json.loads(said.tool_calls[0].function.arguments) == {"command": "ls"}
    assert second.choices[0].message.content == "done"
    assert second.usage.total_tokens == second.usage.prompt_tokens + 5
    one, two = recorded.turns
    known = (*one.prompt_ids, *one.completion.token_ids)
    assert two.prompt_ids[: len(known)] == known
    assert recorded.counts.get("forks", 0) == 0


def test_a_chat_stream():
    text = "I look. " * 2000
    with door(says(text + call(command="ls") + call(command="pwd"))) as at:
        stream = client(at).chat.completions.create(
            model="policy",
            messages=[USER],
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens > len(text)
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    with (
        door(says("I look." + call(command="ls"))) as at,
        client(at).chat.completions.stream(model="policy", messages=[USER], tools=[TOOL]) as helper,
    ):
        final = helper.get_final_completion()
    assert final.choices[0].message.content == "I look."
    assert final.choices[0].message.tool_calls[0].function.name == "bash"


def test_logprobs():
    sampled = completion("ok")
    with door(says(sampled)) as at:
        answer = client(at).chat.completions.create(model="policy", messages=[USER], logprobs=True)
    told = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in told] == list(sampled.logprobs)


def test_responses_with_tools_over_two_turns():
    with door(says(call(command="ls"), "done", "again")) as at:
        create = client(at).responses.create
        first = create(model="policy", input="hi", tools=[FLAT], instructions="be brief")
        item = first.output[0]
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "out"}
        second = create(
            model="policy",
            input=[output],
            previous_response_id=first.id,
            tools=[FLAT],
            instructions="be brief",
        )
        # the other way: the client keeps the items itself
        third = create(
            model="policy",
            input=[USER, *first.output, output, *second.output, {**USER, "content": "more"}],
            tools=[FLAT],
            instructions="be brief",
        )
        recorded = at.close()
    assert (item.type, item.name, json.loads(item.arguments)) == (
        "function_call",
        "bash",
        {"command": "ls"},
    )
    assert (first.status, second.output_text, third.output_text) == ("completed", "done", "again")
    for before, after in zip(recorded.turns, recorded.turns[1:], strict=False):
        known = (*before.prompt_ids, *before.completion.token_ids)
        assert after.prompt_ids[: len(known)] == known


def test_a_responses_stream():
    with (
        door(says(THOUGHT + "I look." + call(command="ls"))) as at,
        client(at).responses.stream(
            model="policy", input="hi", tools=[FLAT], reasoning={"effort": "low"}
        ) as stream,
    ):
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert seen[0] == "response.created"
    assert seen[-1] == "response.completed"
    assert "response.output_text.delta" in seen
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "I look."


def test_a_stream_that_waits_is_kept_alive():
    class Later(Slow):
        async def generate(self, *args):
            self.go.set()
            await asyncio.sleep(0.3)
            return await super().generate(*args)

    with door(Later(), limits=Limits(keep_alive_s=0.05)) as at:
        for stream in (
            client(at).chat.completions.create(model="policy", messages=[USER], stream=True),
            client(at).responses.create(model="policy", input="ho", stream=True),
        ):
            assert list(stream)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (openai.AuthenticationError, {"api_key": "sk-wrong-wrong-wrong"}),
        (openai.NotFoundError, {"model": "gpt-9"}),
        (openai.BadRequestError, {"messages": [{"role": "wizard", "content": "x"}]}),
        (openai.BadRequestError, {"n": 2}),
        (openai.BadRequestError, {"temperature": 9}),
        (
            openai.BadRequestError,
            {"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]},
        ),
        (
            openai.BadRequestError,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}],
                    }
                ]
            },
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(kind, change, stream):
    change = dict(change)
    with door(says("ok")) as at:
        asking = client(at, api_key=change.pop("api_key", at.key), max_retries=2)
        body = {"model": "policy", "messages": [USER], "stream": stream, **change}
        with pytest.raises(kind) as caught:
            asking.chat.completions.create(**body)
        assert caught.value.request_id.startswith("req_")
        assert client(at).chat.completions.create(model="policy", messages=[USER])


def test_budgets_end_an_agent_and_are_not_asked_again():
    with door(says("ok"), budget=Budget(turns=1, context=200)) as at:
        asking = client(at, max_retries=5)
        with pytest.raises(openai.BadRequestError) as full:
            asking.chat.completions.create(
                model="policy", messages=[{**USER, "content": "y" * 400}]
            )
        asking.chat.completions.create(model="policy", messages=[USER])
        with pytest.raises(openai.PermissionDeniedError) as spent:
            asking.chat.completions.create(model="policy", messages=[{**USER, "content": "2"}])
        recorded = at.close()
        with pytest.raises(openai.AuthenticationError):
            asking.chat.completions.create(model="policy", messages=[USER])
    assert full.value.code == "context_length_exceeded"
    assert spent.value.code == "insufficient_quota"
    assert recorded.counts["refused_turns"] == recorded.counts["refused_context"] == 1


def test_the_clients_own_retry_heals_a_fault():
    with door(says(GenerationError("died"), "ok")) as at:
        answer = client(at, max_retries=2).chat.completions.create(model="policy", messages=[USER])
        recorded = at.close()
    assert answer.choices[0].message.content == "ok"
    assert recorded.fault is None
    with door(says(GenerationError("died"))) as at:
        with pytest.raises(openai.InternalServerError):
            client(at).chat.completions.create(model="policy", messages=[USER])
        assert at.close().fault is not None


def test_a_fault_in_a_stream_that_began_is_raised():
    class Fails(Slow):
        async def generate(self, *args):
            await asyncio.sleep(0.2)
            raise GenerationError("died")

    with door(Fails(), limits=Limits(keep_alive_s=0.05)) as at:
        for create, body in (
            (client(at).chat.completions.create, {"messages": [USER]}),
            (client(at).responses.create, {"input": "hi"}),
        ):
            with pytest.raises(openai.APIError, match="generation failed"):
                list(create(model="policy", stream=True, **body))


def test_a_client_that_times_out_aborts_and_may_come_again():
    generator = Slow("ok")
    with door(generator) as at:
        impatient = client(at, timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(model="policy", messages=[USER])
        until(lambda: generator.cancelled)
        generator.go.set()
        answer = client(at).chat.completions.create(model="policy", messages=[USER])
        recorded = at.close()
    assert answer.choices[0].message.content == "ok"
    assert generator.cancelled == 1
    assert len(recorded.turns) == 1
    assert recorded.fault is None


def test_models():
    with door(says()) as at:
        assert [model.id for model in client(at).models.list()] == ["policy"]
        assert client(at).models.retrieve("policy").id == "policy"


def test_two_clients_of_one_session_at_once():
    """The same history joins, different ones run side by side; nothing is lost or crossed."""

    class Echo:
        async def generate(self, prompt_ids, sampling, session):
            await asyncio.sleep(0.05)
            said = bytes(i for i in prompt_ids if i < 256).decode()
            return completion(said.split("user\n")[-1].split("\n")[0])

    async def inside(at):
        asking = openai.AsyncOpenAI(base_url=at.url, api_key=at.key, max_retries=0)

        async def one(word):
            user = {"role": "user", "content": word}
            answer = await asking.chat.completions.create(model="policy", messages=[user])
            return answer.id, answer.choices[0].message.content

        answers = await asyncio.gather(*(one(f"w{i % 4}") for i in range(12)))
        await asking.close()
        return answers

    with door(Echo()) as at:
        answers = asyncio.run(inside(at))
        recorded = at.close()
    assert len(recorded.turns) == 4
    assert len({ident for ident, _ in answers}) == 4
    assert [said for _, said in answers] == [f"w{i % 4}" for i in range(12)]
