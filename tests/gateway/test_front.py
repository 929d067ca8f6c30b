"""The gateway over HTTP: who may ask, what is answered, what is refused and in which shape."""

import asyncio
import json

import aiohttp
import pytest

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.core.types import Message
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.gateway.front import Limits
from tests.gateway.world import (
    SAMPLING,
    TOOL,
    Client,
    Slow,
    call,
    chat,
    completion,
    events,
    gateway,
    run,
    says,
)


def test_every_dialect_is_answered():
    async def action(client, session, gate):
        found = {path: await client.post(path, body) for path, body in BODIES.items()}
        found["path"] = await client.post("/s/task%2F0/v1/chat/completions", chat("path"))
        return found

    found, recorded = run(action, says("one", "two", "three"))
    assert {status for status, _, _ in found.values()} == {200}
    chat_body = found["/v1/chat/completions"][1]
    assert chat_body["choices"][0]["message"]["content"] == "one"
    # the same history in another dialect is the same call
    assert found["/v1/responses"][1]["output"][0]["content"][0]["text"] == "one"
    # another limit of the answer is another call
    assert found["/v1/messages"][1]["content"] == [{"type": "text", "text": "two"}]
    assert found["path"][1]["choices"][0]["message"]["content"] == "three"
    assert len(recorded.turns) == 3
    headers = found["/v1/messages"][2]
    assert headers["request-id"] == headers["x-request-id"]


def test_a_session_is_named_by_key_path_or_header():
    async def action(client, session, gate):
        other = await gate.open("other", sampling=SAMPLING)
        seen = {}
        for name, headers, prefix in (
            ("bearer", {"Authorization": f"Bearer {session.key}"}, ""),
            ("x-api-key", {"x-api-key": session.key}, ""),
            ("path", {"X": "1"}, "/s/task%2F0"),
            ("header", {"X-Session-Id": "task/0"}, ""),
            ("key and path", {"x-api-key": session.key}, "/s/task%2F0"),
            ("both keys", {"x-api-key": session.key, "Authorization": f"Bearer {session.key}"}, ""),
            ("doubled v1", {"X": "1"}, "/s/task%2F0/v1"),
            ("nobody", {"X": "1"}, ""),
            ("wrong key", {"x-api-key": "sk-skyrl-wrongwrongwrong"}, ""),
            ("wrong key and path", {"x-api-key": "sk-no"}, "/s/task%2F0"),
            ("other's path", {"x-api-key": session.key}, "/s/other"),
            (
                "two sessions",
                {"x-api-key": session.key, "Authorization": f"Bearer {other.key}"},
                "",
            ),
            ("unknown", {"X": "1"}, "/s/nobody"),
        ):
            async with Client(session, **headers) as asking:
                status, body, _ = await asking.post(f"{prefix}/v1/chat/completions", chat("hi"))
            seen[name] = status, body
        return seen

    seen, recorded = run(action, says("ok"))
    statuses = {name: status for name, (status, _) in seen.items()}
    assert statuses == {
        "bearer": 200,
        "x-api-key": 200,
        "path": 200,
        "header": 200,
        "key and path": 200,
        "both keys": 200,
        "doubled v1": 200,
        "nobody": 401,
        "wrong key": 401,
        "wrong key and path": 401,
        "other's path": 401,
        "two sessions": 401,
        "unknown": 404,
    }
    assert "wrongwrong" not in json.dumps(seen["wrong key"][1])
    assert len(recorded.turns) == 1


def test_a_gateway_with_a_key_wants_one():
    async def action(client, session, gate):
        seen = []
        for headers in ({"X": "1"}, {"x-api-key": "gate"}, {"x-api-key": session.key}):
            async with Client(session, **headers) as asking:
                path = "/s/task%2F0/v1/chat/completions"
                seen.append((await asking.post(path, chat("hi")))[0])
        return seen

    assert run(action, says("ok"), api_key="gate")[0] == [401, 200, 200]


@pytest.mark.parametrize("path", BODIES)
def test_a_closed_session_is_refused(path):
    async def action(client, session, gate):
        await session.close()
        by_key = await client.post(path, BODIES[path])
        async with Client(session, X="1") as asking:
            by_name = await asking.post(f"/s/task%2F0{path}", BODIES[path])
        return by_key, by_name

    answers, _ = run(action, says())
    for status, body, headers in answers:
        assert status == 401
        assert "closed" in error_of(path, body)[2]
        assert headers["x-should-retry"] == "false"


def test_unknown_paths_and_methods():
    async def action(client, session, gate):
        return [
            (await client.post("/v1/embeddings", {}))[:2],
            (await client.post("/nothing", {}))[:2],
            await client.get("/v1/messages"),
        ]

    (first, second, third), _ = run(action, says())
    assert (first[0], second[0], third[0]) == (404, 404, 405)
    assert first[1]["error"]["code"] == "unknown_url"
    assert third[1]["error"]["type"] == "invalid_request_error"


