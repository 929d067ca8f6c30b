"""A turn costs what it adds: counted in what is parsed, compared and rendered, not in seconds."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks.conversation import figures, main, play
from skyrl_jax.core.types import Message
from skyrl_jax.gateway.conversation import Conversation
from skyrl_jax.gateway.dialects.openai_chat import read_message
from skyrl_jax.gateway.history import History
from tests.gateway.talk import RENDERER, Talk, tool, user

TURNS = 128


class Spy:
    """Counts what is rendered."""

    stop_token_ids = RENDERER.stop_token_ids

    def __init__(self) -> None:
        self.rendered: list[int] = []

    def initial(self, messages):
        ids = RENDERER.initial(messages)
        self.rendered.append(len(ids))
        return ids

    def delta(self, messages, *, stopped, after=None):
        ids = RENDERER.delta(messages, stopped=stopped)
        self.rendered.append(len(ids))
        return ids


def test_every_turn_renders_and_parses_its_new_messages_alone() -> None:
    """Faults C36."""
    spy, parsed = Spy(), []
    talk = Talk(Conversation(lambda tools: spy))

    def parse(item, index, seen):
        parsed.append(index)
        return read_message(item, index, seen)

    history = History(parse)
    raw = [{"role": "user", "content": "fix it"}]
    for _ in range(TURNS):
        answer = talk.call(history.messages(json.loads(json.dumps(raw))), "look there")
        raw.append({"role": "assistant", "content": answer.content})
        raw.append({"role": "user", "content": "it is there"})
    assert parsed == list(range(1 + 2 * (TURNS - 1)))
    assert len(spy.rendered) == TURNS and len(set(spy.rendered[1:])) == 1
    assert len(talk.prompts[-1]) > 60 * spy.rendered[-1]


def test_a_history_that_grew_is_not_walked_from_its_root() -> None:
    """The calls before the last are not looked at, whatever the client sends for them."""
    talk = Talk()
    history: list[Message] = [user("fix it")]
    for _ in range(TURNS):
        history += [talk.call(history, "look"), tool("ok")]
    tried = []
    graph = talk.conversation._graph

    class Counting(type(graph)):
        def _try(self, call, messages, match):
            tried.append(call.number)
            return super()._try(call, messages, match)

    talk.conversation._graph = Counting(calls=graph.calls)
    talk.conversation.place(history)
    assert tried == []
    talk.conversation.place([user("fix it"), *history[1:]])  # equal, but for its address
    assert tried == []


def test_the_same_history_again_is_not_rendered_again() -> None:
    spy = Spy()
    talk = Talk(Conversation(lambda tools: spy))
    answer = talk.call([user("fix it")], "look")
    history = [user("fix it"), answer, tool("ok")]
    talk.call(history, "done")
    talk.call(history, "another")
    assert len(spy.rendered) == 2 and talk.prompts[1] == talk.prompts[2]


def test_a_call_beside_the_work_leaves_its_end_at_hand() -> None:
    talk = Talk()
    history: list[Message] = [user("fix it")]
    for _ in range(10):
        history += [talk.call(history, "look"), tool("ok")]
    talk.call([*history[:-1], user("a title?")], "A title", kind="aux")
    assert any(end.call.number == 9 for end in talk.conversation._ends)


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_the_last_turns_take_no_longer_than_the_first(dialect) -> None:
    """Generous: a shared machine is no clock. benchmarks/conversation.py has the figure."""
    begun = time.perf_counter()
    best = min(figures([play(TURNS, 69_000, dialect)])["ratio"] for _ in range(2))
    assert best < 2.4
    assert time.perf_counter() - begun < 60


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_the_benchmark_prints_its_figures_of_a_session_of_the_size_it_says(dialect, capsys) -> None:
    args = [f"--dialect={dialect}", "--turns=20", f"--tokens={20 * 539}", "--repeat=1"]
    assert main(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["turns"] == 20 and 0.8 < found["tokens"] / (20 * 539) <= 1.2
    assert found["ratio"] > 0 and found["rows_ms"] > 0
