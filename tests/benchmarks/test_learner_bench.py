"""The learner benchmark: shapes, turns, medians by hand, refusals, and one real run of our side."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def bench(repo_root):
    sys.path.insert(0, str(repo_root / "benchmarks"))
    try:
        yield importlib.import_module("learner")
    finally:
        sys.path.remove(str(repo_root / "benchmarks"))


@pytest.fixture(scope="module")
def rounds(bench):
    return importlib.import_module("rounds")


class Recorder:
    """A side that answers given seconds and writes down when it was asked."""

    def __init__(self, name, calls, seconds):
        self.name, self.calls, self.seconds = name, calls, iter(seconds)

    def ask(self, request):
        self.calls.append((self.name, request["do"], request.get("count")))
        if request["do"] == "roof":
            return {"flops_per_s": 100.0}
        wall = next(self.seconds)
        return {"seconds": wall, "cpu_seconds": [2 * s for s in wall]}


def test_small_is_the_shape_of_the_measured_baselines(bench):
    small = bench.SHAPES["small"]
    assert (small.layers, small.dim, small.ffn, small.vocab) == (4, 256, 768, 4096)
    assert (small.heads, small.kv_heads, small.head_dim) == (4, 2, 64)
    assert small.tokens == small.rows * (small.prompt + small.completion) == 2048
    for shape in bench.SHAPES.values():
        assert shape.rows % shape.micro_rows == 0
        assert shape.heads % shape.kv_heads == 0


def test_sides_take_turns_and_each_goes_first_as_often(rounds):
    calls = []
    sides = {
        "ours": Recorder("ours", calls, [[1.0, 9.0, 2.0]] * 4),
        "peer": Recorder("peer", calls, [[4.0, 3.0, 30.0]] * 4),
    }
    played = rounds.play(sides, rounds=4, steps=3, pause_s=0.0)
    ours, peer = [("ours", "steps", 3), ("ours", "roof", None)], [("peer", "steps", 3)]
    assert calls == (ours + peer + peer + ours) * 2
    assert [next(iter(figures)) for figures in played] == ["ours", "peer", "ours", "peer"]
    # The median of a turn's steps: one slow step does not count.
    assert played[1]["ours"] == {"step_s": 2.0, "cpu_s": 4.0, "roof": 100.0}
    assert played[1]["peer"] == {"step_s": 4.0, "cpu_s": 8.0}


def test_ratio_of_medians_by_hand(bench):
    """120 tokens; ours 12, 10, 60 tokens/s, the peer 6, 5, 8: medians 12 and 6, ratio 2."""

    def figures(first, ours_s, peer_s, roof):
        both = {
            "ours": {"step_s": ours_s, "cpu_s": 2 * ours_s, "roof": roof},
            "peer": {"step_s": peer_s, "cpu_s": 4 * peer_s},
        }
        return {first: both[first]} | both

    played = [
        figures("ours", 10.0, 20.0, 50.0),
        figures("peer", 12.0, 24.0, 50.0),
        figures("ours", 2.0, 15.0, 100.0),
    ]
    about = {
        "ours": {"step_flops": 100.0, "peak_bytes": 7, "peak_of": "x"},
        "peer": {"peak_bytes": 9},
    }
    got = bench.summary(120, played, about)
    assert got["tokens_per_s"] == 12.0 and got["peer_tokens_per_s"] == 6.0
    # The mean of the rounds' own ratios would be (2 + 2 + 7.5) / 3.
    assert got["ratio"] == 2.0
    assert got["tokens_per_cpu_s"] == 6.0 and got["peer_tokens_per_cpu_s"] == 1.5
    assert got["cpu_ratio"] == 4.0
    # 100 / (10 x 50), 100 / (12 x 50), 100 / (2 x 100) of the roof measured in the same round.
    assert [row["mfu"] for row in got["rounds"]] == [0.2, 0.1667, 0.5]
    assert got["mfu"] == 0.2
    assert (got["peak_bytes"], got["peer_peak_bytes"], got["peer"]) == (7, 9, "peer")
    assert [row["first"] for row in got["rounds"]] == ["ours", "peer", "ours"]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--shape=large"], "medium"),
        (["--dtype=float16"], "bfloat16"),
        (["--peer=trl"], "torch"),
        (["--peer=torch", "--rounds=4"], "at least 5"),
        (["--rounds=0"], "at least 1"),
        (["--at_least=1.0"], "--peer"),
        (["--micro_rows=3"], "must divide the 8 rows"),
        (["--remat=some"], "attn_out"),
    ],
)
def test_refusals_say_what_would_be_right(bench, capsys, argv, reason):
    with pytest.raises(SystemExit) as ended:
        bench.parse(argv)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_both_sides_get_the_defaults(bench):
    tuned = {
        "PATH": "/bin",
        "GLIBC_TUNABLES": "x",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "y",
        "PYTHONPATH": "z",
    }
    peer = bench.worker_env(tuned, "torch", alone=False)
    assert not set(tuned) - {"PATH"} & set(peer)
    assert peer["PATH"] == "/bin" and peer["JAX_PLATFORMS"] == "cpu"
    ours = bench.worker_env(tuned, "ours", alone=True)
    assert ours["PYTHONPATH"] == str(bench.ROOT) and "JAX_PLATFORMS" not in ours


def test_too_low_a_ratio_fails_the_call(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run", lambda options: {"ratio": 0.99})
    argv = ["--peer=torch", "--at_least=1.0"]
    assert bench.main(argv) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ratio": 0.99} and "0.99 x torch" in err
    monkeypatch.setattr(bench, "run", lambda options: {"ratio": 1.0})
    assert bench.main(argv) == 0


def test_an_environment_that_is_current_is_kept(bench, tmp_path):
    (tmp_path / "pins").write_text("a==1\n")
    folder = tmp_path / "bench-x"
    folder.mkdir()
    (folder / "pins.txt").write_text("a==1\n")
    python = bench.peer_python("x", pins=tmp_path / "pins", lanes=tmp_path)
    assert python == folder / "bin" / "python"
    assert [p.name for p in folder.iterdir()] == ["pins.txt"]  # nothing was made


WORKER = """
import sys, time
sys.path.insert(0, {peers!r})
from turns import Prepared, serve

