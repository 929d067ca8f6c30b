"""Metrics on disk: whole lines, cut on resume, readable by TensorBoard, shown to a person."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from skyrl_jax.train.progress import Progress
from skyrl_jax.train.tracker import Fanout, JsonlTracker, TensorBoardTracker, read_metrics


def _log(path, steps, restored_step=None):
    with JsonlTracker(path, restored_step=restored_step, clock=lambda: 12.0) as tracker:
        for step in steps:
            tracker.log(step, {"loss": step / 4})


def test_one_json_object_a_step_with_plain_numbers(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with JsonlTracker(path, clock=lambda: 12.0) as tracker:
        tracker.log(1, {"loss": np.float32(0.5), "n": np.int64(3), "bad": float("nan")})
        # On disk before the block ends: another process may read it.
        row = json.loads(path.read_text())
    assert row == {"step": 1, "time": 12.0, "loss": 0.5, "n": 3.0, "bad": None}


def test_resume_cuts_rows_after_the_restored_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _log(path, [1, 2, 3, 4])
    _log(path, [3, 4, 5], restored_step=2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    _log(path, [1], restored_step=0)
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_half_written_last_line_is_no_row_and_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _log(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    _log(path, [3])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_rows_survive_a_kill(tmp_path, child_env):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys, time, pathlib\n"
        "from skyrl_jax.train.tracker import JsonlTracker\n"
        "with JsonlTracker(pathlib.Path(sys.argv[1])) as tracker:\n"
        "    tracker.log(1, {'loss': 1.0})\n"
        "    print('logged', flush=True)\n"
        "    time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], env=child_env, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"logged\n"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
    assert [row["loss"] for row in read_metrics(path)] == [1.0]


def test_closed_tracker_says_how_to_use_it(tmp_path):
    for tracker in (JsonlTracker(tmp_path / "m.jsonl"), TensorBoardTracker(tmp_path / "tb")):
        with pytest.raises(ValueError, match="with block"):
            tracker.log(1, {"loss": 1.0})


def _events(folder):
    """Read event files by the record format (length, crc, data, crc), not by the writer's code."""
    events = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return events


def test_tensorboard_files_hold_the_points_and_purge_on_resume(tmp_path):
    with TensorBoardTracker(tmp_path) as board:
        board.log(1, {"loss": 0.5, "bad": float("inf")})
        board.log(2, {"loss": 0.25})
    points = [(e.step, v.tag, v.simple_value) for e in _events(tmp_path) for v in e.summary.value]
    assert points == [(1, "loss", 0.5), (2, "loss", 0.25)]
    time.sleep(1.1)  # event files are named by the second
    with TensorBoardTracker(tmp_path, restored_step=1) as board:
        board.log(2, {"loss": 0.75})
    starts = [e.step for e in _events(tmp_path) if e.session_log.status == 1]
    assert starts == [2]


def test_fanout_hands_each_row_to_all(tmp_path):
    with JsonlTracker(tmp_path / "a.jsonl") as one, JsonlTracker(tmp_path / "b.jsonl") as two:
        Fanout([one, two]).log(7, {"reward_mean": 0.5})
    for name in ("a.jsonl", "b.jsonl"):
        assert read_metrics(tmp_path / name)[0]["reward_mean"] == 0.5


class _Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _run(terminal):
    out, clock = io.StringIO(), _Clock()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False)
    with Progress(10, first_step=2, console=console, clock=clock) as progress:
        progress.phase("warm start")
        progress.sandboxes(8)
        progress.evaluated("sampled", 0.3125)
        progress.evaluated("greedy", 0.9)
        progress.phase("collect")
        for step in (3, 4):
            clock.now += 30.0
            metrics = {"resolved_rate": 0.25, "resolved_rate_fresh": 0.1875, "tokens_per_s": 1234.5}
            progress.step(step, metrics)
        left = progress.seconds_left()
        progress.phase("evaluate")
    return out.getvalue(), left


def test_plain_log_has_one_line_a_step():
    text, left = _run(terminal=False)
    assert left == 6 * 30.0
    lines = text.splitlines()
    assert lines[0] == "[0:00] warm start"
    assert lines[1].startswith(
        "[0:30] step 3/10  resolved 25.0 %  held-out 31.2 %  fresh 18.8 %  failed 0  tokens/s"
    )
    assert "sandboxes" not in lines[2] and lines[2].endswith("left 3:00")
    assert lines[3] == "[1:00] evaluate" and len(lines) == 4


def test_terminal_shows_every_field():
    text, _ = _run(terminal=True)
    for shown in (
        "step 4/10",
        "25.0 %",
        "31.2 %",
        "18.8 %",
        "1,234",
        "3:00",
        "evaluate",
        "sandboxes",
    ):
        assert shown in text
    assert "\x1b[" in text
