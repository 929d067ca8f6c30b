"""Bodies that repeat each other are decoded once, and always to what json.loads makes of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_jax.gateway.bodies import Bodies


def message(text: str) -> dict:
    return {"role": "user", "content": text}


def body(messages, **more) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def test_elements_that_were_sent_before_are_the_same_objects() -> None:
    bodies = Bodies()
    sent = [message("ä"), message("b")]
    first = bodies.read(body(sent, tools=[1]))
    second = bodies.read(body([*sent, message("€"), message("c")], tools=[2], n=1))
    assert second == json.loads(body([*sent, message("€"), message("c")], tools=[2], n=1))
    assert [a is b for a, b in zip(first["messages"], second["messages"], strict=False)] == [1, 1]
    third = bodies.read(body([*sent, message("€"), message("other")]))
    assert third["messages"][2] is second["messages"][2] and len(third["messages"]) == 4
    assert third["messages"][3] == message("other") and "n" not in third
    assert len(bodies._known) == 2, "a body stands in for the one it goes on from"
    third["messages"].clear()  # the list is the caller's
    assert len(bodies.read(body([*sent, message("€")]))["messages"]) == 3


def test_a_body_that_only_grows_is_decoded_in_its_new_part_alone() -> None:
    bodies = Bodies()
    decoded = []
    rest = bodies._rest
    bodies._rest = lambda head, tail, made: (
        decoded.append(len(head + tail)) or rest(head, tail, made)
    )
    sent = []
    for number in range(100):
        sent += [message(f"{number:03d}" + "x" * 50)]
        assert bodies.read(body(sent))["messages"] == sent
    assert len(set(decoded[1:])) == 1 and len(bodies._known) == 1


ODD = [
    b'{"messages": [1, 2]}',
    b'{"messages": [1, 23]}',
    b'{"messages": [1, 2.5]}',
    b'{"messages": [1, 2,]}',
    b'{"messages": [1, 2 3]}',
    b'{"messages": [1, 2], "messages": [4]}',
    b'{"messages": [1, 2], "messages": []}',
    b'{"messages": [1, 2], "mess\\u0061ges": [4]}',
    b'{"messages": [1, 2]} x',
    b'{"messages": [1, 2]',
    b'{"messages": []}',
    b'{"messages": [,]}',
    b'{"messages": {}}',
    b'{"messages" : [ 1 ,\n 2 ] , "x" : 1 }',
    b'{"other": "\\"messages\\": [3]", "messages": [1]}',
    b'{"other": {"messages": [3]}, "messages": [1]}',
    b'{"other": 1}',
    b'{1: 2, "messages": [1]}',
    b"[1, 2]",
    b"",
    b'\xff{"messages": [1]}',
    b'\xef\xbb\xbf{"messages": [1]}',
    '{"messages": [1]}'.encode("utf-16"),
    b'{"messages": [1, NaN]}',
]


def outcome(read, raw):
    try:
        return read(raw)
    except ValueError as error:
        return type(error), str(error)


@pytest.mark.parametrize("before", range(0, len(ODD), 5))
def test_odd_bodies_are_what_json_makes_of_them(before) -> None:
    for raw in ODD:
        bodies = Bodies()
        for earlier in (ODD[0], ODD[before]):
            outcome(bodies.read, earlier)
        assert repr(outcome(bodies.read, raw)) == repr(outcome(json.loads, raw)), raw


def test_deep_nesting_is_json_s_own_error() -> None:
    deep = b'{"messages": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}"
    with pytest.raises(RecursionError):
        json.loads(deep)
    with pytest.raises(RecursionError):
        Bodies().read(deep)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.lists(VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]), VALUES),
        max_size=5,
    )
)
def test_it_equals_json_on_histories_that_grow_and_change(steps) -> None:
    bodies, sent = Bodies(keep=2), []
    for new, grows, indent, other in steps:
        sent = [*sent, *new] if grows else [*sent[:-1], *new]
        raw = json.dumps({"a": 1, "messages": sent, "z": other}, indent=indent, ensure_ascii=False)
        raw = raw.encode(errors="surrogatepass")
        assert repr(outcome(bodies.read, raw)) == repr(outcome(json.loads, raw))
