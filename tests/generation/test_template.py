"""A chat template renders as transformers renders it; what it refuses is told."""

from __future__ import annotations

from datetime import datetime

import pytest

from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import Message, ToolCall, ToolDef
from skyrl_jax.generation.renderer import ChatTemplate

USER = Message(role="user", content="hi")
CALL = ToolCall(name="bash", arguments={"command": "ls <a> & 'é'"}, id="c1")
TOOL = ToolDef(name="bash", description="Run.", parameters={"type": "object"})


def render(source: str, *messages: Message, tools=(), generate: bool = False, **variables) -> str:
    specials = {"bos_token": "<s>"}
    made = ChatTemplate(source, specials=specials, now=datetime(2026, 11, 30))
    return made.render(messages or (USER,), tools, generate=generate, **variables)


def test_blocks_are_trimmed_and_special_tokens_named() -> None:
    source = "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'user' %}\n" \
        "{{ m['content'] }}\n    {% endif %}\n{% endfor %}\n" \
        "{% if add_generation_prompt %}\nA:{% endif %}"  # fmt: skip
    assert render(source) == "<s>\nhi\n"
    assert render(source, generate=True) == "<s>\nhi\nA:"


def test_json_is_not_escaped_for_html_and_takes_the_arguments_of_dumps() -> None:
    spoken = Message(role="assistant", content="", tool_calls=(CALL,))
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    assert render(source, spoken) == '{"command": "ls <a> & \'é\'"}'
    assert '"name": "bash"' in render("{{ tools | tojson(indent=2) }}", tools=(TOOL,))
    ascii_only = "{{ 'é' | tojson(ensure_ascii=True) }}{{ [1,2] | tojson(separators=(',',':')) }}"
    assert render(ascii_only) == '"\\u00e9"[1,2]'
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


def test_dates_loop_controls_and_the_generation_tag() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "30 Nov 2026"
    assert (
        render("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{i}}{% endfor %}")
        == "1"
    )
    source = (
        "{% for m in messages %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endfor %}"
    )
    assert render(source, USER, USER) == "[hi][hi]"


def test_what_a_template_refuses_is_told() -> None:
    with pytest.raises(DataError, match="refuses these messages: no system"):
        render("{{ raise_exception('no system') }}")
    with pytest.raises(DataError, match="fails on these messages: TypeError"):
        render("{{ messages[0].content + 3 }}")
    with pytest.raises(DataError, match="refuses these messages: 'dict object' has no attribute"):
        render("{{ messages[0].nothing.at_all }}")
    with pytest.raises(ConfigError, match="no jinja2 template"):
        ChatTemplate("{% for %}")
    with pytest.raises(DataError, match="role 'developer'"):
        render("x", Message(role="developer", content=""))


def test_a_template_cannot_reach_into_python() -> None:
    for attack in ("''.__class__.__mro__", "messages.append(1)", "messages[0].update(role='x')"):
        with pytest.raises(DataError):
            render("{{ " + attack + " }}")


def test_messages_take_the_form_that_templates_read() -> None:
    made = ChatTemplate("{{ messages[0].reasoning_content }}")
    spoken = Message(role="assistant", content="a", tool_calls=(CALL, CALL), reasoning="r")
    answers = [Message(role="tool", content=text) for text in ("one", "two", "three")]
    function = {"name": "bash", "arguments": dict(CALL.arguments)}
    first, one, two, three = made.dicts([spoken, *answers])
    assert first == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "tool_calls": [
            {"type": "function", "id": "c1", "function": function}
        ] * 2,
    }  # fmt: skip
    assert one == {"role": "tool", "content": "one", "tool_call_id": "c1", "name": "bash"}
    assert two["name"] == "bash" and "name" not in three
    assert "tool_calls" not in made.dicts([Message(role="assistant", content="a")])[0]


def test_a_tool_message_is_named_by_the_call_it_answers() -> None:
    calls = tuple(ToolCall(name=name, arguments={}, id=name.upper()) for name in ("f", "g"))
    spoken = Message(role="assistant", content="", tool_calls=calls)
    answers = [Message(role="tool", content="", tool_call_id=key) for key in ("G", "F")]
    made = ChatTemplate("").dicts([spoken, *answers])
    assert [item["name"] for item in made[1:]] == ["g", "f"]


def test_reasoning_goes_where_the_template_reads_it() -> None:
    thought = Message(role="assistant", content="a", reasoning="r")
    for source, want in (
        ("{{ messages[0].thinking }}", "r"),
        ("{{ messages[0]['reasoning'] }}", "r"),
        ("{# </think> #}{{ messages[0].content }}", "<think>\nr\n</think>\n\na"),
        ("{{ messages[0].content }}", "a"),
        ("{{ messages[0].content }}{{ enable_thinking }}", "a"),
    ):
        assert render(source, thought) == want


def test_arguments_are_objects_unless_only_text_works() -> None:
    spoken = Message(role="assistant", content="", tool_calls=(CALL,))
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
    items = loop.replace("%s", "{% for k, v in c.function.arguments | items %}{{ k }}{% endfor %}")
    assert render(items, spoken) == "command"
    text = loop.replace("%s", "{{ 'args: ' + c.function.arguments }}")
    assert render(text, spoken) == 'args: {"command": "ls <a> & \'é\'"}'
