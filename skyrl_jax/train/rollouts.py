"""Every episode on disk: WORKDIR/rollouts/step_NNNNNN.jsonl, one JSON object an episode.

Fields of a line: task_id, sample_index, status, reason, score {value, verdict, breakdown} or null,
submission, temperature, timings, messages, turns and rows; of a foreign agent also counts (what
happened at its gateway) and asked (the sampling parameters that it set and did not get).
    messages role, content, and, where there are any, reasoning, tool_calls and error
    turns    one a generation call: finish_reason, num_prompt, num_completion, timings (tool and
             engine seconds), and, where they say something, kind ("aux") and fork (its cause)
    rows     token_ids, mask, logprobs, weight_versions: what batching/sequences.py trains. One row
             unless the prompt was rewritten; mask is 1 on sampled tokens, each in exactly one row;
             logprobs (nats) and versions are 0 and -1 elsewhere. ``rows_error`` says why there are
             none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_jax.batching.sequences import AGENT, make_rows
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import Episode, Message, Score, Trajectory, Turn

_FOREIGN = ("counts", "asked")  # what only episodes with a gateway have


def rollout_path(workdir: Path, step: int) -> Path:
    """Return the file of a step."""
    return workdir / "rollouts" / f"step_{step:06d}.jsonl"


def write_rollouts(
    path: Path, trajectories: Iterable[Trajectory], *, abandoned: str = "drop"
) -> Path:
    """Write the episodes of a step; the file is whole or absent, whenever the process ends.

    ``abandoned``: objective.abandoned of the run, for the rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # ASCII with escapes holds whatever a command printed, lone surrogates too.
    # check_circular costs a fifth of the time and these records are built here: they are trees.
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    with partial.open("w", encoding="ascii") as file:
        records = (episode_record(item, abandoned) for item in trajectories)
        file.writelines(encode(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a rollout file.

    Raises:
        DataError: a line is no JSON object.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path} line {number} is no episode: {error}") from error


def episode_record(trajectory: Trajectory, abandoned: str = "drop") -> dict[str, Any]:
    """Return an episode and its score as plain JSON values."""
    episode = trajectory.episode
    return {
        "task_id": episode.task_id,
        "sample_index": episode.sample_index,
        "status": str(episode.status),
        "reason": episode.reason,
        "score": _score(trajectory.score),
        "submission": episode.submission,
        "temperature": episode.temperature,
        "timings": _numbers(episode.timings),
        "messages": [_message(message) for message in episode.messages],
        "turns": [_turn(turn) for turn in episode.turns],
        **{name: _plain(getattr(episode, name)) for name in _FOREIGN if getattr(episode, name)},
        **_rows(episode, abandoned),
    }


def token_rows(episode: Episode, abandoned: str = "drop") -> list[dict[str, list[Any]]]:
    """Return the training rows of an episode as plain lists, by the same code that trains them.

    Raises:
        DataError: the engine's answer broke the contract (see batching/sequences.py).
    """
    return [
        {
            "token_ids": row.token_ids.tolist(),
            "mask": row.mask.astype(np.int8).tolist(),
            "logprobs": row.behavior_logprobs.tolist(),
            "weight_versions": row.weight_versions.tolist(),
        }
        for row in make_rows(episode, abandoned=abandoned).sequences
    ]


def _rows(episode: Episode, abandoned: str) -> dict[str, Any]:
    """Return the rows, or why there are none: the record of a broken episode is wanted most."""
    try:
        return {"rows": token_rows(episode, abandoned)}
    except DataError as error:
        return {"rows": [], "rows_error": str(error)}


def _score(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    breakdown = _plain(score.breakdown)
    return {"value": score.value, "verdict": score.verdict, "breakdown": breakdown}


def _message(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        record["reasoning"] = message.reasoning
    if message.tool_calls:
        calls = [{"name": c.name, "arguments": dict(c.arguments)} for c in message.tool_calls]
        record["tool_calls"] = calls
    if message.error is not None:
        record["error"] = message.error
    return record


def _turn(turn: Turn) -> dict[str, Any]:
    record: dict[str, Any] = {
        "finish_reason": turn.completion.finish_reason,
        "num_prompt": len(turn.prompt_ids),
        "num_completion": len(turn.completion.token_ids),
        "timings": _numbers(turn.timings),
    }
    if turn.kind != AGENT:
        record["kind"] = turn.kind
    if turn.fork:
        record["fork"] = turn.fork
    return record


def _numbers(timings: Mapping[str, float]) -> dict[str, float]:
    return {name: round(float(seconds), 6) for name, seconds in timings.items()}


def _plain(value: Any) -> Any:
    """Turn a breakdown (any mapping the task suite made) into JSON values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return str(value)
