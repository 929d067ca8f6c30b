"""Time what a turn of a long session costs at the gateway, without engine and network.

Command: ``python benchmarks/conversation.py [--dialect=chat|messages] [--turns=128]
[--tokens=69000] [--repeat=5]``

The client sends its whole history with each call as JSON. ``turn_ms`` is everything the gateway
does from those bytes to the bytes of its answer: reading and parsing the request,
``Session.serve`` (with a generator that answers at once), writing the answer; CPU time of the
thread, since on a shared machine the wall clock measures the neighbours (``ratio_wall`` is by it).
Early: median of turns 10 to 19; late: of the last ten. New tokens per turn are equal: ``ratio``
(late / early) is 1 where a turn costs what it adds. Prints one JSON line. ``json_ms`` is what
json.loads would take for the same bytes; ``rows_ms`` is making the training rows at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.types import Completion, Episode, Message, SamplingParams, Status, ToolCall
from skyrl_jax.gateway.app import Gateway
from skyrl_jax.gateway.calls import Recorded
from skyrl_jax.gateway.dialects.anthropic import Anthropic
from skyrl_jax.gateway.dialects.base import Dialect, dumps, read_request
from skyrl_jax.gateway.dialects.openai_chat import OpenAIChat
from skyrl_jax.generation.renderer import ChatMLRenderer
from skyrl_jax.generation.tokenizer import train

WORDS = "the file says that value of index returns from loop while error is near line".split()
ANSWER_SHARE = 4  # a quarter of a turn's new tokens is sampled
DIALECTS: Mapping[str, Callable[[], Dialect]] = {"chat": OpenAIChat, "messages": Anthropic}


@dataclass(slots=True)
class Cost:
    """Seconds of each turn, and what the session came to."""

    turn_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    json_s: list[float] = field(default_factory=list)
    rows_s: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Instant:
    """A generator that says the same at once."""

    ids: tuple[int, ...]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Answer."""
        del prompt_ids, sampling, session
        size = len(self.ids)
        return Completion(
            token_ids=self.ids,
            logprobs=(-1.0,) * size,
            weight_versions=(1,) * size,
            finish_reason="stop",
        )


def main(argv: Sequence[str]) -> int:
    """Play the sessions and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dialect", choices=sorted(DIALECTS), default="chat")
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=69_000, help="of the last prompt")
    parser.add_argument("--repeat", type=int, default=5, help="sessions; figures are medians")
    options = parser.parse_args(argv)
    costs = [play(options.turns, options.tokens, options.dialect) for _ in range(options.repeat)]
    print(json.dumps(figures(costs)))
    return 0


def figures(costs: Sequence[Cost]) -> dict[str, float]:
    """Return what is printed, in milliseconds and tokens."""

    def window(name: str, turns: slice) -> float:
        return 1e3 * statistics.median(s for cost in costs for s in getattr(cost, name)[turns])

    early, late = slice(9, 19), slice(-10, None)
    found = {
        "turns": float(len(costs[0].turn_s)),
        "tokens": float(costs[0].tokens),
        "turn_ms_early": window("turn_s", early),
        "turn_ms_late": window("turn_s", late),
        "json_ms_early": window("json_s", early),
        "json_ms_late": window("json_s", late),
        "rows_ms": 1e3 * statistics.median(cost.rows_s for cost in costs),
    }
    found["ratio"] = found["turn_ms_late"] / found["turn_ms_early"]
    found["ratio_wall"] = window("wall_s", late) / window("wall_s", early)
    return {name: round(value, 4) for name, value in found.items()}


def play(turns: int, tokens: int, dialect: str = "chat") -> Cost:
    """Play one session of equal turns up to a number of prompt tokens."""
    cost = Cost()
    recorded = asyncio.run(_converse(turns, tokens, dialect, cost))
    begun = time.perf_counter()
    rows = make_rows(_episode(recorded))
    cost.rows_s = time.perf_counter() - begun
    if len(rows.sequences) != 1:
        raise AssertionError(f"{len(rows.sequences)} rows of a history that only grew")
    return cost


async def _converse(turns: int, tokens: int, name: str, cost: Cost) -> Recorded:
    """Be the client, and time the gateway."""
    tokenizer = train([" ".join(WORDS)] * 4, 400)
    renderer = ChatMLRenderer(tokenizer, _read)
    new = tokens // turns
    observation = _text(tokenizer.encode, new - new // ANSWER_SHARE)
    sampled = (*tokenizer.encode(_text(tokenizer.encode, new // ANSWER_SHARE)), renderer.stop_id)
    gateway = Gateway(generator=Instant(sampled), renderer_for=lambda tools: renderer)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=len(sampled), seed=1)
    session = await gateway.open("bench", sampling=sampling)
    dialect = DIALECTS[name]()
    sent: list[dict[str, Any]] = [{"role": "user", "content": observation}]
    for _ in range(turns):
        raw = json.dumps({"model": "m", "max_tokens": len(sampled), "messages": sent}).encode()
        begun, seen = time.thread_time(), time.perf_counter()
        chat = read_request(dialect, raw, session.memory(dialect))
        answer = await session.serve(chat)
        written = dumps(dialect.answer(chat, answer))
        cost.turn_s.append(time.thread_time() - begun)
        cost.wall_s.append(time.perf_counter() - seen)
        begun = time.thread_time()
        json.loads(raw)
        cost.json_s.append(time.thread_time() - begun)
        cost.tokens = answer.prompt_tokens
        sent += _next(name, json.loads(written), observation)
    return await session.close()


def _next(dialect: str, answer: Mapping[str, Any], observation: str) -> list[dict[str, Any]]:
    """Return what a client appends: the answer, and what its tool said."""
    if dialect == "messages":
        ident = answer["content"][-1]["id"]
        result = {"type": "tool_result", "tool_use_id": ident, "content": observation}
        said = {"role": "assistant", "content": answer["content"]}
        return [said, {"role": "user", "content": [result]}]
    said = answer["choices"][0]["message"]
    ident = said["tool_calls"][0]["id"]
    return [said, {"role": "tool", "tool_call_id": ident, "content": observation}]


def _read(text: str, length_cut: bool) -> Message:
    del length_cut
    call = ToolCall(name="bash", arguments={"command": "ls"})
    return Message(role="assistant", content=text, tool_calls=(call,))


def _text(encode: Any, tokens: int) -> str:
    """Return words that are about this many tokens."""
    line = " ".join(WORDS) + "\n"
    return line * max(1, tokens // len(encode(line)))


def _episode(recorded: Recorded) -> Episode:
    return Episode(
        task_id="t",
        sample_index=0,
        messages=(),
        turns=recorded.for_training(),
        status=Status.FINISHED,
        reason="submit",
        submission="",
        temperature=1.0,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
