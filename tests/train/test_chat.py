"""Which form a run speaks: ChatML of its own tokenizers, or the template of its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_jax.agents.tools import format_call
from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import Message, ToolDef
from skyrl_jax.generation.renderer import ChatMLRenderer, TemplateRenderer
from skyrl_jax.generation.tokenizer import Tokenizer, train
from skyrl_jax.train.chat import check_chat, keep_template, log_check, open_chat, template_files
from skyrl_jax.train.scaffold import tools_renderer
from tests.actor.fakes import make_tokenizer
from tests.train import tiny

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or () %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = PLAIN.replace(
    "CALL", '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {}}\n</tool_call>'
)
REFUSES = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
BASH = ToolDef(
    name="bash", description="", parameters={"properties": {"command": {"type": "string"}}}
)
USER = Message(role="user", content="hi")


def folder(path: Path, template: str = "") -> Path:
    path.mkdir()
    make_tokenizer().save(path / "tokenizer.json")
    if template:
        config = {"eos_token": "<|im_end|>"}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        (path / "chat_template.jinja").write_text(template)
    return path


def chat(path: Path, kind: str):
    return open_chat(path, Tokenizer.load(path / "tokenizer.json"), kind)


def config(path: Path, **changes: object):
    return tiny.config(model__checkpoint=str(path), **changes)


@pytest.mark.parametrize("kind", ["codeact", "mini_swe_agent"])
def test_our_own_tokenizers_keep_chatml_to_the_last_id(tmp_path, kind) -> None:
    """Ids by hand: 9 added tokens, then the byte alphabet in order of code points."""
    tokenizer = train([""], 265)
    tokenizer.save(tmp_path / "tokenizer.json")
    renderer = open_chat(tmp_path, tokenizer, kind)
    assert isinstance(renderer, ChatMLRenderer)
    letter = {text: ord(text) - ord("!") + 9 for text in "userassistanthi"}
    newline = 9 + 94 + 12 + 82 + 10  # printable bytes first, then byte 10 of the others

    def said(role: str) -> list[int]:
        return [1, *(letter[one] for one in role), newline]

    opening = [*said("user"), letter["h"], letter["i"], 2, newline, *said("assistant")]
    assert list(renderer.initial([USER])) == opening
    assert list(renderer.delta([USER], stopped=True)) == [newline, *opening]
    assert renderer.stop_token_ids == (2,)


def test_codeact_reads_its_text_form_through_the_models_template(tmp_path) -> None:
    renderer = chat(folder(tmp_path / "m", HERMES), "codeact")
    assert isinstance(renderer, TemplateRenderer)

    def read(text: str) -> Message:
        return renderer.parse(renderer.assistant_ids(text), "stop")

    message = read(format_call("bash", {"command": "ls"}))
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("bash", {"command": "ls"})]
    assert "unknown tool 'rm'" in str(read(format_call("rm", {})).error)
    assert "needs the parameter 'command'" in str(read(format_call("bash", {})).error)
    assert read("words").error is not None
    done = [Message(role="tool", content="out")]
    text = renderer.tokenizer.decode(renderer.delta(done, stopped=True, after=message))
    assert text == "\n<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n"


def test_scaffolds_get_the_form_that_the_template_writes(tmp_path) -> None:
    renderer = chat(folder(tmp_path / "m", HERMES), "mini_swe_agent")
    with_tools = tools_renderer(renderer)((BASH,))
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    message = with_tools.parse(renderer.assistant_ids(call), "stop")
    assert message.tool_calls[0].arguments == {"command": "ls"}
    title = tools_renderer(renderer)(()).parse(renderer.assistant_ids(call), "stop")
    assert title == Message(role="assistant", content=call)


@pytest.mark.parametrize("kind", ["codeact", "mini_swe_agent"])
def test_a_template_that_refuses_tool_messages_is_refused(tmp_path, kind) -> None:
    path = folder(tmp_path / "m", REFUSES + HERMES)
    with pytest.raises(ConfigError, match=r"no tools.*start from a model whose chat template"):
        check_chat(config(path, agent__kind=kind, sft__max_steps=0))


def test_what_a_scaffold_cannot_use_is_named_with_what_would_be_right(tmp_path) -> None:
    plain, hermes = folder(tmp_path / "p", PLAIN), folder(tmp_path / "h", HERMES)
    external = {"agent__kind": "mini_swe_agent"}
    with pytest.raises(ConfigError, match=r"no form that is known here \(hermes, .*codeact"):
        check_chat(config(plain, sft__max_steps=0, **external))
    with pytest.raises(ConfigError, match=r"warm start .* set sft\.max_steps=0"):
        check_chat(config(hermes, sft__max_steps=5, **external))
    check_chat(config(hermes, sft__max_steps=0, **external))
    check_chat(config(plain, sft__max_steps=5))
    check_chat(config(folder(tmp_path / "own"), sft__max_steps=5, **external))
    (plain / "chat_template.jinja").unlink()
    (plain / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match=r"cannot read .*tokenizer_config\.json"):
        check_chat(config(plain))


def test_the_template_belongs_to_the_run_from_then_on(tmp_path) -> None:
    model, run = folder(tmp_path / "m", HERMES), folder(tmp_path / "run")
    keep_template(model, run)
    assert set(template_files(run)) == {"chat_template.jinja", "tokenizer_config.json"}
    assert isinstance(chat(run, "codeact"), TemplateRenderer)
    own = folder(tmp_path / "own")
    keep_template(own, own)
    assert template_files(own) == {} and isinstance(chat(own, "codeact"), ChatMLRenderer)


def test_the_check_at_the_start_is_told_and_written(tmp_path) -> None:
    path = folder(tmp_path / "m", HERMES)
    line = log_check(chat(path, "mini_swe_agent"), path)
    assert line.startswith("chat template (the model's own, calls as hermes): tool ok, ")
    told = json.loads((path / "template.json").read_text())
    assert told["call_format"] == "hermes" and told["matrix"]["tool"] == "ok"
    own = folder(tmp_path / "own")
    assert log_check(chat(own, "codeact"), own).startswith("chat template: tool ok, think_tool ok")
    assert json.loads((own / "template.json").read_text())["template"] == "chatml"
