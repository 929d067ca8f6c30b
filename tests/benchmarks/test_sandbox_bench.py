"""The sandbox benchmark: turns, figures by hand, bars, refusals, and one real run of our side."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def bench(modules):
    return modules("sandbox")


class Told:
    """A side that answers from a table and writes down what it was asked."""

    def __init__(self, name, calls, rate, pooled=None):
        self.name, self.calls, self.rate, self.pooled = name, calls, rate, pooled

    def ask(self, request):
        self.calls.append((self.name, request["do"], request.get("concurrency")))
        if request["do"] == "latency":
            some = [1.0, 2.0, 30.0]
            return {"create": some, "exec": some, "destroy": some, "roundtrip": [0.5]}
        if request["do"] == "paced":
            self.pace = request["rate"]
            return {"first": [7.0, 9.0, 8.0, 100.0]}
        rate = self.pooled if request["do"] == "pooled" else self.rate
        return {"cycles": rate * request["concurrency"] * 2, "seconds": 2.0}


def options(bench, *more):
    return bench.parse(["--backend=docker", "--rounds=2", *more])


def test_percentiles_are_values_that_occurred(bench):
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [bench.percentile(values, p) for p in (50, 95, 20, 1)] == [3.0, 5.0, 1.0, 1.0]
    assert bench.percentile([7.0], 50) == 7.0


def test_sides_take_turns_and_a_slow_peer_is_not_asked_for_more_than_it_can(bench):
    calls = []
    sides = {"ours": Told("ours", calls, 3), "swerex": Told("swerex", calls, 1)}
    found = bench.play(sides, options(bench))
    first = [name for name, do, _ in calls if do == "latency"]
    assert first == ["ours", "swerex", "swerex", "ours"]
    assert [c for n, do, c in calls if do == "cycles" and n == "swerex"] == [1, 4, 1, 4]
    assert found["ours"]["16"] == [48.0, 48.0] and "16" not in found["swerex"]
    assert len(found["ours"]["create"]) == 6


def test_the_result_is_medians_and_the_ratio_counts_the_refill(bench):
    calls = []
    ours = Told("ours", calls, 3, pooled=2)
    sides = {"ours": ours, "docker_sdk": Told("docker_sdk", calls, 1)}
    given = options(bench, "--peers=docker_sdk")
    played, pooled = bench.play(sides, given), bench.pool_figures(ours, given)
    assert ours.pace == pytest.approx(0.9 * 32)  # 16 at a time, 2 each
    about = {"ours": "we", "docker_sdk": "they"}
    result = bench.summary("docker", played, pooled, about)
    assert result["ratio"] == 32 / 16  # pooled against the SDK's best, not 48 / 16
    assert result["cycles_per_s"] == {"1": 3.0, "4": 12.0, "16": 48.0}
    assert result["acquire_to_first_result_p50_ms"] == 8.0
    assert (result["exec_p50_ms"], result["exec_p95_ms"]) == (2.0, 30.0)
    assert result["peers"]["docker_sdk"]["cycles_per_s"]["16"] == 16.0
    assert bench.summary("bwrap", played, {}, about)["ratio"] == 3.0
    assert bench.misses(given, result) == []
    bars = ["--exec_below=2", "--roundtrip_below=0.6", "--first_below=8", "--at_least=2.1"]
    missed = bench.misses(options(bench, "--peers=docker_sdk", *bars), result)
    assert len(missed) == 3 and "exec_p50_ms is 2, not below 2" in missed[0]
    assert "under 2.1" in missed[-1]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--backend=podman"], "invalid choice"),
        (["--backend=bwrap", "--peers=e2b"], "no peer 'e2b'; known: docker_sdk, swerex, mini"),
        (["--backend=docker", "--at_least=1.3"], "add it to --peers"),
        (["--backend=bwrap", "--rounds=0"], "must be above 0"),
        ([], "required: --backend"),
    ],
)
def test_what_makes_no_sense_is_refused(bench, capsys, argv, text):
    with pytest.raises(SystemExit) as caught:
        bench.parse(argv)
    assert caught.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.xdist_group("sandbox")
def test_our_side_runs(repo_root):
    command = [sys.executable, "benchmarks/sandbox.py", "--backend=bwrap", "--rounds=1"]
    command += ["--cycles=2", "--seconds=0.3", "--exec_below=0.000001"]
    done = subprocess.run(
        command, cwd=repo_root, capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 1 and "exec_p50_ms is" in done.stderr, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["backend"] == "bwrap" and result["peers"] == {}
    assert 0 < result["roundtrip_p50_ms"] <= result["exec_p50_ms"] < 1000
    assert set(result["cycles_per_s"]) == {"1", "4", "16"} and result["create_p50_ms"] > 0
