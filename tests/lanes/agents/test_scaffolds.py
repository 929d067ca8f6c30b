"""Real scaffolds, unmodified, on a real SWE-bench row; the recorded rows are the engine's own log.

Each plays the row twice: the policy is made to say a repair, its ids forced through the engine's
real forward pass, and once what it really samples. Run by `make lane-agents`.
"""

import asyncio
import zipfile

import numpy as np
import pytest

from skyrl_jax.agents.external import GUEST, Program
from skyrl_jax.agents.install import LAYER_ENV, SITE, packages_layer
from skyrl_jax.agents.parsing import parse_assistant
from skyrl_jax.agents.scaffolds import (
    MINI_SWE_AGENT,
    mini_swe_agent,
    openhands,
    openhands_layer,
)
from skyrl_jax.agents.scripted import DONE, SUBMIT
from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.types import Status
from skyrl_jax.generation.renderer import ChatMLRenderer
from skyrl_jax.generation.tokenizer import train
from skyrl_jax.tasks.swe.trees import download, downloads_folder
from tests.lanes.agents.world import (
    VERSION,
    Parts,
    call,
    logprobs,
    make_engine,
    make_suite,
    repair,
    tokens,
)
from tests.tasks.worlds import agent

ROWS = "responses_api_agents/mini_swe_agent_2/data/example.jsonl"
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="session")
def cache(repo_root):
    return repo_root / ".cache" / "lanes" / "agents" / "cache"


@pytest.fixture(scope="session")
def suite(cache, tmp_path_factory):
    options = ("--python-version", "3.12", "--only-binary=:all:")
    wheel = download("nemo-gym==0.4.0", downloads_folder(), *options)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(archive.read(ROWS))
    return make_suite(path, cache)


@pytest.fixture(scope="session")
def mini_layer(cache):
    return packages_layer("mini-swe-agent", MINI_SWE_AGENT, cache)


@pytest.fixture(scope="session")
def parts(suite, mini_layer, cache):
    (task,) = suite.tasks("all")
    config = mini_layer / SITE.lstrip("/") / "minisweagent/config/benchmarks/swebench.yaml"
    # its own words make short prompts: the engine's programs are compiled for their length
    tokenizer = train([task.prompt, config.read_text(), *repair(task, SUBMIT)] * 2, 2048)
    renderer = ChatMLRenderer(tokenizer, parse_assistant)
    return Parts(suite, renderer, make_engine(2048), cache)


def mini(layer):
    return mini_swe_agent(agent("full"), layer, command_timeout_s=60.0, cwd="/testbed")


def openai_loop(layer):
    program = GUEST.parents[2] / "tests/lanes/agents/openai_program.py"
    return Program(
        name="openai loop",
        argv=("python3", "{shared}/openai_program.py"),
        layers=(str(layer),),
        files={program.name: program},
        job={"cwd": "/testbed"},
        env=LAYER_ENV,
    )


def check_turns(episode, log):
    """Every call was recorded as the engine made it: ids and log-probs, byte for byte."""
    said = [turn.completion for turn in episode.turns]
    assert [turn.token_ids for turn in said] == [result.token_ids for result in log]
    found = np.array([x for turn in said for x in turn.logprobs], np.float32)
    assert found.tobytes() == logprobs(log)
    assert {v for turn in said for v in turn.weight_versions} == {VERSION}
    assert [list(turn.prompt_ids) for turn in episode.turns] == [
        result.request.prompt.tolist() for result in log
    ]


def check_one_row(episode, log):
    """One row holds every sampled token once, with the engine's log-probs."""
    (row,) = make_rows(episode).sequences
    trained = row.mask == 1
    assert row.token_ids[trained].astype(np.int32).tobytes() == tokens(log)
    assert row.behavior_logprobs[trained].astype(np.float32).tobytes() == logprobs(log)
    assert set(row.weight_versions[trained].tolist()) == {VERSION}


def forced(parts, program, submit):
    lines = repair(parts.task(), submit)
    episode, log, score = asyncio.run(parts.play(program, lines))
    assert (episode.status, episode.reason) == (Status.FINISHED, "submit")
    assert (score.value, score.verdict) == (1.0, "resolved")
    assert len(log) == len(lines) == 5
    check_turns(episode, log)
    check_one_row(episode, log)
    values = np.array([x for result in log for x in result.logprobs])
    assert np.isfinite(values).all() and (values < 0).mean() > 0.99  # a policy that was not sure
    assert [m.role for m in episode.messages].count("tool") >= 3


def free(parts, program, calls=2):
    episode, log, _ = asyncio.run(parts.play(program, turns=2, new_tokens=40))
    assert len(log) == calls
    check_turns(episode, log)
    rows = make_rows(episode)
    sampled = sum(len(result.token_ids) for result in log)
    trained = sum(int(row.mask.sum()) for row in rows.sequences)
    assert trained + rows.abandoned_tokens == sampled
    return episode


def test_mini_swe_agent_repairs_a_real_row(parts, mini_layer):
    forced(parts, mini(mini_layer), call("bash", command=DONE))


def test_mini_swe_agent_runs_free(parts, mini_layer):
    episode = free(parts, mini(mini_layer))
    assert (episode.status, episode.reason) == (Status.TRUNCATED, "turns")


def test_a_loop_on_the_openai_client_repairs_a_real_row(parts, mini_layer):
    forced(parts, openai_loop(mini_layer), SUBMIT)


def test_a_loop_on_the_openai_client_runs_free(parts, mini_layer):
    episode = free(parts, openai_loop(mini_layer))
    assert (episode.status, episode.reason) == (Status.TRUNCATED, "turns")


@pytest.fixture(scope="session")
def openhands_program(cache):
    # one line for a system prompt: the SDK's own has 17,000 characters, for which so small an
    # engine compiles programs for minutes
    return openhands(agent("compact"), openhands_layer(cache), cwd="/testbed")


def test_openhands_repairs_a_real_row(parts, openhands_program):
    forced(parts, openhands_program, call("finish", message="Repaired."))


def test_openhands_runs_free(parts, openhands_program):
    episode = free(parts, openhands_program, calls=1)
    assert episode.reason == "agent:stopped"  # an answer without a call ends its conversation