def test_models_are_listed_in_both_shapes():
    async def action(client, session, gate):
        return [
            await client.get("/v1/models"),
            await client.get("/v1/models", **{"anthropic-version": "2023-06-01"}),
            await client.get("/v1/models/policy"),
            await client.get("/v1/models/gpt-9"),
        ]

    (plain, other, one, none), _ = run(action, says(), aux_models=("small",))
    assert [model["id"] for model in plain[1]["data"]] == ["policy", "small"]
    assert (plain[1]["object"], other[1]["has_more"]) == ("list", False)
    assert other[1]["data"][0]["type"] == "model"
    assert one[1]["id"] == "policy"
    assert (none[0], none[1]["error"]["code"]) == (404, "model_not_found")


def test_tokens_are_counted_and_not_recorded():
    async def action(client, session, gate):
        counted = await client.post("/v1/messages/count_tokens", {**MESSAGES, "max_tokens": None})
        _, body, _ = await client.post("/v1/messages?beta=true", MESSAGES)
        return counted, body["usage"]["input_tokens"]

    ((status, body, _), used), recorded = run(action, says("ok"), budget=Budget(turns=1))
    assert (status, body) == (200, {"input_tokens": used})
    assert len(recorded.turns) == 1


def test_an_auxiliary_model_or_header_marks_a_call():
    async def action(client, session, gate):
        await client.post("/v1/chat/completions", chat("a", model="small"))
        await client.post("/v1/chat/completions", chat("b"), **{"X-Call-Kind": "aux"})
        await client.post("/v1/chat/completions", chat("c"))

    _, recorded = run(action, says("1", "2", "3"), aux_models=("small",))
    assert [turn.kind for turn in recorded.turns] == ["aux", "aux", "agent"]


def test_a_response_is_continued_by_its_id():
    generator = says(call(command="ls"), "done")

    async def action(client, session, gate):
        tools = [{"type": "function", "name": "bash", "parameters": {"type": "object"}}]
        body = {**RESPONSES, "tools": tools}
        _, first, _ = await client.post("/v1/responses", body)
        item = first["output"][0]
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "out"}
        follow = {**body, "input": [output], "previous_response_id": first["id"]}
        _, second, _ = await client.post("/v1/responses", follow)
        lost = await client.post("/v1/responses", {**follow, "previous_response_id": "resp_x"})
        return item, second, lost

    (item, second, lost), recorded = run(action, generator)
    assert (item["type"], item["name"]) == ("function_call", "bash")
    assert second["output"][0]["content"][0]["text"] == "done"
    assert lost[0] == 400
    assert lost[1]["error"]["code"] == "previous_response_not_found"
    first, follow = recorded.turns
    known = (*first.prompt_ids, *first.completion.token_ids)
    assert follow.prompt_ids[: len(known)] == known


@pytest.mark.parametrize("path", BODIES)
def test_budgets_are_told_in_each_dialect(path):
    async def action(client, session, gate):
        long = json.loads(json.dumps(BODIES[path]).replace('"hi"', '"' + "y" * 300 + '"'))
        context = await client.post(path, long)
        await client.post(path, BODIES[path])
        other = json.loads(json.dumps(BODIES[path]).replace('"hi"', '"more"'))
        return context, await client.post(path, other)

    (context, turns), recorded = run(action, says("ok"), budget=Budget(turns=1, context=200))
    assert (context[0], turns[0]) == (400, 403)
    kind, code, message = error_of(path, context[1])
    assert kind == "invalid_request_error"
    if path == "/v1/messages":
        assert message.startswith("prompt is too long")
        assert error_of(path, turns[1])[0] == "permission_error"
    else:
        assert code == "context_length_exceeded"
        assert error_of(path, turns[1])[:2] == ("insufficient_quota", "insufficient_quota")
    assert turns[2]["x-should-retry"] == "false"
    assert recorded.limit == "turns"


@pytest.mark.parametrize("path", BODIES)
def test_a_host_fault_is_503_and_the_session_remembers(path):
    async def action(client, session, gate):
        return await client.post(path, BODIES[path])

    (status, body, headers), recorded = run(action, says(GenerationError("http://secret:1 died")))
    assert status == 503
    assert "secret" not in error_of(path, body)[2]
    assert (headers["x-should-retry"], headers["Retry-After"]) == ("true", "1")
    assert "secret" in str(recorded.fault)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_generation(path, stream):
    generator = Slow()

    async def action(client, session, gate):
        asking = asyncio.ensure_future(client.post(path, {**BODIES[path], "stream": stream}))
        await generator.begun.wait()
        asking.cancel()
        while not generator.cancelled:
            await asyncio.sleep(0.01)

    limits = Limits(keep_alive_s=0.02)
    _, recorded = run(action, generator, limits=limits)
    assert generator.cancelled == 1
    assert recorded.counts["left"] == 1
    assert recorded.fault is None
    assert recorded.turns == ()


