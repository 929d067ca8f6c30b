"""The CodeAct loop: exact ids, budgets, endings, seeds."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from skyrl_jax.agents.loop import make_codeact
from skyrl_jax.agents.parsing import LENGTH_CUT, NO_CALL
from skyrl_jax.agents.scripted import SUBMIT
from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.agents.tools import format_call
from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.config import AgentConfig
from skyrl_jax.core.errors import GenerationError, InfraError, SandboxGone
from skyrl_jax.core.types import Status
from tests.actor.fakes import (
    BUGGY,
    FIXED,
    RIGHT,
    WRONG,
    FakeSuite,
    TextGenerator,
    make_agent,
    make_renderer,
    make_rollout,
    make_task,
    repairs,
)

RENDERER = make_renderer()


def play(answer, *, suite=None, agent=None, sample_index=0, generator=None, **limits):
    suite = suite or FakeSuite()
    generator = generator or TextGenerator(RENDERER, answer)
    agent = agent or make_agent(RENDERER, **limits)
    world = suite.environment(make_task(), None)
    episode = asyncio.run(agent.run(make_task(), world, generator, sample_index=sample_index))
    return episode, generator


def test_an_episode_repairs_and_submits() -> None:
    episode, generator = play(repairs)
    assert (episode.status, episode.reason) == (Status.FINISHED, "submit")
    assert episode.submission == FIXED and len(episode.turns) == 3
    assert [
        m.role for m in episode.messages
    ] == "user assistant tool assistant tool assistant".split()
    assert set(episode.turns[0].timings) == {"generate_s", "tool_s"}
    assert generator.seen[0][2] == "task-0/0"


def test_every_prompt_is_the_stored_ids_plus_a_delta() -> None:
    episode, _ = play(repairs)
    before = RENDERER.initial(episode.messages[:1])
    for turn, results in zip(
        episode.turns, [episode.messages[2:3], episode.messages[4:5], None], strict=True
    ):
        assert turn.prompt_ids == before
        if results is not None:
            delta = RENDERER.delta(results, stopped=True)
            before = (*before, *turn.completion.token_ids, *delta)
    assert before == RENDERER.render(episode.messages[:-1])


def test_sampled_ids_are_kept_even_when_text_would_encode_otherwise() -> None:
    """Faults C2, C3, C40: the next prompt holds what was sampled, not a re-tokenization."""

    class Spelled(TextGenerator):
        async def generate(self, prompt_ids, sampling, session):
            done = await super().generate(prompt_ids, sampling, session)
            if self.calls[session] > 1:
                return done
            ids = (*RENDERER.tokenizer.encode(WRONG), RENDERER.stop_id)  # no markup tokens
            return dataclasses.replace(
                done, token_ids=ids, logprobs=(-1.0,) * len(ids), weight_versions=(1,) * len(ids)
            )

    episode, _ = play(None, generator=Spelled(RENDERER, repairs))
    first = episode.turns[0]
    assert len(first.completion.token_ids) > len(RENDERER.assistant_ids(WRONG))
    kept = (*first.prompt_ids, *first.completion.token_ids)
    assert episode.turns[1].prompt_ids[: len(kept)] == kept


def test_the_training_row_masks_exactly_what_was_sampled() -> None:
    """From the loop to the row: boundary newlines, roles and observations have mask 0."""
    answers = [WRONG, RIGHT, SUBMIT]
    episode, _ = play(lambda _, turn: answers[turn], max_new_tokens=19)
    assert [t.completion.finish_reason for t in episode.turns] == ["length", "length", "stop"]
    (row,) = make_rows(episode).sequences
    last = episode.turns[-1]
    assert tuple(row.token_ids) == (*last.prompt_ids, *last.completion.token_ids)
    expected = [0.0] * len(row.token_ids)
    for turn in episode.turns:
        start = len(turn.prompt_ids)
        stop = start + len(turn.completion.token_ids)
        expected[start:stop] = [1.0] * (stop - start)
    assert row.mask.tolist() == expected
    ends = [i for i, token in enumerate(row.token_ids) if token == RENDERER.stop_id]
    # only the last end-of-turn was sampled: the cut turns got theirs from the renderer
    assert [int(row.mask[i]) for i in ends] == [0, 0, 0, 0, 0, 1]


def test_seeds_come_from_run_task_sample_turn_and_phase() -> None:
    _, generator = play(repairs, sample_index=5)
    seeds = [sampling.seed for _, sampling, _ in generator.seen]
    assert seeds == [derive_seed(0, "task-0", 5, turn, "test") for turn in range(3)]
    _, again = play(repairs, sample_index=5)
    assert [s.seed for _, s, _ in again.seen] == seeds
    other = dataclasses.replace(make_agent(RENDERER), phase="train/2")
    _, changed = play(repairs, sample_index=5, agent=other)
    assert not set(seeds) & {s.seed for _, s, _ in changed.seen}


def test_malformed_calls_go_back_to_the_model_and_are_not_run() -> None:
    answers = ["I think it is fine.", "<function=bash>\n<parameter=command>ls", SUBMIT]
    episode, _ = play(lambda _, turn: answers[turn])
    assert episode.reason == "submit" and episode.submission == ""
    told = [m.content for m in episode.messages if m.role == "tool"]
    assert told[0] == NO_CALL and "not closed" in told[1]


def test_an_answer_cut_by_length_is_not_run_and_its_end_is_not_sampled() -> None:
    """Faults C34."""
    answers = [RIGHT, SUBMIT]
    episode, _ = play(lambda _, turn: answers[turn], max_new_tokens=5)
    assert episode.turns[0].completion.finish_reason == "length"
    assert episode.messages[2].content == LENGTH_CUT and episode.submission == ""
    kept = (*episode.turns[0].prompt_ids, *episode.turns[0].completion.token_ids)
    assert episode.turns[1].prompt_ids[len(kept)] == RENDERER.stop_id  # in the delta


def test_turns_run_out_and_the_tree_is_still_submitted() -> None:
    def answer(_, turn):
        return RIGHT if turn == 0 else format_call("bash", {"command": f"echo {turn}"})

    episode, generator = play(answer, max_turns=3)
    assert (episode.status, episode.reason) == (Status.TRUNCATED, "turns")
    assert episode.submission == FIXED and len(generator.seen) == 3


def test_the_same_answer_with_the_same_result_is_a_loop() -> None:
    episode, _ = play(
        lambda *_: format_call("bash", {"command": "ls"}), max_turns=9, repeat_limit=3
    )
    assert (episode.status, episode.reason) == (Status.TRUNCATED, "loop")
    assert len(episode.turns) == 3


def test_an_opening_beyond_its_limit_is_not_cut_but_ends_the_episode() -> None:
    """Faults C16."""
    episode, generator = play(repairs, max_prompt_tokens=10)
    assert (episode.status, episode.reason) == (Status.TRUNCATED, "context")
    assert episode.turns == () and generator.seen == []


def test_the_episode_budget_caps_each_turn_and_then_ends_it() -> None:
    opening = len(play(repairs)[0].turns[0].prompt_ids)
    bash = format_call("bash", {"command": "ls"})
    episode, generator = play(lambda *_: bash, max_episode_tokens=opening + 30, max_turns=9)
    assert (episode.status, episode.reason) == (Status.TRUNCATED, "context")
    for prompt, sampling, _ in generator.seen:
        assert sampling.max_new_tokens == min(64, opening + 30 - len(prompt)) > 0
    last = episode.turns[-1]
    assert len(last.prompt_ids) + len(last.completion.token_ids) <= opening + 30


def test_long_observations_are_cut_by_tokens_and_say_so() -> None:
    answers = [format_call("bash", {"command": "xyz!" * 200}), SUBMIT]
    episode, _ = play(lambda _, turn: answers[turn], max_new_tokens=2000, max_episode_tokens=9000)
    shown = episode.messages[2].content
    assert "tokens cut]" in shown and len(RENDERER.tokenizer.encode(shown)) <= 40 + 20
    assert shown in RENDERER.tokenizer.decode(episode.turns[1].prompt_ids)


def test_time_runs_out_and_the_turn_so_far_is_kept() -> None:
    suite = FakeSuite(hooks={"run": lambda _: asyncio.sleep(5)})
    episode, _ = play(repairs, suite=suite, time_limit_s=0.05)
    assert (episode.status, episode.reason) == (Status.TRUNCATED, "time")
    assert len(episode.turns) == 1 and episode.submission == ""


def test_a_timeout_error_of_someone_else_is_not_our_deadline() -> None:
    def broken(_):
        raise TimeoutError("socket")

    with pytest.raises(TimeoutError, match="socket"):
        play(repairs, suite=FakeSuite(hooks={"run": broken}))


@pytest.mark.parametrize("error", [InfraError("disk"), SandboxGone("pid 1 killed")])
def test_errors_of_host_and_sandbox_propagate(error) -> None:
    def broken(_):
        raise error

    with pytest.raises(type(error)):
        play(repairs, suite=FakeSuite(hooks={"run": broken}))


def test_an_aborted_completion_is_the_clients_fault() -> None:
    class Aborts(TextGenerator):
        async def generate(self, prompt_ids, sampling, session):
            done = await super().generate(prompt_ids, sampling, session)
            return dataclasses.replace(done, finish_reason="abort")

    with pytest.raises(GenerationError, match="'abort'"):
        play(None, generator=Aborts(RENDERER, repairs))


def test_make_codeact_reads_the_config() -> None:
    config = AgentConfig(kind="codeact", prompt_style="full", observation_tokens=33)
    agent = make_codeact(
        make_rollout(max_turns=7, run_timeout_s=12.0), config, RENDERER, RENDERER.tokenizer,
        stop_token_ids=[2], seed=9, phase="eval", temperature=0.0,
    )  # fmt: skip
    assert agent.limits.max_turns == 7 and agent.limits.time_limit_s == 12.0
    assert agent.limits.observation_tokens == 33 and agent.sampling.temperature == 0.0
    assert agent.sampling.stop_token_ids == (2,) and agent.full_prompt
    roomy = dataclasses.replace(agent.limits, max_prompt_tokens=9000, max_episode_tokens=9999)
    episode, _ = play(lambda *_: SUBMIT, agent=dataclasses.replace(agent, limits=roomy))
    assert [m.role for m in episode.messages][:2] == ["system", "user"]
    assert BUGGY in episode.messages[1].content


def test_the_last_of_128_turns_costs_no_more_than_the_first() -> None:
    """Faults C36: rendering is incremental, so a turn costs what it adds."""
    calls = []
    renderer = make_renderer()
    encode = renderer.tokenizer.encode
    renderer.tokenizer.encode = lambda text: calls.append(len(text)) or encode(text)

    def answer(_, turn):
        return format_call("bash", {"command": f"echo {turn:03d}"})

    agent = make_agent(renderer, max_turns=128, max_episode_tokens=99999)
    generator = TextGenerator(renderer, answer)
    world = FakeSuite().environment(make_task(), None)
    asyncio.run(agent.run(make_task(), world, generator, sample_index=0))
    assert max(calls[-8:]) <= len("echo 000") and len(calls) <= 128 * 2
