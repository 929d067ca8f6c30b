"""Episodes on disk: every token once, everything a person needs, whole files, cheap."""

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import (
    Completion,
    Episode,
    Message,
    Score,
    Status,
    ToolCall,
    Trajectory,
    Turn,
)
from skyrl_jax.train.rollouts import (
    episode_record,
    read_rollouts,
    rollout_path,
    token_rows,
    write_rollouts,
)


def _turn(prompt, sampled, version=3):
    completion = Completion(
        token_ids=tuple(sampled),
        logprobs=tuple(-0.25 * (i + 1) for i in range(len(sampled))),
        weight_versions=(version,) * len(sampled),
        finish_reason="stop",
    )
    return Turn(prompt_ids=tuple(prompt), completion=completion, timings={"tool_s": 0.0123456789})


def _episode(turns, content="hi", status=Status.FINISHED):
    call = ToolCall(name="bash", arguments={"command": "ls"})
    return Episode(
        task_id="t",
        sample_index=1,
        messages=(
            Message(role="user", content=content),
            Message(role="assistant", content="x", tool_calls=(call,)),
            Message(role="assistant", content="?", error="no function", reasoning="hm"),
        ),
        turns=tuple(turns),
        status=status,
        reason="submit",
        submission="diff --git a/x b/x\n",
        temperature=0.6,
        timings={"grade_s": 0.5},
    )


def test_turns_of_one_conversation_are_one_row():
    rows = token_rows(_episode([_turn([1, 2], [3, 4]), _turn([1, 2, 3, 4, 9], [5], version=4)]))
    assert rows == [
        {
            "token_ids": [1, 2, 3, 4, 9, 5],
            "mask": [0, 0, 1, 1, 0, 1],
            "logprobs": [0.0, 0.0, -0.25, -0.5, 0.0, -0.25],
            "weight_versions": [-1, -1, 3, 3, -1, 4],
        }
    ]


def test_a_rewritten_prompt_starts_a_row_and_samples_no_token_twice():
    rows = token_rows(_episode([_turn([1, 2], [3]), _turn([1, 7], [5])]))
    assert [row["token_ids"] for row in rows] == [[1, 2, 3], [1, 7, 5]]
    assert [row["mask"] for row in rows] == [[0, 0, 1], [0, 0, 1]]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(1, 5)), max_size=5))
def test_every_sampled_token_has_mask_one_exactly_once(plan):
    turns, held = [], [1]
    for number, (rewritten, given_tokens, sampled) in enumerate(plan):
        fresh = [1, 100 + number]
        held = fresh if rewritten else [*held, *range(20, 20 + given_tokens)]
        turns.append(_turn(held, range(40, 40 + sampled)))
        held = [*held, *range(40, 40 + sampled)]
    rows = token_rows(_episode(turns))
    assert sum(sum(row["mask"]) for row in rows) == sum(sampled for *_, sampled in plan)
    for row in rows:
        assert len({len(column) for column in row.values()}) == 1
        for bit, logprob, version in zip(
            row["mask"], row["logprobs"], row["weight_versions"], strict=True
        ):
            assert (bit == 1) == (logprob < 0) == (version == 3)


def test_what_a_call_was_is_recorded_and_rows_follow_the_run_s_config():
    beside = dataclasses.replace(_turn([9], [9]), kind="aux")
    other = dataclasses.replace(_turn([1, 2], [4]), fork="retry")
    turns = [_turn([1, 2], [3]), beside, other, _turn([1, 2, 4], [5])]
    trajectory = Trajectory(episode=_episode(turns), score=None)
    record = episode_record(trajectory)
    told = [(turn.get("kind"), turn.get("fork")) for turn in record["turns"]]
    assert told == [(None, None), ("aux", None), (None, "retry"), (None, None)]
    assert [row["mask"] for row in record["rows"]] == [[0, 0, 1, 1]]
    kept = episode_record(trajectory, "train")["rows"]
    assert [row["mask"] for row in kept] == [[0, 0, 1], [0, 0, 1, 1]]


def test_an_episode_with_a_broken_engine_answer_is_recorded_with_the_reason(tmp_path):
    completion = Completion(
        token_ids=(2,), logprobs=(float("nan"),), weight_versions=(0,), finish_reason="stop"
    )
    broken = _episode([Turn(prompt_ids=(1,), completion=completion)], status=Status.FAILED)
    path = write_rollouts(tmp_path / "step_000001.jsonl", [Trajectory(episode=broken, score=None)])
    (record,) = read_rollouts(path)
    assert record["rows"] == [] and "nan" in record["rows_error"]


def test_file_holds_everything_and_reads_back(tmp_path):
    score = Score(value=1.0, verdict="resolved", breakdown={"f2p": ["a"], "log": object()})
    path = rollout_path(tmp_path, 12)
    assert path.name == "step_000012.jsonl"
    failed = _episode([], status=Status.FAILED)
    write_rollouts(
        path,
        [
            Trajectory(episode=_episode([_turn([1], [2])]), score=score),
            Trajectory(episode=failed, score=None),
        ],
    )
    first, second = read_rollouts(path)
    assert first["score"]["verdict"] == "resolved" and first["score"]["breakdown"]["f2p"] == ["a"]
    assert first["status"] == "finished" and first["temperature"] == 0.6
    assert first["messages"][1]["tool_calls"] == [{"name": "bash", "arguments": {"command": "ls"}}]
    assert first["messages"][2]["error"] == "no function"
    assert [message.get("reasoning") for message in first["messages"]] == [None, None, "hm"]
    assert first["turns"][0]["timings"] == {"tool_s": 0.012346}
    assert first["timings"] == {"grade_s": 0.5} and first["rows"][0]["mask"] == [0, 1]
    assert second["status"] == "failed" and second["score"] is None


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_an_agent_prints_survives(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("rollouts") / "step_000001.jsonl"
    write_rollouts(path, [Trajectory(episode=_episode([], content=content), score=None)])
    (record,) = read_rollouts(path)
    assert record["messages"][0]["content"] == content
    assert len(path.read_bytes().splitlines()) == 1


def test_a_failing_write_leaves_the_former_file(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    good = Trajectory(episode=_episode([_turn([1], [2])]), score=None)
    write_rollouts(path, [good])
    before = path.read_bytes()

    def breaks():
        yield good
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_rollouts(path, breaks())
    assert path.read_bytes() == before


def test_a_line_that_is_no_episode_is_named(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"task_id": "a"}\n{"task_')
    with pytest.raises(DataError, match="line 2"):
        list(read_rollouts(path))


def test_an_episode_costs_less_than_a_millisecond():
    turns, held = [], list(range(100))
    for _ in range(4):
        turns.append(_turn(held, range(48)))
        held = [*held, *range(48), *range(30)]
    trajectory = Trajectory(episode=_episode(turns, content="x" * 2000), score=None)
    began = time.process_time()
    for _ in range(50):
        episode_record(trajectory)
    assert (time.process_time() - began) / 50 < 1e-3