def test_an_idempotency_key_holds_over_http():
    async def action(client, session, gate):
        headers = {"Idempotency-Key": "k"}
        one = await client.post("/v1/chat/completions", chat("hi"), **headers)
        two = await client.post("/v1/chat/completions", chat("hi"), **headers)
        other = await client.post("/v1/chat/completions", chat("ho"), **headers)
        return one, two, other

    (one, two, other), _ = run(action, says("ok"))
    assert one[1] == two[1]
    assert other[0] == 400


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_it_is_alive_and_then_all(path):
    generator = Slow("ok " + call(command="ls"))

    async def action(client, session, gate):
        asking = asyncio.ensure_future(
            client.post(path, {**BODIES[path], "stream": True}, raw=True)
        )
        await generator.begun.wait()
        await asyncio.sleep(0.15)
        generator.go.set()
        return await asking

    (status, raw, headers), _ = run(action, generator, limits=Limits(keep_alive_s=0.05))
    assert status == 200
    assert headers["Content-Type"] == "text/event-stream"
    if path == "/v1/messages":
        names = [name for name, _ in events(raw)]
        assert names[0] == "ping"
        assert names[-1] == "message_stop"
    else:
        assert raw.startswith(b": keep-alive\n\n")
        assert b"ok " in raw
    assert b"bash" in raw


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("late", [False, True])
def test_a_fault_in_a_stream(path, late):
    """Before the first event a plain 503; afterwards the dialect's error event."""

    class Fails(Slow):
        async def generate(self, prompt_ids, sampling, session):
            if late:
                await asyncio.sleep(0.15)
            raise GenerationError("died", cause="engine_http_500")

    async def action(client, session, gate):
        return await client.post(path, {**BODIES[path], "stream": True}, raw=True)

    (status, raw, _), recorded = run(action, Fails(), limits=Limits(keep_alive_s=0.05))
    assert recorded.fault.cause == "engine_http_500"
    if not late:
        assert status == 503
        error_of(path, json.loads(raw))
        return
    assert status == 200
    found = [data for _, data in events(raw) if isinstance(data, dict) and data.get("error")]
    assert len(found) == 1
    assert "engine_http_500" in found[0]["error"]["message"]


def test_logprobs_are_those_that_were_sampled():
    sampled = completion("ok")

    async def action(client, session, gate):
        return await client.post("/v1/chat/completions", chat("hi", logprobs=True))

    (_, body, _), recorded = run(action, says(sampled), token_bytes=lambda t: bytes([t % 256]))
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == list(sampled.logprobs)
    assert [entry["token"] for entry in content][:2] == ["o", "k"]
    assert recorded.turns[0].completion == sampled


def test_an_agent_that_drops_what_it_was_told_still_continues():
    """Other call ids, no reasoning: the stored ids go on (faults.md 35)."""
    generator = says("<think>hm</think>" + call(command="ls"), "done")

    async def action(client, session, gate):
        _, first, _ = await client.chat("hi", tools=[TOOL])
        said = first["choices"][0]["message"]
        replay = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**said["tool_calls"][0], "id": "mine"}],
        }
        result = {"role": "tool", "tool_call_id": "mine", "content": "out"}
        return said, await client.chat("hi", replay, result, tools=[TOOL])

    (said, (status, body, _)), recorded = run(action, generator)
    assert said["reasoning_content"] == "hm"
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "done"
    first, follow = recorded.turns
    known = (*first.prompt_ids, *first.completion.token_ids)
    assert follow.prompt_ids[: len(known)] == known
    assert Message(role="tool", content="out") in recorded.messages


def test_many_clients_of_many_sessions_do_not_mix():
    """Each answer holds its own session's word, whatever runs beside it."""

    class Echo:
        async def generate(self, prompt_ids, sampling, session):
            await asyncio.sleep(0.001 * (len(session) % 3))
            return completion(f"for {session}")

    async def inside():
        async with asyncio.timeout(60), gateway(Echo()) as gate, aiohttp.ClientSession() as http:

            async def episode(number):
                session = await gate.open(f"s{'x' * (number % 5)}{number}", sampling=SAMPLING)
                headers = {"Authorization": f"Bearer {session.key}"}
                messages = [{"role": "user", "content": "same for all"}]
                for turn in range(4):
                    body = {"model": "policy", "messages": messages}
                    url = f"{gate.url}/v1/chat/completions"
                    async with http.post(url, json=body, headers=headers) as answer:
                        said = (await answer.json())["choices"][0]["message"]
                    assert said["content"] == f"for {session.session_id}"
                    messages += [said, {"role": "user", "content": f"go on {turn}"}]
                recorded = await session.close()
                assert len(recorded.turns) == 4

            await asyncio.gather(*(episode(number) for number in range(40)))
            assert gate.open_sessions == 0

    asyncio.run(inside())
