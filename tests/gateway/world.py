"""What the gateway's tests stand on: a byte renderer, scripted generators, and a client's requests.

Ids 0 to 255 are bytes, 256 begins a message, 257 ends it.
"""

import asyncio
import json
import re

import aiohttp

from skyrl_jax.core.types import Completion, Message, SamplingParams, ToolCall
from skyrl_jax.gateway.app import Gateway
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.gateway.calls import Answer
from skyrl_jax.generation.fake import FakeGenerator

START, END = 256, 257
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=512, stop_token_ids=(END,), seed=7)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ByteRenderer:
    """<256>role\\ncontent<257>\\n, calls and thinking as text; what cannot be read is text."""

    stop_token_ids = (END,)

    def __init__(self, tools=()):
        self._tools = tools

    def initial(self, messages):
        head = ()
        if self._tools:
            names = ",".join(tool.name for tool in self._tools)
            head = (START, *f"tools\n{names}".encode(), END, 10)
        return (*head, *self._render(messages))

    def delta(self, messages, *, stopped, after=None):
        return (*((10,) if stopped else (END, 10)), *self._render(messages))

    def _render(self, messages):
        ids = []
        for message in messages:
            text = f"{message.role}\n{say(message)}"
            ids += (START, *text.encode(), END, 10)
        return (*ids, START, *b"assistant\n")

    def parse(self, token_ids, finish_reason):
        text = bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")
        reasoning = None
        if text.startswith("<think>") and "</think>" in text:
            reasoning, text = text.removeprefix("<think>").split("</think>", 1)
        try:
            calls = [json.loads(found) for found in _CALL.findall(text)]
            calls = tuple(ToolCall(name=c["name"], arguments=c["arguments"]) for c in calls)
        except (ValueError, KeyError) as error:
            return Message(role="assistant", content=text, error=str(error), reasoning=reasoning)
        if finish_reason == "length":
            return Message(role="assistant", content=text, error="cut", reasoning=reasoning)
        content = _CALL.sub("", text)
        return Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def say(message):
    """What a policy would have said to make this message."""
    thought = "" if message.reasoning is None else f"<think>{message.reasoning}</think>"
    calls = [{"name": c.name, "arguments": dict(c.arguments)} for c in message.tool_calls]
    return (
        thought
        + message.content
        + "".join(f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls)
    )


def call(name="bash", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def spoken(text):
    """The ids that say a text and end it."""
    return (*text.encode(), END)


def completion(text, finish="stop", ids=None):
    ids = spoken(text) if ids is None else ids
    return Completion(
        token_ids=ids,
        logprobs=tuple(-0.001 * (i + 1) for i in range(len(ids))),
        weight_versions=(3,) * len(ids),
        finish_reason=finish,
    )


def says(*texts):
    """A generator that answers with these texts in turn; exceptions among them are raised."""
    left = list(texts)

    def script(prompt_ids, sampling, session):
        text = left.pop(0)
        if isinstance(text, Exception):
            raise text
        return text if isinstance(text, Completion) else spoken(text)

    return FakeGenerator(script)


class Slow:
    """Answers ``text`` when ``go`` is set; knows what was started and what was cancelled."""

    def __init__(self, text="ok"):
        self.text, self.go = text, asyncio.Event()
        self.started, self.cancelled = 0, 0
        self.begun = asyncio.Event()

    async def generate(self, prompt_ids, sampling, session):
        self.started += 1
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return completion(self.text)


def gateway(generator, **kwargs):
    return Gateway(
        generator=generator,
        renderer_for=ByteRenderer,
        **kwargs,
    )


def run(action, generator, *, sampling=SAMPLING, budget=None, training=True, **kwargs):
    """Run ``action(client, session, gateway)`` and return what it returned and the record."""

    async def inside():
        async with asyncio.timeout(60), gateway(generator, **kwargs) as gate:
            session = await gate.open(
                "task/0", sampling=sampling, budget=budget or Budget(), training=training
            )
            async with Client(session) as client:
                outcome = await action(client, session, gate)
            return outcome, await session.close()

    return asyncio.run(inside())


class Client:
    """Raw HTTP of one session: what goes over the wire, and nothing a client library adds."""

    def __init__(self, session, **headers):
        self.session = session
        self.headers = headers or {"Authorization": f"Bearer {session.key}"}

    async def __aenter__(self):
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *exc):
        await self.http.close()

    async def post(self, path, body, *, root=None, raw=False, **headers):
        """Return (status, body, headers) of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = (root or self.session.root.partition("/s/")[0]) + path
        async with self.http.post(url, data=data, headers={**self.headers, **headers}) as answer:
            text = await answer.read()
            return answer.status, text if raw else json.loads(text), answer.headers

    async def get(self, path, **headers):
        url = self.session.root.partition("/s/")[0] + path
        async with self.http.get(url, headers={**self.headers, **headers}) as answer:
            return answer.status, await answer.json()

    async def chat(self, *contents, **fields):
        return await self.post("/v1/chat/completions", chat(*contents, **fields))


def chat(*contents, **fields):
    """A chat body: contents are user texts or whole messages."""
    messages = [{"role": "user", "content": c} if isinstance(c, str) else c for c in contents]
    return {"model": "policy", "messages": messages, **fields}


TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}},
}


def answer(message, finish="stop", prompt_tokens=5):
    ids = spoken(say(message))
    return Answer(
        ident="0f" * 16,
        created=1_700_000_000,
        message=message,
        completion=completion("", finish, ids),
        prompt_tokens=prompt_tokens,
    )


def events(raw):
    """Split a stream into (event name, data) pairs; comments are left out."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


USER = {"role": "user", "content": "hi"}
MESSAGES = {"model": "policy", "max_tokens": 99, "messages": [USER]}
RESPONSES = {"model": "policy", "input": "hi"}
BODIES = {
    "/v1/chat/completions": chat("hi"),
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


def error_of(path, body):
    """Check the dialect's shape of an error and return (type, code or None, message)."""
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and body["request_id"].startswith("req_")
        assert set(body["error"]) == {"type", "message"}
        return body["error"]["type"], None, body["error"]["message"]
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["type"], body["error"]["code"], body["error"]["message"]
