"""Load the gateway: how much does it add to the generator's own time, and what does it lose?

Command: ``python benchmarks/gateway.py [--sessions=256] [--turns=20] [--seconds=180]
[--think=7] [--prompt_tokens=16000] [--dialect=chat|messages]``

Prints one JSON line; exits with 1 where a promise is not held ("held").

overhead_ms   latency that the client sees - the generator's delay (1 to 3 s, drawn by session and
              turn, so that both sides know it), of every request: what timers and the client's own
              event loop add is in it. Promised: p50 < 5, p99 < 50
requests      answered; "per_s" of them in the whole time
prompt_tokens the longest prompt: sessions grow to --prompt_tokens in --turns turns
lost          answers that did not come, turns that a closed session's record lacks
crossed       answers or recorded turns of another session or turn, or other ids than the generator
              returned
rss_mb        of the server: before the first session, after a round of one session a seat that is
              not measured, with the most sessions open, after the last was closed. What the whole
              load leaves beside that round's heap is at most 8 MB; "alive" = closed sessions that
              are still in memory
cpu           seconds of CPU of the server and of the client / seconds, of one core each

The server (gateway and fake generator) and the client are a process each. A session's agent waits
--think seconds (0 = not at all) between an answer and its next request, and a new session begins
where one ends, until --seconds are over; then every session is played to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import random
import resource
import statistics
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skyrl_jax.agents.parsing import parse_assistant  # noqa: E402
from skyrl_jax.core.types import Completion, SamplingParams  # noqa: E402
from skyrl_jax.gateway.app import Gateway  # noqa: E402
from skyrl_jax.generation import tokenizer as bpe  # noqa: E402
from skyrl_jax.generation.renderer import ChatMLRenderer  # noqa: E402

P50_MS, P99_MS = 5.0, 50.0
LEFT_MB = 8.0
CALL = "<function=bash>\n<parameter=command>make test</parameter>\n</function>"
ANSWER_TOKENS = 200
START_S = 60.0
WORDS = tuple(
    "".join(chr(97 + byte % 26) for byte in hashlib.sha256(str(i).encode()).digest()[: 2 + i % 4])
    for i in range(400)
)
TOOL = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}


def delay_s(session: str, turn: int) -> float:
    """Return how long the generator takes for a turn: 1 to 3 s."""
    return random.Random(f"{session}/{turn}").uniform(1.0, 3.0)


def prose(seed: str, words: int) -> str:
    """Return text of about ``words`` words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def trained() -> bpe.Tokenizer:
    """Return a tokenizer for which a word and its space are one token."""
    return bpe.train([f"{word} " * 20 + f" {word}" for word in WORDS], 2048)


# -- the server ------------------------------------------------------------------------------------


