"""The gateway in front of the real client: ids and log-probs from the wire to the record."""

import asyncio
import json

from aiohttp import web

from skyrl_jax.generation.sglang import SGLangGenerator
from tests.gateway.world import SAMPLING, Client, chat, gateway, spoken

LOGPROBS = [-0.1234567890123456, -1e-300, -999.0, 0.0]


class Server:
    """Speaks SGLang's /generate and /abort_request; a prompt with "slow" waits for its abort."""

    def __init__(self):
        self.bodies, self.aborted = [], asyncio.Event()

    async def generate(self, request):
        body = await request.json()
        self.bodies.append(body)
        if b"slow" in bytes(i for i in body["input_ids"] if i < 256):
            await self.aborted.wait()
        ids = spoken("abc")
        meta = {
            "finish_reason": {"type": "stop", "matched": 257},
            "completion_tokens": len(ids),
            "output_token_logprobs": [[x, i, None] for x, i in zip(LOGPROBS, ids, strict=True)],
            "weight_versions": [
                {"version": "3", "start": 0, "end": 2},
                {"version": "4", "start": 2, "end": 4},
            ],
        }
        return web.json_response({"output_ids": list(ids), "meta_info": meta})

    async def abort(self, request):
        self.bodies.append(await request.json())
        self.aborted.set()
        return web.Response()


def play(action):
    async def inside():
        server = Server()
        app = web.Application()
        app.router.add_post("/generate", server.generate)
        app.router.add_post("/abort_request", server.abort)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with (
                asyncio.timeout(60),
                SGLangGenerator(f"http://127.0.0.1:{site.port}") as generator,
                gateway(generator) as gate,
            ):
                session = await gate.open("task/0", sampling=SAMPLING)
                async with Client(session) as client:
                    await action(client, server)
                return server, await session.close()
        finally:
            await runner.cleanup()

    return asyncio.run(inside())


def test_what_the_engine_said_is_what_is_recorded():
    async def action(client, server):
        status, body, _ = await client.chat("hi", logprobs=True, temperature=0.3)
        assert status == 200
        told = body["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in told] == LOGPROBS

    server, recorded = play(action)
    turn = recorded.turns[0]
    assert json.dumps(turn.completion.logprobs) == json.dumps(LOGPROBS)
    assert turn.completion.token_ids == spoken("abc")
    assert turn.completion.weight_versions == (3, 3, 4, 4)
    assert list(turn.prompt_ids) == server.bodies[0]["input_ids"]
    assert server.bodies[0]["sampling_params"]["temperature"] == 1.0


def test_a_client_that_leaves_aborts_its_call_at_the_engine():
    async def action(client, server):
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", chat("slow")))
        while not server.bodies:
            await asyncio.sleep(0.01)
        asking.cancel()
        await server.aborted.wait()
        status, _, _ = await client.chat("hi")
        assert status == 200

    server, recorded = play(action)
    asked, aborted, _ = server.bodies
    assert aborted["rid"] == asked["rid"]
    assert recorded.fault is None
    assert len(recorded.turns) == 1