def prepare(job):
    print("a library prints")
    losses = iter(job["losses"])
    return Prepared(step=lambda: next(losses), about={{"seen": job["x"]}})

serve(prepare)
"""


@pytest.fixture
def worker(rounds, repo_root, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(peers=str(repo_root / "benchmarks" / "peers")))

    def make(losses):
        job = {"x": 5, "losses": losses}
        return rounds.Worker("it", sys.executable, script, job, os.environ)

    return make


def test_a_worker_answers_and_its_prints_do_not_mix_in(worker):
    with worker([1.0] * 5) as side:
        assert side.about["seen"] == 5 and side.about["first_step_s"] >= 0
        answer = side.ask({"do": "steps", "count": 2})
        assert len(answer["seconds"]) == len(answer["cpu_seconds"]) == 2
        assert side.ask({"do": "peak"})["peak_bytes"] > 2**20


def test_a_worker_that_fails_is_told_with_its_log(rounds, worker):
    with (
        worker([1.0] * 3 + [float("nan")]) as side,
        pytest.raises(rounds.WorkerFailed, match="the loss of a benchmark step is nan"),
    ):
        side.ask({"do": "steps", "count": 1})
    with pytest.raises(rounds.WorkerFailed, match="loss"), worker([float("inf")]):
        pass


def test_a_worker_that_hangs_is_ended(rounds, worker, monkeypatch):
    monkeypatch.setattr(rounds, "TURN_TIMEOUT_S", 0.5)
    with worker([1.0] * 3) as side:
        os.kill(side._process.pid, 19)  # SIGSTOP
        with pytest.raises(rounds.WorkerFailed, match="-9"):
            side.ask({"do": "peak"})


def test_our_side_runs(repo_root):
    """The whole command on the tiny shape: one JSON line with the promised figures."""
    command = [
        sys.executable,
        "benchmarks/learner.py",
        "--shape=tiny",
        "--rounds=1",
        "--remat=full",
    ]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    got = json.loads(line)
    assert (got["shape"], got["dtype"], got["malloc"]) == ("tiny", "float32", "default")
    assert (got["remat"], got["micro_rows"]) == ("full", 2)
    assert got["tokens_per_s"] > 0 and 0 < got["mfu"] < 1 and got["peak_bytes"] > 10 * 2**20
    assert len(got["rounds"]) == 1 and "ratio" not in got and got["load"] >= 0
    # embedding 64 x 32, final norm 32; a layer: q 32 x 32, k and v 32 x 16, o 32 x 32,
    # three of 32 x 64, norms 32 + 32 + 16 + 16.
    assert got["params"] == 2048 + 32 + 2 * (1024 + 512 + 512 + 1024 + 3 * 2048 + 96)