class Fake:
    """A generator that says who it speaks to, and remembers what it returned."""

    def __init__(self, renderer: ChatMLRenderer) -> None:
        """Encode once what every answer holds."""
        self._renderer = renderer
        self._rest = renderer.assistant_ids(f"{prose('answer', ANSWER_TOKENS)}\n{CALL}")
        self.said: dict[str, list[Completion]] = defaultdict(list)
        self.longest = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Wait, then answer."""
        turn = len(self.said[session])
        self.longest = max(self.longest, len(prompt_ids))
        head = self._renderer.tokenizer.encode(f"{session} turn {turn} ")
        ids = (*head, *self._rest)
        done = Completion(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            weight_versions=(1,) * len(ids),
            finish_reason="stop",
        )
        self.said[session].append(done)
        await asyncio.sleep(delay_s(session, turn))
        return done


class Control:
    """Opens and closes sessions for the client, and says what the server uses."""

    def __init__(self, gateway: Gateway, fake: Fake, sampling: SamplingParams) -> None:
        """Begin with no session."""
        self._gateway, self._fake, self._sampling = gateway, fake, sampling
        self._open: dict[str, Any] = {}
        self._closed: list[weakref.ref[Any]] = []

    async def open(self, request: web.Request) -> web.Response:
        """Open a session."""
        name = request.query["name"]
        session = await self._gateway.open(name, sampling=self._sampling)
        self._open[name] = session
        return web.json_response({"key": session.key, "url": session.url, "root": session.root})

    async def close(self, request: web.Request) -> web.Response:
        """Close a session; compare its record with what the generator returned."""
        name = request.query["name"]
        session = self._open.pop(name)
        recorded = await session.close()
        self._closed.append(weakref.ref(session))
        said = self._fake.said.pop(name, [])
        right = [turn.completion for turn in recorded.turns] == said
        grown = all(
            after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
            for before, after in zip(recorded.turns, recorded.turns[1:], strict=False)
        )
        return web.json_response({"turns": len(recorded.turns), "right": right and grown})

    async def stats(self, request: web.Request) -> web.Response:
        """Collect what is free, and tell what is left."""
        if request.query.get("collect"):
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL("libc.so.6").malloc_trim(0)
        used = resource.getrusage(resource.RUSAGE_SELF)
        return web.json_response(
            {
                "rss_mb": _rss_mb(),
                "alive": sum(ref() is not None for ref in self._closed),
                "cpu_s": used.ru_utime + used.ru_stime,
                "longest": self._fake.longest,
                "open": self._gateway.open_sessions,
            }
        )


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


async def serve() -> None:
    """Run gateway and control until the input ends; print both addresses."""
    tokenizer = trained()
    renderer = ChatMLRenderer(tokenizer, parse_assistant)
    sampling = SamplingParams(max_new_tokens=1024, stop_token_ids=renderer.stop_token_ids, seed=1)
    fake = Fake(renderer)
    async with Gateway(generator=fake, renderer_for=lambda tools: renderer) as gateway:
        control = Control(gateway, fake, sampling)
        app = web.Application()
        app.router.add_post("/open", control.open)
        app.router.add_post("/close", control.close)
        app.router.add_get("/stats", control.stats)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(json.dumps({"control": f"http://127.0.0.1:{site.port}"}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await runner.cleanup()


# -- the client ------------------------------------------------------------------------------------


class Agent:
    """Plays sessions one after the other, as an agent with a tool would."""

    def __init__(self, options: argparse.Namespace, http: aiohttp.ClientSession, base: str) -> None:
        """Measure nothing yet."""
        self._options, self._http, self._base = options, http, base
        self.overheads: list[float] = []
        self.lost = self.crossed = 0
        # a turn adds an answer and an observation; markup and names take the rest
        added = options.prompt_tokens / max(1, options.turns - 1)
        self._observed = max(10, int(added) - ANSWER_TOKENS - 20)

    async def play(self, name: str, first_wait: float) -> None:
        """Play one session of all its turns."""
        await asyncio.sleep(first_wait)
        opened = await self._control("open", name)
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"You are {name}. {prose(name, 300)}"}
        ]
        for turn in range(self._options.turns):
            try:
                await self._turn(name, turn, opened, messages)
            except (aiohttp.ClientError, TimeoutError, KeyError, AssertionError) as error:
                print(f"{name} turn {turn}: {error!r}", file=sys.stderr)
                self.lost += 1
                break
            if self._options.think and turn + 1 < self._options.turns:
                think = random.Random(f"think {name} {turn}").uniform(0.5, 1.5)
                await asyncio.sleep(think * self._options.think)
        closed = await self._control("close", name)
        self.lost += self._options.turns - closed["turns"]
        self.crossed += not closed["right"]

    async def _turn(
        self, name: str, turn: int, opened: dict[str, Any], messages: list[dict[str, Any]]
    ) -> None:
        chat = self._options.dialect == "chat"
        path = "/chat/completions" if chat else "/messages"
        tools: Any = [{"type": "function", "function": TOOL}]
        body: dict[str, Any] = {"model": "policy", "messages": messages, "tools": tools}
        if not chat:
            schema = TOOL["parameters"]
            tools = [{"name": "bash", "description": "Run.", "input_schema": schema}]
            body |= {"max_tokens": 1024, "tools": tools}
        data = json.dumps(body).encode()
        headers = {"x-api-key": opened["key"], "Content-Type": "application/json"}
        begun = time.perf_counter()
        async with self._http.post(opened["url"] + path, data=data, headers=headers) as answer:
            raw = await answer.read()
        took = time.perf_counter() - begun
        assert answer.status == 200, raw[:500]
        self.overheads.append(1e3 * (took - delay_s(name, turn)))
        add = self._add_chat if chat else self._add_message
        text = add(json.loads(raw), messages, f"{name} {turn}")
        self.crossed += not text.startswith(f"{name} turn {turn} ")

    def _add_chat(self, body: Any, messages: list[dict[str, Any]], seed: str) -> str:
        said = body["choices"][0]["message"]
        messages.append(said)
        for call in said["tool_calls"]:
            seen = prose(seed, self._observed)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
        return str(said["content"])

    def _add_message(self, body: Any, messages: list[dict[str, Any]], seed: str) -> str:
        messages.append({"role": "assistant", "content": body["content"]})
        uses = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": use, "content": prose(seed, self._observed)}
            for use in uses
        ]
        messages.append({"role": "user", "content": results})
        return str(body["content"][0]["text"])

    async def _control(self, verb: str, name: str) -> dict[str, Any]:
        async with self._http.post(f"{self._base}/{verb}", params={"name": name}) as answer:
            body: dict[str, Any] = await answer.json()
            return body


async def load(options: argparse.Namespace, base: str) -> dict[str, Any]:
    """Play all sessions and return the figures."""
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def stats(collect: str = "") -> dict[str, Any]:
            async with http.get(f"{base}/stats", params={"collect": collect}) as answer:
                body: dict[str, Any] = await answer.json()
                return body

        before = await stats("1")
        first = Agent(argparse.Namespace(**{**vars(options), "think": 0.0}), http, base)
        await asyncio.gather(*(first.play(f"first{n}", n / 64) for n in range(options.sessions)))
        warm = await stats("1")
        agent = Agent(options, http, base)
        begun, cpu = time.perf_counter(), time.process_time()
        most = 0.0

        async def seat(number: int) -> None:
            """Play sessions in one seat until the time is over."""
            played = 0
            wait = 2.0 * random.Random(number).random() * max(1.0, options.think)
            while not played or time.perf_counter() - begun < options.seconds:
                await agent.play(f"s{number}-{played}", 0.0 if played else wait)
                played += 1

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, (await stats())["rss_mb"])
                await asyncio.sleep(1.0)

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(seat(number) for number in range(options.sessions)))
        seconds = time.perf_counter() - begun
        watching.cancel()
        cpu = time.process_time() - cpu
        after = await stats("1")
    agent.lost += first.lost
    agent.crossed += first.crossed
    memory = {"before": before["rss_mb"], "warm": warm["rss_mb"], "most": most}
    return figures(agent, options, seconds, cpu, {**memory, "after": after["rss_mb"]}, warm, after)


def figures(
    agent: Agent,
    options: argparse.Namespace,
    seconds: float,
    cpu_s: float,
    memory: dict[str, float],
    before: dict[str, Any],
    after: dict[str, Any],
) -> dict[str, Any]:
    """Put the figures together and say whether the promises are held."""
    ranked = statistics.quantiles(agent.overheads, n=1000, method="inclusive")
    overhead = {"p50": ranked[499], "p90": ranked[899], "p99": ranked[989], "p99.9": ranked[998]}
    overhead["max"] = max(agent.overheads)
    held = (
        overhead["p50"] < P50_MS
        and overhead["p99"] < P99_MS
        and not (agent.lost or agent.crossed or after["alive"] or after["open"])
        and memory["after"] - memory["warm"] <= LEFT_MB
        and after["longest"] >= 0.95 * options.prompt_tokens
    )
    return {
        "sessions": options.sessions,
        "turns": options.turns,
        "think_s": options.think,
        "dialect": options.dialect,
        "seconds": round(seconds, 1),
        "requests": len(agent.overheads),
        "per_s": round(len(agent.overheads) / seconds, 1),
        "overhead_ms": {name: round(value, 2) for name, value in overhead.items()},
        "prompt_tokens": after["longest"],
        "lost": agent.lost,
        "crossed": agent.crossed,
        "rss_mb": memory,
        "alive": after["alive"],
        "cpu": {
            "server": round((after["cpu_s"] - before["cpu_s"]) / seconds, 3),
            "client": round(cpu_s / seconds, 3),
        },
        "held": held,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, load it, end it."""
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).resolve()),
        "--serve",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(START_S):
            line = await server.stdout.readline()
        return await load(options, json.loads(line)["control"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        await server.wait()


def main(argv: Sequence[str]) -> int:
    """Measure and print; 0 where the promises are held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--think", type=float, default=7.0)
    parser.add_argument("--prompt_tokens", type=int, default=16_000)
    parser.add_argument("--dialect", choices=("chat", "messages"), default="chat")
    parser.add_argument("--serve", action="store_true", help="be the server (internal)")
    options = parser.parse_args(argv)
    if options.serve:
        uvloop.run(serve())
        return 0
    found = uvloop.run(measure(options))
    print(json.dumps(found))
    return 0 if found["held"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
