"""What models say: read where it is well formed, an error where it is not, never an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import ToolCall, ToolDef
from skyrl_jax.generation.renderer.formats import (
    CALL_FORMATS,
    find_call_format,
    guess_call_format,
    hermes,
    llama_json,
    openhands,
    qwen_xml,
    reasoning,
)

LS = ToolCall(name="bash", arguments={"command": "ls"})
TOOLS = (
    ToolDef(
        name="edit",
        description="",
        parameters={
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "line": {"type": "integer"},
                "range": {"type": ["array", "null"]},
                "sure": {"type": "boolean"},
                "odd": {"type": 7},
            },
        },
    ),
)
MARKUP = [
    "<tool_call>", "</tool_call>", "<function=bash>", "</function>", "<parameter=command>",
    "</parameter>", '{"name": "bash", "arguments": {"command": "ls"}}', '{"name": ', "<think>",
    "</think>", '"', "{", "}", "[" * 3000, "\n", "1e999", "NaN", '"\\ud800"', "<|python_tag|>", ";",
    '{"name": "edit", "parameters": ', "9" * 5000, "<parameter=line>", "<function=>",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(MARKUP) | st.text(max_size=8), max_size=12).map("".join)


@given(TEXT, st.sampled_from([(), TOOLS]))
def test_no_text_makes_a_reader_raise_and_what_it_reads_can_be_sent(text, tools) -> None:
    for form in CALL_FORMATS.values():
        reading = form.read(text, tools)
        assert not (reading.calls and reading.problem)
        for call in reading.calls:
            assert call.name
            assert json.loads(json.dumps(dict(call.arguments))) == call.arguments
        if reading.problem or not reading.calls:
            assert reading.content == text


@given(TEXT, st.booleans())
def test_reasoning_and_content_lose_nothing_but_layout(text, opened) -> None:
    thought, content = reasoning.split(text, opened=opened)
    if thought is None:
        assert content == text and not opened
    else:
        kept = text.replace("<think>", "").replace("</think>", "").split()
        said = f"{thought} {content}".replace("<think>", "").replace("</think>", "").split()
        assert "".join(kept) == "".join(said)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.text(max_size=5))
def test_json_calls_read_back_whatever_they_hold(arguments, extra) -> None:
    arguments = {**arguments, "x": f"{extra}</tool_call>"}
    call = ToolCall(name="f", arguments=arguments)
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    reading = hermes.read(f"So.\n<tool_call>\n{body}\n</tool_call>", ())
    assert (reading.calls, reading.content) == ((call,), "So.")
    body = json.dumps({"name": "f", "parameters": arguments})
    assert llama_json.read(f"<|python_tag|>{body}", ()).calls == (call,)


def test_hermes_reads_several_calls_and_the_text_around() -> None:
    one = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    text = f"First.\n{one}\n{one}\nThat is all."
    reading = hermes.read(text, ())
    assert reading.calls == (LS, LS) and reading.content == "First.\nThat is all."
    as_text = '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>'
    assert hermes.read(as_text, ()).calls == (LS,)


XML = "<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>"


def test_qwen_xml_reads_calls_with_and_without_outer_tags() -> None:
    for text in (f"Look.\n\n<tool_call>\n{XML}\n</tool_call>", f"Look.\n{XML}"):
        reading = qwen_xml.read(text, ())
        assert reading.calls == (LS,) and reading.content == "Look."
    twice = qwen_xml.read(f"<tool_call>{XML}</tool_call>\n<tool_call>\n{XML}\n</tool_call>", ())
    assert twice.calls == (LS, LS) and twice.content == ""


def test_openhands_calls_stay_in_the_content() -> None:
    reading = openhands.read(f"Look.\n{XML}", ())
    assert reading.calls == (LS,) and reading.content == f"Look.\n{XML}"


def test_values_get_the_kind_of_the_schema_and_stay_text_where_they_do_not_fit() -> None:
    def value(key: str, text: str):
        call = f"<function=edit><parameter={key}>{text}</parameter></function>"
        return qwen_xml.read(call, TOOLS).calls[0].arguments[key]

    assert value("path", "12") == "12"
    assert value("line", "12") == 12 and value("line", "twelve") == "twelve"
    assert value("line", "12 13") == "12 13"
    assert value("range", "[1, 2]") == [1, 2] and value("range", "null") is None
    assert value("sure", "True") is True and value("sure", "false") is False
    assert value("odd", "1") == "1" and value("unknown", "1") == "1"


def test_llama_answers_in_other_json_are_answers() -> None:
    for text in ('{"result": 3}', "It is {}.", "", '["name"]'):
        assert llama_json.read(text, ()) == llama_json.Reading(content=text)
    two = '{"name": "bash", "parameters": {"command": "ls"}}; {"name": "f", "parameters": {}}'
    assert [call.name for call in llama_json.read(two, ()).calls] == ["bash", "f"]


@pytest.mark.parametrize(
    ("read", "text", "needle"),
    [
        (hermes.read, "<tool_call>\n{bad}\n</tool_call>", "cannot be read: Expecting property"),
        (hermes.read, '<tool_call>{"name": "f"}</tool_call>', 'f needs "arguments"'),
        (hermes.read, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "JSON object"),
        (hermes.read, '<tool_call>{"arguments": {}}</tool_call>', 'needs "name"'),
        (hermes.read, '<tool_call>{"name": "f", "arguments": {}}', "not closed by </tool_call>"),
        (hermes.read, "<tool_call>3</tool_call>", "must be a JSON object"),
        (hermes.read, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN"),
        (hermes.read, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "number"),
        (hermes.read, '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>', "Unicode"),
        (hermes.read, "<tool_call>" + "[" * 100_000, "nested too deeply"),
        (qwen_xml.read, "<tool_call>\nls\n</tool_call>", "expected <function=...>"),
        (qwen_xml.read, f"<tool_call>\n{XML}", "bash: the tool call is not closed"),
        (qwen_xml.read, "<function=bash>\n<parameter=command>\nls", "'command' is not closed"),
        (qwen_xml.read, "<function=></function>", "needs the name"),
        (openhands.read, "<function=></function>", "needs the name"),
        (openhands.read, f"{XML}<function=bash>ls</function>", "expected <parameter=...>"),
        (llama_json.read, '{"name": "f", "parameters": {', "cannot be read"),
        (llama_json.read, '{"name": "f", "parameters": {}} done', "text after the tool call"),
        (llama_json.read, '{"name": "f"}', 'needs "parameters"'),
    ],
)
def test_malformed_calls_are_told_and_none_is_made(read, text, needle) -> None:
    reading = read(text, ())
    assert needle in reading.problem and reading.calls == () and reading.content == text


@pytest.mark.parametrize(
    ("text", "opened", "want"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes")),
        ("hm\n</think>\n\nyes", True, ("hm", "yes")),
        ("\n<think>hm", False, ("hm", "")),  # never closed: thinking to its end
        ("hm", True, ("hm", "")),
        ("<think>\n\n</think>\n\nyes", False, ("", "yes")),
        ("yes </think> no", False, (None, "yes </think> no")),
        ("so <think>x</think>", False, (None, "so <think>x</think>")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
def test_reasoning(text, opened, want) -> None:
    assert reasoning.split(text, opened=opened) == want


def test_formats_by_name_and_by_template(trl_templates) -> None:
    assert find_call_format("none") is None
    with pytest.raises(ConfigError, match=r"'hermse' is none of hermes, qwen_xml"):
        find_call_format("hermse")
    names = {
        "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_5_think": "qwen_xml",
        "nemotron_3_nano": "qwen_xml", "llama3_1": "llama_json", "llama3": "none",
        "glm4moe": "none", "gptoss": "none", "phi3": "none",
    }  # fmt: skip
    assert {name: guess_call_format(trl_templates[name]) for name in names} == names
