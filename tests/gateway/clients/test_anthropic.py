"""The official anthropic client against the gateway: its own types, errors and retries."""

import asyncio

import anthropic
import pytest

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.gateway.front import Limits
from tests.gateway.clients.door import door, until
from tests.gateway.world import Slow, call, says

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "bash", "description": "Run.", "input_schema": {"type": "object"}}
ASK = {"model": "policy", "max_tokens": 400, "messages": [USER]}


def client(at, **kwargs):
    return anthropic.Anthropic(
        **{"base_url": at.root, "api_key": at.key, "max_retries": 0, **kwargs}
    )


def test_messages_with_tools_over_two_turns():
    with door(says("<think>hm</think>I look." + call(command="ls"), "done")) as at:
        body = {**ASK, "tools": [TOOL], "system": "be brief"}
        first = client(at).messages.create(**body)
        use = first.content[-1]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "out"}
        history = [
            USER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = client(at).messages.create(**{**body, "messages": history})
        recorded = at.close()
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert use.input == {"command": "ls"}
    assert second.content[0].text == "done"
    one, two = recorded.turns
    known = (*one.prompt_ids, *one.completion.token_ids)
    assert two.prompt_ids[: len(known)] == known
    assert recorded.counts.get("forks", 0) == 0


def test_a_stream():
    text = "I look. " * 1000
    with (
        door(says("<think>hm</think>" + text + call(command="é" * 2000))) as at,
        client(at).messages.stream(
            **{**ASK, "max_tokens": 60_000},
            tools=[TOOL],
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream,
    ):
        seen = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert seen == final.content[1].text == text
    assert final.stop_reason == "tool_use"
    assert final.content[0].thinking == "hm"
    assert final.content[2].input == {"command": "é" * 2000}
    with (
        door(says("I look." + call(command="ls"))) as at,
        client(at).messages.stream(**ASK, tools=[TOOL]) as stream,
    ):
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].input == {"command": "ls"}
    assert final.usage.output_tokens > 7


def test_a_stream_that_waits_is_kept_alive():
    class Later(Slow):
        async def generate(self, *args):
            self.go.set()
            await asyncio.sleep(0.3)
            return await super().generate(*args)

    with door(Later("ok"), limits=Limits(keep_alive_s=0.05)) as at:
        kinds = [event.type for event in client(at).messages.create(**ASK, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_tokens_are_counted():
    with door(says("ok")) as at:
        counted = client(at).messages.count_tokens(model="policy", messages=[USER])
        answer = client(at).messages.create(**ASK)
        recorded = at.close()
    assert counted.input_tokens == answer.usage.input_tokens
    assert len(recorded.turns) == 1


def test_models():
    with door(says()) as at:
        assert [model.id for model in client(at).models.list()] == ["policy"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (anthropic.AuthenticationError, {"api_key": "sk-wrong-wrong-wrong"}),
        (anthropic.NotFoundError, {"model": "claude-9"}),
        (anthropic.BadRequestError, {"messages": [{"role": "system", "content": "x"}]}),
        (anthropic.BadRequestError, {"extra_body": {"temperature": 9}}),
        (
            anthropic.BadRequestError,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}
                ]
            },
        ),
        (
            anthropic.BadRequestError,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        ),
    ],
)
def test_errors(kind, change):
    change = dict(change)
    with door(says("ok")) as at:
        asking = client(at, api_key=change.pop("api_key", at.key), max_retries=2)
        with pytest.raises(kind) as caught:
            asking.messages.create(**{**ASK, **change})
        assert caught.value.request_id.startswith("req_")
        assert caught.value.body["type"] == "error"
        assert client(at).messages.create(**ASK)


def test_budgets_end_an_agent_and_are_not_asked_again():
    with door(says("ok"), budget=Budget(turns=1, context=200)) as at:
        asking = client(at, max_retries=5)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            asking.messages.create(**{**ASK, "messages": [{**USER, "content": "y" * 400}]})
        asking.messages.create(**ASK)
        with pytest.raises(anthropic.PermissionDeniedError):
            asking.messages.create(**{**ASK, "messages": [{**USER, "content": "2"}]})
        recorded = at.close()
        with pytest.raises(anthropic.AuthenticationError):
            asking.messages.create(**ASK)
    assert recorded.counts["refused_turns"] == recorded.counts["refused_context"] == 1


def test_the_clients_own_retry_heals_a_fault():
    with door(says(GenerationError("died"), "ok")) as at:
        answer = client(at, max_retries=2).messages.create(**ASK)
        recorded = at.close()
    assert answer.content[0].text == "ok"
    assert recorded.fault is None


def test_a_fault_in_a_stream_that_began_is_raised():
    class Fails(Slow):
        async def generate(self, *args):
            await asyncio.sleep(0.2)
            raise GenerationError("died")

    with (
        door(Fails(), limits=Limits(keep_alive_s=0.05)) as at,
        pytest.raises(anthropic.APIStatusError, match="generation failed"),
    ):
        list(client(at).messages.create(**ASK, stream=True))


def test_a_client_that_times_out_aborts_and_may_come_again():
    generator = Slow("ok")
    with door(generator) as at:
        with pytest.raises(anthropic.APITimeoutError):
            client(at, timeout=0.3).messages.create(**ASK)
        until(lambda: generator.cancelled)
        generator.go.set()
        assert client(at).messages.create(**ASK).content[0].text == "ok"
        recorded = at.close()
    assert generator.cancelled == 1
    assert len(recorded.turns) == 1
    assert recorded.fault is None
