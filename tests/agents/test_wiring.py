"""A config that names a foreign scaffold: its flag, its checks, its words."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from configs.swe import get_config
from launchers.common import expand_shorthand
from skyrl_jax.agents.parsing import parse_assistant
from skyrl_jax.agents.scaffolds import mini_swe_agent, openhands, scaffold
from skyrl_jax.agents.scripted import CODEACT, DONE, SHELL, ForcedGenerator, script, words_of
from skyrl_jax.agents.tools import specs_of
from skyrl_jax.core.config import parse_config
from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import Completion, Message, SamplingParams, ToolDef
from skyrl_jax.core.validate import validate_config
from skyrl_jax.train.scaffold import tools_renderer
from skyrl_jax.train.trainable import check_trainable
from skyrl_jax.train.world import warm_start_corpus
from tests.actor.fakes import BUGGY, FIXED, PATH, make_renderer, make_task
from tests.tasks.worlds import in_bwrap, make_suite

BASH = ToolDef(
    name="bash",
    description="Run.",
    parameters={"properties": {"command": {"type": "string"}}, "required": ["command"]},
)


def config(**changes):
    values = get_config("quickstart").to_dict()
    for path, value in changes.items():
        section, key = path.split("__")
        values[section][key] = value
    return parse_config(values)


def test_the_short_flag_names_the_kind():
    before = ["--config=configs/swe.py", "--config.agent=mini_swe_agent", "--config.agent.kind=x"]
    assert expand_shorthand(before) == [
        "--config=configs/swe.py",
        "--config.agent.kind=mini_swe_agent",
        "--config.agent.kind=x",
    ]


def test_the_quick_start_takes_mini_swe_agent():
    made = validate_config(config(agent__kind="mini_swe_agent"))
    assert check_trainable(made) is made
    with pytest.raises(ConfigError, match="codeact, mini_swe_agent, openhands"):
        validate_config(config(agent__kind="other"))


def test_combinations_without_a_second_uid_or_words_are_refused():
    with pytest.raises(ConfigError, match=r"sandbox\.backend = 'process' has none"):
        validate_config(config(agent__kind="mini_swe_agent", sandbox__backend="process"))
    full = config(agent__kind="mini_swe_agent", agent__prompt_style="full")
    for other in (full, config(agent__kind="openhands")):
        with pytest.raises(ConfigError, match="teaches .codeact."):
            check_trainable(other)
    none = config(agent__kind="mini_swe_agent", agent__prompt_style="full", sft__max_steps=0)
    assert check_trainable(none) is none
    with pytest.raises(ConfigError, match="'codeact': neither .* nor a scaffold"):
        scaffold(config().agent, None, command_timeout_s=1.0, cwd="/")


def test_the_program_of_a_config(tmp_path):
    agent = config(agent__kind="mini_swe_agent").agent
    program = mini_swe_agent(agent, tmp_path, command_timeout_s=10.0, cwd="/testbed")
    assert program.layers == (str(tmp_path),) and program.submitted == ("Submitted",)
    sections = program.job["config"]
    assert sections["agent"]["system_template"] == SHELL.system
    assert sections["environment"]["timeout"] == 50
    assert "[:256]" in sections["model"]["observation_template"]
    full = dataclasses.replace(agent, prompt_style="full")
    sections = mini_swe_agent(full, tmp_path, command_timeout_s=10.0, cwd="/").job["config"]
    assert "system_template" not in sections["agent"] and sections["model"] == {}
    for style, said in (("compact", True), ("full", False)):
        made = openhands(dataclasses.replace(agent, prompt_style=style), tmp_path, cwd="/x")
        assert bool(made.job["system_prompt"]) == said and made.job["cwd"] == "/x"


def test_a_script_in_the_words_of_a_shell():
    texts = script(make_task(), 0, wrong_first=0.0, seed=0, words=SHELL)
    assert words_of("mini_swe_agent") is SHELL and words_of("codeact") is CODEACT
    message = parse_assistant(texts[0], False, specs_of([BASH]))
    assert message.tool_calls[0].arguments == {"command": f"edit {PATH} '{BUGGY}' '{FIXED}'"}
    message = parse_assistant(texts[1], False, specs_of([BASH]))
    assert message.tool_calls[0].arguments == {"command": DONE}
    assert [m.role for m in SHELL.opening("x")] == ["system", "user"]
    assert CODEACT.opening("x") == (Message(role="user", content="x"),)
    assert DONE in "".join(warm_start_corpus([], "mini_swe_agent"))


def test_the_parser_knows_the_clients_tools_alone():
    call = CODEACT.edit("a", "b", "c")
    assert "unknown tool" in str(parse_assistant(call, False, specs_of([BASH])).error)
    bare = "<function=bash>\n</function>"
    assert "needs the parameter 'command'" in str(
        parse_assistant(bare, False, specs_of([BASH])).error
    )
    renderer = make_renderer()
    with_tools = tools_renderer(renderer)
    ids = renderer.assistant_ids("a title")
    assert with_tools(()).parse(ids, "stop") == Message(role="assistant", content="a title")
    assert with_tools((BASH,)).parse(ids, "stop").error is not None
    opening = [Message(role="user", content="x")]
    assert with_tools((BASH,)).initial(opening) == renderer.initial(opening)


def test_forced_generators_follow_their_script():
    asked = []

    class Server:
        async def generate(self, prompt_ids, sampling, session):
            asked.append((tuple(prompt_ids), sampling, session))
            return Completion(token_ids=(), logprobs=(), weight_versions=(), finish_reason="length")

    forced = ForcedGenerator(Server(), [(1, 2)])
    asyncio.run(forced.generate([5], SamplingParams(seed=4), "s"))
    assert asked == [((5,), SamplingParams(seed=4, forced_ids=(1, 2)), "s")]
    with pytest.raises(DataError, match="over but the episode is not"):
        asyncio.run(forced.generate([5], SamplingParams(), "s"))


def test_the_shell_of_the_compact_style_has_an_edit_command(tmp_path):
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    path, bad, good = (task.payload[key] for key in ("path", "old_str", "new_str"))

    async def work(provider):
        world = suite.environment(task, provider)
        await world.reset()
        command = parse_assistant(SHELL.edit(path, bad, good), False).tool_calls[0]
        done = await world.shell(["bash", "-c", command.arguments["command"]])
        again = await world.shell(["bash", "-c", command.arguments["command"]])
        other = await world.shell(
            ["bash", "-c", "edit only-one; echo $A; cat; pwd"], env={"A": "b"}
        )
        where = await world.shell(["pwd"], cwd="/tmp", stdin=b"")
        diff = await world.submission()
        await world.close()
        return done, again, other, where, await suite.reward(task, diff, provider)

    done, again, other, where, score = in_bwrap(work)
    assert (done.returncode, done.output) == (0, "ok\npassed")
    assert again.output.startswith("no match")
    assert "edit: command not found" in other.output and "b\n/testbed\n" in other.output
    assert where.output == "/tmp\n"
    assert score.value == 1.0
