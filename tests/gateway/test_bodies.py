"""Bodies that repeat each other are decoded once, and always to what a whole decode gives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_jax.gateway.bodies import Bodies
from skyrl_jax.gateway.strict import decode


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

    def watched(raw, start, known, shared):
        decoded.append(len(raw) - (known.ends[shared - 1] if shared else 0))
        return rest(raw, start, known, shared)

    bodies._rest = watched
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
    b'{"messages": [1, 2], "x": -Infinity}',
    b'{"messages": [1, 2, 1e999]}',
    b'{"x": 1e999, "messages": [1, 2]}',
    b'{"messages": [1, 2, "\\ud800"]}',
    b'{"messages": [1, 2, "\\ud83d\\ude00"]}',
    b'{"messages": [1, 2, {"\\uDFFF": 1}]}',
    b'{"messages": [1, 2], "x": "\\udc00"}',
    b'{"\\ud8ff": 0, "messages": [1, 2]}',
    b'{"messages": [1, 2], "messages": ["\xee\x80\x80"]}',
    b'{"messages": [1, 2' + b" " * 9 + b"\n,3]}",
    b'{"messages": [1, 2, ' + b"[" * 100_000,
]


def outcome(read, raw):
    try:
        return read(raw)
    except (ValueError, RecursionError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("before", range(0, len(ODD), 5))
def test_odd_bodies_are_what_a_whole_decode_makes_of_them(before) -> None:
    for raw in ODD:
        bodies = Bodies()
        for earlier in (ODD[0], ODD[before]):
            outcome(bodies.read, earlier)
        assert repr(outcome(bodies.read, raw)) == repr(outcome(decode, raw)), raw


def test_a_refused_body_is_not_remembered() -> None:
    bodies = Bodies()
    bodies.read(ODD[0])
    for _ in range(2):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            bodies.read(b'{"messages": [1, 2, "\\ud800"]}')
    assert [known.raw for known in bodies._known] == [ODD[0]]


def test_the_words_around_the_list_may_change_on_either_side() -> None:
    """A client that counts its tokens down before the list, and count_tokens without the limit."""
    bodies, sent = Bodies(), [message("ä"), message("b")]
    first = bodies.read(body(sent))["messages"]
    for raw in (b'{"max_tokens": 7, "x": "\xc3\xa4", ' + body(sent)[1:], body(sent, n=2)):
        again = bodies.read(raw)
        assert again == json.loads(raw)
        assert all(one is other for one, other in zip(first, again["messages"], strict=True))
    assert len(bodies._known) == 1


def test_a_surrogate_pair_in_what_was_read_before_is_not_looked_at_again() -> None:
    bodies, sent = Bodies(), [message("\U0001f600")]
    assert bodies.read(body(sent))["messages"] == sent
    bodies._known[0].items[0] = "\ud800"  # would be refused, and everything decoded anew
    assert bodies.read(body([*sent, message("\U0001f600")]))["messages"] == ["\ud800", *sent]


def test_what_is_remembered_has_a_size() -> None:
    bodies = Bodies()
    for mark in "abcd":
        bodies.read(body([message(mark + "x" * (3 << 20))]))
    assert [known.raw[57:58] for known in bodies._known] == [b"c", b"d"]
    large = body([message("e" + "x" * (9 << 20))])
    assert bodies.read(large)["messages"] == json.loads(large)["messages"]
    assert [known.raw for known in bodies._known] == [large]


def test_a_list_of_very_many_elements_is_decoded_whole() -> None:
    bodies = Bodies()
    raw = b'{"messages": [' + b"1," * 20_000 + b"1]}"
    assert bodies.read(raw) == json.loads(raw) and bodies._known == []


def test_deep_nesting_is_json_s_own_error() -> None:
    deep = b'{"messages": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}"
    with pytest.raises(RecursionError):
        decode(deep)
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
def test_it_equals_a_whole_decode_on_histories_that_grow_and_change(steps) -> None:
    bodies, sent = Bodies(keep=2), []
    for new, grows, indent, other in steps:
        sent = [*sent, *new] if grows else [*sent[:-1], *new]
        raw = json.dumps({"a": 1, "messages": sent, "z": other}, indent=indent, ensure_ascii=False)
        raw = raw.encode(errors="surrogatepass")
        assert repr(outcome(bodies.read, raw)) == repr(outcome(decode, raw))
