"""The prefix-stability matrix: each verdict on a template made for it, then on the field's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from skyrl_jax.core.errors import DataError
from skyrl_jax.generation.renderer import ChatTemplate, open_renderer
from skyrl_jax.generation.renderer.folder import STAND_INS, read_template
from skyrl_jax.generation.renderer.matrix import (
    COLUMNS,
    check_template,
    describe,
    difference,
    summary,
)
from tests.actor.fakes import make_renderer

HEAD = "{% for m in messages %}[{{ m.role }}]"
TAIL = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
OK = {name: "ok" for name in COLUMNS} | {"par": "same", "args": "same"}


def matrix(source: str) -> dict[str, str]:
    made = ChatTemplate(source, specials=STAND_INS)
    verdicts = check_template(
        lambda messages, generate: made.render_dicts(messages, generate=generate)
    )
    return {name: verdict.value for name, verdict in verdicts.items()}


def history(*names: str, value: str) -> dict[str, str]:
    return OK | dict.fromkeys(names, value)


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (HEAD + "{{ m.content }}" + TAIL, OK),
        # the scaffold of the prompt is not what history has
        (
            HEAD + "{{ m.content }}" + TAIL.replace("[assistant]", "[assistant]<think>"),
            history("tool", "think_tool", "think_user", "user_after_tool", "ws", value="P@4"),
        ),
        # thinking is dropped behind the last user's message
        (
            "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.last = loop.index %}{% endif %}{% endfor %}" + HEAD +
            "{% if loop.index > ns.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
            + TAIL,
            OK | {"think_user": "H@2", "user_after_tool": "P@6"},
        ),
        # the last message is written otherwise
        (
            HEAD + "{{ m.content }}" + TAIL + "{% if not add_generation_prompt %}{{ eos_token }}"
            "{% endif %}",
            history("tool", "think_tool", "think_user", "user_after_tool", "ws", value="H@2")
            | {"par": "DIFF"},
        ),
        (HEAD + "{{ m.content if loop.last else m.content | trim }}" + TAIL, OK | {"ws": "H@2"}),
        (HEAD + "{{ m.content | trim }}" + TAIL, OK),  # trimmed always: append-only
        # tool results of one turn in one block
        (
            HEAD + "{{ m.content }}{% if m.role == 'tool' and not (loop.nextitem and "
            "loop.nextitem.role == 'tool') %}</tools>{% endif %}" + TAIL,
            OK | {"par": "DIFF"},
        ),
        (
            HEAD + "{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.arguments | tojson }}{% endfor %}" + TAIL,
            OK | {"args": "DIFF"},
        ),
        (
            HEAD + "{% for c in m.tool_calls or [] %}{{ c.function.arguments | items | list }}"
            "{% endfor %}" + TAIL,
            OK | {"args": "raises"},
        ),
        (
            "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}"
            "{% endfor %}" + HEAD + TAIL,
            OK | dict.fromkeys(("tool", "think_tool", "user_after_tool", "par", "args"), "raises"),
        ),
    ],
)  # fmt: skip
def test_each_verdict(source, want) -> None:
    assert matrix(source) == want


def test_the_form_of_the_tiny_policy_is_append_only() -> None:
    verdicts = check_template(make_renderer().text)
    want = OK | {"par": "DIFF"}
    assert {name: verdict.value for name, verdict in verdicts.items()} == want
    assert summary(verdicts) == ", ".join(f"{name} {value}" for name, value in want.items())


def test_a_verdict_brings_the_two_texts_and_what_training_does() -> None:
    made = ChatTemplate(HEAD + "{{ m.content }}" + TAIL.replace("t]{", "t]<think>{"))
    verdict = check_template(
        lambda messages, generate: made.render_dicts(messages, generate=generate)
    )["ws"]
    assert verdict.value == "P@4" and verdict.one.endswith("[assistant]<think>")
    one, other = difference(verdict.one, verdict.other, around=12)
    assert "<think>" in one and "A1" in other
    for column in COLUMNS:
        for value in ("ok", "P@4", "H@2", "raises", "same", "DIFF"):
            assert len(describe(column, value)) > 20
    assert difference("ab", "abc") == ["'ab'", "'abc'"]


# What faults.md 4b says of the templates of the trl wheel, column by column.
_ALL_OK = ("ok", "ok", "ok", "ok", "ok", "DIFF")
TABLE = {
    "qwen2_5": (*_ALL_OK, "DIFF"),
    "qwen3_instruct_2507": (*_ALL_OK, "DIFF"),
    "qwen3_training": (*_ALL_OK, "DIFF"),
    "qwen3": ("H@2", "ok", "H@2", "P@6", "H@2", "DIFF", "DIFF"),
    "qwen3_5_think": ("P@6", "ok", "P@4", "P@6", "P@4", "DIFF", "raises"),
    "qwen3_6": ("P@6", "ok", "P@4", "P@6", "P@4", "DIFF", "raises"),
    "qwen3_5_nothink": ("P@6", "P@4", "P@4", "P@4", "P@4", "DIFF", "raises"),
    "qwen3_5_think_training": (*_ALL_OK, "raises"),
    "qwen3_6_training": (*_ALL_OK, "raises"),
    "qwen3_8": (*_ALL_OK, "raises"),
    "qwen3_8_training": (*_ALL_OK, "raises"),
    "glm4moe": ("ok", "ok", "H@2", "P@6", "ok", "DIFF", "raises"),
    "glm4moe_training": ("ok", "ok", "H@2", "P@6", "ok", "same", "raises"),
    "gptoss": ("P@6", "ok", "H@2", "P@6", "H@2", "same", "DIFF"),
    "gptoss_training": ("P@6", "ok", "H@2", "P@6", "H@2", "same", "DIFF"),
    "deepseek_r1_distill": ("P@4", "P@4", "P@4", "P@4", "P@4", "DIFF", ""),
    "deepseekv3_training": ("P@4", "P@4", "P@4", "P@4", "P@4", "DIFF", ""),
    "nemotron_3_nano": ("P@4", "ok", "P@4", "P@6", "P@4", "DIFF", "raises"),
    "nemotron_3_super": ("P@4", "ok", "P@4", "P@6", "P@4", "DIFF", "raises"),
    "nemotron_3_ultra": ("P@4", "ok", "P@4", "P@6", "P@4", "DIFF", "raises"),
    "phi3": ("H@2", "H@2", "H@2", "H@2", "H@2", "same", "same"),
    "phi3_5": ("H@2", "H@2", "H@2", "H@2", "H@2", "same", "same"),
    "llama3": ("ok", "ok", "ok", "ok", "ok", "same", ""),
    "lfm2": ("ok", "ok", "ok", "ok", "ok", "same", ""),
    "cohere2": ("ok", "ok", "ok", "ok", "ok", "same", ""),
}
# Roles must alternate: an assistant turn behind a tool message is refused (4b: its text alone).
CORRECTED = {"cohere2": dict.fromkeys(("tool", "think_tool", "user_after_tool"), "raises")}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_templates_of_the_field(trl_templates, name) -> None:
    want = dict(zip(COLUMNS, TABLE[name], strict=True)) | CORRECTED.get(name, {})
    found = matrix(trl_templates[name])
    assert found == {column: value or found[column] for column, value in want.items()}


def test_every_template_of_the_wheel_gets_a_verdict_in_every_column(trl_templates) -> None:
    assert len(trl_templates) >= 72
    for name, source in trl_templates.items():
        found = matrix(source)
        assert tuple(found) == COLUMNS, name
        for column, value in found.items():
            kinds = (
                ("same", "DIFF")
                if column in ("par", "args")
                else ("ok", "P@4", "P@6", "H@2", "H@4")
            )
            assert value in (*kinds, "raises"), (name, column, value)


def test_a_model_folder_gives_the_matrix_of_its_template(qwen3, trl_templates) -> None:
    renderer = open_renderer(qwen3)
    found = {name: verdict.value for name, verdict in check_template(renderer.text).items()}
    assert found == matrix(read_template(qwen3).source)
    assert found == dict(zip(COLUMNS, TABLE["qwen3"], strict=True))


def doctor(repo_root, *arguments: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "launchers/doctor.py", *arguments]
    return subprocess.run(argv, cwd=repo_root, capture_output=True, text=True, timeout=120)


def test_doctor_prints_the_matrix_and_what_training_does(
    repo_root, qwen3, trl_templates, tmp_path
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(trl_templates["qwen3"])
    told = doctor(repo_root, "template", f"--template={file}", "--json")
    assert told.returncode == 0, told.stderr
    matrix_of_it = dict(zip(COLUMNS, TABLE["qwen3"], strict=True))
    assert json.loads(told.stdout) == {"template": str(file), "matrix": matrix_of_it}
    told = doctor(repo_root, "template", f"--tokenizer={qwen3}")
    assert told.returncode == 0, told.stderr
    assert "user_after_tool P@6     the template rewrites an earlier turn" in told.stdout
    assert "a turn ends at <|im_end|> (151645)" in told.stdout and "read as hermes" in told.stdout
    on = doctor(
        repo_root, "template", f"--tokenizer={qwen3}", '--variables={"enable_thinking": false}'
    )
    assert "P@4" in on.stdout


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ((), "name what to look at first: template"),
        (("template", "--template=none.jinja"), "cannot read the chat template none.jinja"),
        (("template", "--tokenizer=none"), "cannot read none/tokenizer_config.json"),
        (("template", "--template=setup.py", "--variables=3"), "must be a JSON object"),
        (("template", "--template=x", "--tmeplate=y"), "tmeplate"),
    ],
)
def test_doctor_names_what_is_wrong_with_its_command_line(repo_root, arguments, needle) -> None:
    told = doctor(repo_root, *arguments)
    assert told.returncode == 2 and needle in told.stderr, told.stderr


def test_a_refusal_is_told_with_its_reason() -> None:
    def refuse(messages, generate):
        raise DataError("no")

    verdicts = check_template(refuse)
    assert {v.value for v in verdicts.values()} == {"raises"} and verdicts["ws"].one == "no"
