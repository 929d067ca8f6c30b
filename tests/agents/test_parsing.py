"""The function-call text form: what is read, what goes back as an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.agents.parsing import LENGTH_CUT, NO_CALL, parse_assistant
from skyrl_jax.agents.tools import TOOLS, format_call, system_prompt
from skyrl_jax.core.types import ToolCall

SUBMIT = "<function=submit>\n</function>"


def parse(text: str, cut: bool = False):
    return parse_assistant(text, cut)


def test_the_form_of_the_brief_is_read() -> None:
    text = (
        "Let me look.\n<function=str_replace_editor>\n<parameter=path>pkg/mod.py</parameter>\n"
        "<parameter=old_str>return a < b</parameter>\n<parameter=new_str>return a <= b</parameter>"
        "\n</function>"
    )
    message = parse(text)
    arguments = {"path": "pkg/mod.py", "old_str": "return a < b", "new_str": "return a <= b"}
    assert message.tool_calls == (ToolCall(name="str_replace_editor", arguments=arguments),)
    assert message.content == text and message.role == "assistant" and message.error is None


VALUE = st.text(alphabet=st.sampled_from("ab <>=/\n") | st.characters(exclude_categories=["Cs"]))


@given(VALUE, VALUE)
def test_formatted_calls_read_back(old: str, new: str) -> None:
    arguments = {"path": "x.py", "old_str": f"\n{old}\n", "new_str": f"\n{new}\n"}
    (call,) = parse(format_call("str_replace_editor", arguments)).tool_calls
    assert call.arguments == {"path": "x.py", "old_str": old, "new_str": new}


def test_values_may_hold_markup() -> None:
    value = "x = '</function><parameter=path>' + '</parameter>.'"
    (call,) = parse(format_call("bash", {"command": value})).tool_calls
    assert call.arguments == {"command": value}


def test_several_calls_are_read_in_order() -> None:
    message = parse(format_call("bash", {"command": "ls"}) + "\n" + SUBMIT)
    assert [call.name for call in message.tool_calls] == ["bash", "submit"]


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("I am done.", "no tool call"),
        ("", "no tool call"),
        ("<function=rm>\n</function>", "unknown tool 'rm'; tools: bash, str_replace_editor"),
        ("<function=bash>\n</function>", "needs the parameter 'command'"),
        ("<function=bash>\n<parameter=command>ls", "'command' is not closed"),
        ("<function=bash>\n<parameter=command>ls</parameter>", "'command' is not closed"),
        ("<function=submit>\n", "submit: expected <parameter=...> or </function>"),
        (format_call("submit", {"note": "x"}), "no parameter 'note'"),
        (format_call("str_replace_editor", {"command": "undo", "path": "x"}), "must be one of"),
        (
            "<function=bash>\n<parameter=command>a</parameter>\n<parameter=command>b</parameter>\n"
            "</function>",
            "given twice",
        ),
    ],
)
def test_what_cannot_be_read_goes_back_as_an_error(text: str, needle: str) -> None:
    message = parse(text)
    assert message.tool_calls == () and message.error.startswith("error: ")
    assert needle in message.error


def test_one_broken_call_stops_all_calls_of_the_answer() -> None:
    message = parse(SUBMIT + "<function=bash>\n")
    assert message.tool_calls == () and message.error


def test_a_cut_answer_is_told_so_and_not_run() -> None:
    """Faults C34: "no tool call found" would be a lie."""
    assert parse("<function=bash>\n<parameter=command>rm -rf x", cut=True).error == LENGTH_CUT
    assert parse(SUBMIT, cut=True).tool_calls == ()
    assert parse("...").error == NO_CALL


def test_the_full_prompt_names_every_tool_and_parameter() -> None:
    text = system_prompt()
    for tool in TOOLS:
        assert tool.name in text
        assert all(parameter.name in text for parameter in tool.parameters)
