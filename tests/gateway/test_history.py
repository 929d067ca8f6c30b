"""What a client repeats is compared, not parsed again."""

from __future__ import annotations

import copy
import json

from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.core.types import Message, ToolCall
from skyrl_jax.gateway.history import History


class Spy:
    """Parses {"role", "parts"} into a message a part, and counts."""

    def __init__(self) -> None:
        self.parsed: list[dict] = []

    def __call__(self, raw, index=0, seen=()) -> list[Message]:
        self.parsed.append(raw)
        return [Message(role=raw["role"], content=part) for part in raw["parts"]]


def raw(*parts: str, role: str = "user") -> dict:
    return {"role": role, "parts": list(parts)}


def fresh(value):
    return json.loads(json.dumps(value))


def test_each_raw_message_is_parsed_once_and_the_parsed_one_comes_back() -> None:
    spy = Spy()
    history = History(spy)
    sent = []
    earlier: tuple[Message, ...] = ()
    for turn in range(20):
        sent += [raw(f"a{turn}", f"b{turn}"), raw(role="tool"), raw(f"c{turn}")]
        messages = history.messages(fresh(sent))
        assert all(one is other for one, other in zip(earlier, messages, strict=False))
        assert [m.content for m in messages[-3:]] == [f"a{turn}", f"b{turn}", f"c{turn}"]
        earlier = messages
    assert len(spy.parsed) == 60


def test_a_change_is_parsed_from_there_on_and_nothing_before_it() -> None:
    spy = Spy()
    history = History(spy)
    sent = [raw(f"m{i}") for i in range(10)]
    first = history.messages(fresh(sent))
    spy.parsed.clear()
    sent[4] = raw("changed")
    second = history.messages(fresh(sent))
    assert [m.content for m in second][3:6] == ["m3", "changed", "m5"]
    assert len(spy.parsed) == 6 and second[3] is first[3]
    spy.parsed.clear()
    assert history.messages(fresh(sent[:7])) == second[:7] and spy.parsed == []


def test_histories_that_take_turns_are_all_remembered_up_to_a_number() -> None:
    spy = Spy()
    history = History(spy, keep=3)
    threads = [[raw(f"thread {i}")] for i in range(3)]
    for turn in range(5):
        for thread in threads:
            thread.append(raw(f"turn {turn}"))
            history.messages(fresh(thread))
    for turn in range(5):
        threads[0].append(raw(f"alone {turn}"))
        history.messages(fresh(threads[0]))
    history.messages(fresh(threads[1]))
    assert len(spy.parsed) == 3 + 3 * 5 + 5
    assert len(history._known) == 3


def test_one_copy_of_the_text_is_kept() -> None:
    history = History(Spy())
    first = [raw("a")]
    history.messages(first)
    history.messages([*fresh(first), raw("b")])
    assert len(history._known) == 1 and history._known[0].raw[0] is first[0]


def test_the_parser_is_told_the_place_and_the_calls_before_it() -> None:
    told = []

    def parse(item, index, seen):
        told.append((index, set(seen)))
        seen.update(item["calls"])
        calls = tuple(ToolCall(name="f", arguments={}, id=ident) for ident in item["calls"])
        return [Message(role="assistant", content="", tool_calls=calls)]

    history = History(parse)
    sent = [{"calls": ["a", "b"]}, {"calls": []}, {"calls": ["c"]}]
    history.messages(sent)
    assert told == [(0, set()), (1, {"a", "b"}), (2, {"a", "b"})]
    told.clear()
    history.messages([*fresh(sent), {"calls": []}])
    history.messages([*fresh(sent[:2]), {"calls": ["d"]}])
    assert told == [(3, {"a", "b", "c"}), (2, {"a", "b"})]


def test_values_that_are_equal_in_python_alone_are_parsed_again() -> None:
    spy = Spy()
    history = History(spy)
    for value in (1, True, 1.0, {"a": 1, "b": 2}, {"b": 2, "a": 1}, [1], (1,), "1"):
        history.messages([{"role": "user", "parts": [], "x": value}])
        history.messages([{"role": "user", "parts": [], "x": copy.deepcopy(value)}])
    assert len(spy.parsed) == 8


def test_what_is_nested_too_deep_to_compare_is_parsed_again() -> None:
    def nested():
        value = []
        for _ in range(5000):
            value = [value]
        return value

    spy = Spy()
    history = History(spy)
    for _ in range(2):
        history.messages([{"role": "user", "parts": [], "x": nested()}])
    assert len(spy.parsed) == 2


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8), st.integers(1, 3))
def test_it_equals_parsing_everything(histories, keep) -> None:
    history = History(Spy(), keep=keep)
    for numbers in histories:
        sent = [raw(*(["x"] * number), role=str(number)) for number in numbers]
        plain = [message for item in copy.deepcopy(sent) for message in Spy()(item)]
        assert list(history.messages(sent)) == plain


def test_what_the_parser_raises_passes_through_and_leaves_no_trace() -> None:
    def parse(item, index, seen):
        if item["role"] == "bad":
            raise ValueError("bad role")
        return Spy()(item)

    history = History(parse)
    good = [raw("a"), raw("b")]
    history.messages(good)
    for _ in range(2):
        try:
            history.messages([*good, raw("c", role="bad")])
        except ValueError as error:
            assert str(error) == "bad role"
        else:
            raise AssertionError("the error was swallowed")
    assert [m.content for m in history.messages(good)] == ["a", "b"]
