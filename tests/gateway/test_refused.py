"""The gateway over HTTP: bad input is refused in each dialect's shape, and the server goes on."""

import asyncio
import json

import pytest

from skyrl_jax.gateway.front import Limits
from tests.gateway.world import (
    BODIES,
    USER,
    Client,
    chat,
    completion,
    error_of,
    run,
    says,
)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "change", "status"),
    [
        ("malformed", b'{"model": "policy", ', 400),
        ("no object", b"[1]", 400),
        ("no utf-8", b'{"a": "\xff"}', 400),
        ("nan literal", "temperature", 400),
        ("too large a number", b"1e999", 400),
        ("half a character", b'"\\ud800"', 400),
        ("deep", b"[" * 200_000, 400),
        ("unknown model", {"model": "gpt-9"}, 404),
        ("temperature text", {"temperature": "hot"}, 400),
        ("too large", b'{"x": "' + b"y" * 10_000_000 + b'"}', 413),
    ],
)
def test_bad_input_is_refused_and_the_server_goes_on(path, name, change, status):
    if isinstance(change, dict):
        change = {**BODIES[path], **change}
    elif change == "temperature":
        change = json.dumps({**BODIES[path], "temperature": float("nan")}).encode()
        assert b"NaN" in change
    elif name in ("too large a number", "half a character"):  # in a field that nobody reads
        change = (
            json.dumps({**BODIES[path], "user": 0}).encode().replace(b": 0}", b": " + change + b"}")
        )
        assert b"ud800" in change or b"1e999" in change

    async def action(client, session, gate):
        bad = await client.post(path, change)
        return bad, await client.post(path, BODIES[path])

    ((found, body, headers), after), recorded = run(action, says("ok"))
    assert found == status
    kind, code, _ = error_of(path, body)
    if status == 404:
        assert kind in ("not_found_error", "invalid_request_error")
        assert code in (None, "model_not_found")
    assert headers["x-should-retry"] == "false"
    assert after[0] == 200
    assert recorded.fault is None


IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}
# By path: what takes the place of the one user message.
WRONG = {
    "unknown role": {path: {"role": "wizard", "content": "x"} for path in BODIES},
    "tool message without call": {
        "/v1/chat/completions": {"role": "tool", "tool_call_id": "c9", "content": "x"},
        "/v1/responses": {"type": "function_call_output", "call_id": "c9", "output": "x"},
        "/v1/messages": {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c9", "content": "x"}],
        },
    },
    "image": {
        "/v1/chat/completions": {"role": "user", "content": [IMAGE]},
        "/v1/responses": {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:,x"}],
        },
        "/v1/messages": {"role": "user", "content": [{"type": "image", "source": {}}]},
    },
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_message_is_refused_and_the_server_goes_on(path, kind):
    key = "input" if path == "/v1/responses" else "messages"

    async def action(client, session, gate):
        bad = await client.post(path, {**BODIES[path], key: [USER, WRONG[kind][path]]})
        return bad, await client.post(path, BODIES[path])

    ((status, body, headers), after), recorded = run(action, says("ok"))
    assert status == 400
    assert error_of(path, body)[0] == "invalid_request_error"
    assert headers["x-should-retry"] == "false"
    assert after[0] == 200 and len(recorded.turns) == 1 and recorded.fault is None


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_key_is_refused_and_the_server_goes_on(path):
    async def action(client, session, gate):
        async with Client(session, **{"x-api-key": "sk-skyrl-wrongwrongwrong"}) as asking:
            bad = await asking.post(path, BODIES[path])
        return bad, await client.post(path, BODIES[path])

    ((status, body, _), after), recorded = run(action, says("ok"))
    assert status == 401
    kinds = ("authentication_error", "invalid_request_error")
    assert error_of(path, body)[0] in kinds and "wrongwrong" not in json.dumps(body)
    assert after[0] == 200 and len(recorded.turns) == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_session_used_by_two_clients_at_once_mixes_nothing(path):
    key = "input" if path == "/v1/responses" else "messages"

    class Echo:
        async def generate(self, prompt_ids, sampling, session):
            await asyncio.sleep(0.05)
            said = bytes(i for i in prompt_ids if i < 256).decode()
            return completion(said.split("user\n")[-1].split("\n")[0])

    async def action(client, session, gate):
        async with Client(session) as second:
            words = [f"w{number % 4}" for number in range(8)]
            bodies = [{**BODIES[path], key: [{"role": "user", "content": w}]} for w in words]
            clients = (client, second)
            asked = (clients[i % 2].post(path, body) for i, body in enumerate(bodies))
            return words, await asyncio.gather(*asked)

    (words, answers), recorded = run(action, Echo())
    assert [status for status, _, _ in answers] == [200] * 8
    for word, (_, body, _) in zip(words, answers, strict=True):
        assert [w for w in set(words) if f'"{w}"' in json.dumps(body)] == [word]
    assert len(recorded.turns) == 4 and recorded.fault is None


def test_a_large_body_in_chunks_is_refused_too():
    async def parts():
        for _ in range(100):
            yield b"x" * 100_000

    async def action(client, session, gate):
        async with client.http.post(
            f"{gate.url}/v1/chat/completions", data=parts(), headers=client.headers
        ) as answer:
            return answer.status

    assert run(action, says(), limits=Limits(body_bytes=1 << 20))[0] == 413


def test_a_large_body_is_refused_before_it_is_sent():
    async def action(client, session, gate):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gate.url.split(":")[-1]))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n"
            b"Authorization: Bearer " + session.key.encode() + b"\r\n\r\n{"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5.0)
        writer.close()
        return head

    assert b" 413 " in run(action, says())[0]


def test_a_body_that_does_not_come_is_refused():
    async def action(client, session, gate):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gate.url.split(":")[-1]))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n"
            b"Authorization: Bearer " + session.key.encode() + b"\r\n\r\n{"
        )
        head = await reader.readuntil(b"\r\n")
        writer.close()
        return head

    assert b" 408 " in run(action, says(), limits=Limits(body_s=0.1))[0]


def test_who_waits_to_be_told_to_send_is_told():
    async def action(client, session, gate):
        async with client.http.post(
            f"{gate.url}/v1/chat/completions",
            json=chat("hi"),
            headers=client.headers,
            expect100=True,
        ) as answer:
            return answer.status

    assert run(action, says("ok"))[0] == 200
