"""Time what a turn of a long session costs at the gateway, without engine and network.

Command: ``python benchmarks/conversation.py [--turns=128] [--tokens=69000] [--repeat=5]``

The client sends its whole history with each call as JSON. ``turn_ms`` is everything from those
bytes on: reading them, parsing what is new, placing it, rendering the delta, parsing the answer,
recording the call; CPU time of the thread, since on a shared machine the wall clock measures the
neighbours (``ratio_wall`` is by it). Early: median of turns 10 to 19; late: of the last ten. New
tokens per turn are equal: ``ratio`` (late / early) is 1 where a turn costs what it adds. Prints one
JSON line. ``json_ms`` is what json.loads would take for the same bytes; ``rows_ms`` is making the
training rows at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.types import Completion, Episode, Message, Status, ToolCall
from skyrl_jax.gateway.bodies import Bodies
from skyrl_jax.gateway.conversation import Conversation
from skyrl_jax.gateway.history import History
from skyrl_jax.generation.renderer import ChatMLRenderer
from skyrl_jax.generation.tokenizer import train

WORDS = "the file says that value of index returns from loop while error is near line".split()
ANSWER_SHARE = 4  # a quarter of a turn's new tokens is sampled


@dataclass(slots=True)
class Cost:
    """Seconds of each turn, and what the session came to."""

    turn_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    json_s: list[float] = field(default_factory=list)
    rows_s: float = 0.0
    tokens: int = 0


def main(argv: Sequence[str]) -> int:
    """Play the sessions and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=69_000, help="of the last prompt")
    parser.add_argument("--repeat", type=int, default=5, help="sessions; figures are medians")
    options = parser.parse_args(argv)
    costs = [play(options.turns, options.tokens) for _ in range(options.repeat)]
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


def play(turns: int, tokens: int) -> Cost:
    """Play one session of equal turns up to a number of prompt tokens."""
    tokenizer = train([" ".join(WORDS)] * 4, 400)
    renderer = ChatMLRenderer(tokenizer, _read)
    conversation, history, cost = Conversation(lambda tools: renderer), History(parse), Cost()
    bodies, new = Bodies(), tokens // turns
    observation = _text(tokenizer.encode, new - new // ANSWER_SHARE)
    sampled = (*tokenizer.encode(_text(tokenizer.encode, new // ANSWER_SHARE)), renderer.stop_id)
    raw: list[dict[str, Any]] = [
        {"role": "system", "content": "Solve it."},
        {"role": "user", "content": observation},
    ]
    for number in range(turns):
        body = json.dumps({"model": "m", "messages": raw}).encode()
        begun, seen = time.thread_time(), time.perf_counter()
        sent = bodies.read(body)["messages"]
        placement = conversation.place(history.messages(sent))
        completion = Completion(
            token_ids=sampled,
            logprobs=(-1.0,) * len(sampled),
            weight_versions=(number,) * len(sampled),
            finish_reason="stop",
        )
        message = renderer.parse(sampled, "stop")
        conversation.record(placement, completion, message)
        cost.turn_s.append(time.thread_time() - begun)
        cost.wall_s.append(time.perf_counter() - seen)
        begun = time.thread_time()
        json.loads(body)
        cost.json_s.append(time.thread_time() - begun)
        cost.tokens = len(placement.prompt_ids)
        raw.append(_assistant(message, f"c{number}"))
        raw.append({"role": "tool", "tool_call_id": f"c{number}", "content": observation})
    begun = time.perf_counter()
    rows = make_rows(_episode(conversation))
    cost.rows_s = time.perf_counter() - begun
    if len(rows.sequences) != 1:
        raise AssertionError(f"{len(rows.sequences)} rows of a history that only grew")
    return cost


def parse(raw: Mapping[str, Any]) -> list[Message]:
    """Read a message in the form of OpenAI's chat completions."""
    calls = tuple(
        ToolCall(name=c["function"]["name"], arguments=json.loads(c["function"]["arguments"]))
        for c in raw.get("tool_calls") or ()
    )
    call = raw.get("tool_call_id", "")
    content = raw.get("content") or ""
    return [Message(role=raw["role"], content=content, tool_calls=calls, tool_call_id=call)]


def _read(text: str, length_cut: bool) -> Message:
    del length_cut
    call = ToolCall(name="bash", arguments={"command": "ls"})
    return Message(role="assistant", content=text, tool_calls=(call,))


def _assistant(message: Message, ident: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps(message.tool_calls[0].arguments)}
    calls = [{"id": ident, "type": "function", "function": function}]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


def _text(encode: Any, tokens: int) -> str:
    """Return words that are about this many tokens."""
    line = " ".join(WORDS) + "\n"
    return line * max(1, tokens // len(encode(line)))


def _episode(conversation: Conversation) -> Episode:
    return Episode(
        task_id="t",
        sample_index=0,
        messages=(),
        turns=conversation.turns(),
        status=Status.FINISHED,
        reason="submit",
        submission="",
        temperature=1.0,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
