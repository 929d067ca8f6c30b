"""The scripted repair agent: demonstrations are ordinary episodes with exact ids."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.agents.parsing import parse_assistant
from skyrl_jax.agents.scripted import SUBMIT, ScriptedAgent, script, wrong_edits
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import Status, Task
from tests.actor.fakes import (
    BUGGY,
    FIXED,
    RIGHT,
    FakeSuite,
    make_agent,
    make_renderer,
    make_task,
)

RENDERER = make_renderer()


def demo(wrong_first: float, sample_index: int = 0, **limits):
    agent = ScriptedAgent(
        loop=make_agent(RENDERER, **limits), renderer=RENDERER, wrong_first=wrong_first
    )
    world = FakeSuite().environment(make_task(), None)
    return asyncio.run(agent.run(make_task(), world, None, sample_index=sample_index))


@pytest.mark.parametrize(("wrong_first", "turns"), [(0.0, 2), (1.0, 3)])
def test_a_demonstration_repairs_the_task(wrong_first: float, turns: int) -> None:
    episode = demo(wrong_first)
    assert (episode.status, episode.submission) == (Status.FINISHED, FIXED)
    assert len(episode.turns) == turns
    for turn in episode.turns:
        assert turn.completion.token_ids[-1] == RENDERER.stop_id
        assert set(turn.completion.logprobs) == {0.0}
        assert set(turn.completion.weight_versions) == {-1}


def test_the_demonstration_uses_the_markup_tokens() -> None:
    first = demo(0.0).turns[0].completion.token_ids
    assert first == RENDERER.assistant_ids(RIGHT)
    assert (
        RENDERER.tokenizer.token_id("<function=str_replace_editor>\n<parameter=path>") == first[0]
    )


def test_scripts_are_deterministic_per_task_and_sample() -> None:
    scripts = [script(make_task(), i, wrong_first=0.5, seed=0) for i in range(40)]
    assert scripts == [script(make_task(), i, wrong_first=0.5, seed=0) for i in range(40)]
    assert {len(texts) for texts in scripts} == {2, 3}
    assert scripts != [script(make_task(), i, wrong_first=0.5, seed=1) for i in range(40)]


def test_after_a_wrong_edit_the_next_one_starts_from_it() -> None:
    texts = script(make_task(), 0, wrong_first=1.0, seed=0)
    wrong = parse_assistant(texts[0], False).tool_calls[0].arguments
    right = parse_assistant(texts[1], False).tool_calls[0].arguments
    assert wrong["old_str"] == BUGGY and wrong["new_str"] not in (BUGGY, FIXED)
    assert right["old_str"] == wrong["new_str"] and right["new_str"] == FIXED
    assert texts[2] == SUBMIT


@given(st.text("ab <>=!+-*/012\n", max_size=30), st.text("ab <=", max_size=8))
def test_wrong_edits_are_wrong(line: str, fixed: str) -> None:
    edits = wrong_edits(line, fixed)
    assert len(set(edits)) == len(edits) and not {line, fixed} & set(edits)


def test_missing_payload_is_named() -> None:
    with pytest.raises(DataError, match=r"task 't': payload\['old_str'\]"):
        script(Task(task_id="t", prompt="", payload={"path": "x"}), 0, wrong_first=0, seed=0)


def test_a_script_that_is_over_while_the_episode_is_not_is_an_error() -> None:
    with pytest.raises(DataError, match="the script of task-0/0 is over"):
        demo(0.0, max_new_tokens=1)
