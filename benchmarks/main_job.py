"""The main job's promises: it learns, it is exact, it survives, it grades real rows."""

from __future__ import annotations

import json
import random
import re
import shutil
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from checks import Clone, Outcome, Part

SEEDS = (0, 1, 2)
CONTROL_SEEDS = (0, 1)
TRAIN_LIMIT_S = 20 * 60
TEST_LIMIT_S = 15 * 60
STEP_PARTS = ("wait_s", "pack_s", "step_s", "publish_s", "checkpoint_s")
DEV_ROWS = (
    "pydicom__pydicom-1694",
    "pydicom__pydicom-1256",
    "marshmallow-code__marshmallow-1359",
)
SYMPY_ROW = "sympy__sympy-20916"
NEMO_ROWS = "responses_api_agents/mini_swe_agent_2/data/example.jsonl"


def setup(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Set the clone up with no venv, downloads of the tests included."""
    ran = clone.run(["make", "setup-test"], log="setup.log", timeout_s=1800)
    setup_s = float((clone.root / ".venv" / "setup_s").read_text())
    return Outcome(held=True, figures={"setup_s": setup_s, "wall_s": round(ran.seconds, 1)})


def train(seed: int, *extra: str, folder: str) -> Callable[[Clone], dict[str, Any]]:
    """Return a function that trains from nothing and reads the run's summary."""

    def run(clone: Clone) -> dict[str, Any]:
        shutil.rmtree(clone.root / folder, ignore_errors=True)
        flags = " ".join([f"--config.seed={seed}", f"--workdir={folder}", *extra])
        ran = clone.run(
            ["make", "train", f"ARGS={flags}"],
            log=folder.replace("/", "-") + ".log",
            timeout_s=TRAIN_LIMIT_S + 900,
        )
        summary = clone.json(f"{folder}/summary.json")
        summary["command_s"] = round(ran.seconds, 1)
        last = ran.output.strip().splitlines()[-1]
        summary["report_is_last_line"] = last.endswith("report.html")
        return summary

    return run


def train_seed(seed: int) -> Callable[[Clone, Mapping[str, Any]], Outcome]:
    """Check one seed: in time, measured widely enough, lower bound above 0, on-policy."""

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        summary = train(seed, folder=f"runs/verify/seed-{seed}")(clone)
        held = (
            summary["command_s"] <= TRAIN_LIMIT_S
            and summary["gain_low"] > 0
            and summary["episodes"] >= 512
            and summary["tasks"] >= 128
            and summary["report_is_last_line"]
        )
        return Outcome(held=held, figures=summary)

    return run


def control_seed(seed: int) -> Callable[[Clone, Mapping[str, Any]], Outcome]:
    """Train half as long on rewards permuted over the batch; ``gain`` judges the runs together.

    The gain of each task goes into the figures, so that the interval of the mean over the seeds can
    be made of them.
    """

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        steps = max(1, int(figures[f"train-seed-{seed}"]["steps"]) // 2)
        summary = train(
            seed,
            "--config.objective.permute_rewards=True",
            f"--config.train.steps={steps}",
            folder=f"runs/verify/control-{seed}",
        )(clone)
        summary["task_gains"] = _task_gains(clone, f"runs/verify/control-{seed}/eval")
        held = summary["permuted_rewards"] and summary["episodes"] >= 512
        return Outcome(held=held, figures=summary)

    return run


def gain(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Average the gain over the seeds, and the control's over its own, with its interval."""
    gains = [figures[f"train-seed-{seed}"]["gain"] for seed in SEEDS]
    controls = [figures[f"control-seed-{seed}"] for seed in CONTROL_SEEDS]
    low, high = mean_interval([control["task_gains"] for control in controls])
    mean = sum(gains) / len(gains)
    mean_control = sum(control["gain"] for control in controls) / len(controls)
    return Outcome(
        held=mean >= 0.10 and mean_control < 0.04 and low <= 0 <= high,
        figures={
            "gain": mean,
            "gains": gains,
            "control_gain": mean_control,
            "control_low": low,
            "control_high": high,
            "controls": [[c["gain"], c["gain_low"], c["gain_high"]] for c in controls],
        },
    )


def mean_interval(
    runs: Sequence[Mapping[str, float]], *, resamples: int = 10_000
) -> tuple[float, float]:
    """Return the 95 % interval of the mean gain of runs over the same tasks, by bootstrap.

    Args:
        runs: for each run {task: its mean score after less that before}.
        resamples: draws of the tasks with replacement; one draw serves all runs.
    """
    names = sorted(runs[0])
    gains = [fmean(run[name] for run in runs) for name in names]
    rng = random.Random(0)
    means = sorted(fmean(rng.choices(gains, k=len(gains))) for _ in range(resamples))
    return means[int(0.025 * resamples)], means[int(0.975 * resamples)]


def _task_gains(clone: Clone, folder: str) -> dict[str, float]:
    files = sorted((clone.root / folder).glob("step_*-sampled.json"))
    before, after = (json.loads(path.read_text())["scores"] for path in (files[0], files[-1]))
    return {name: fmean(after[name]) - fmean(before[name]) for name in before}


def mismatch(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Read the largest mean |engine - learner| log-prob difference of any step, in nats."""
    largest = {
        f"seed_{seed}": figures[f"train-seed-{seed}"]["mismatch_abs_mean_max"] for seed in SEEDS
    }
    return Outcome(held=all(0 <= value < 1e-4 for value in largest.values()), figures=largest)


def wall_time(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Check that the stages of a step add up to the step's wall time within 5 %."""
    shares = []
    for seed in SEEDS:
        rows = _jsonl(clone, f"runs/verify/seed-{seed}/metrics.jsonl")
        split = sum(row[part] for row in rows for part in STEP_PARTS)
        shares.append(split / sum(row["wall_s"] for row in rows))
    held = all(abs(share - 1) <= 0.05 for share in shares)
    return Outcome(held=held, figures={"share_of_wall": shares})


def tests(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Run every test, downloads done: in time, all passed, none skipped."""
    clone.run(["make", "setup-test"], log="tests-setup.log", timeout_s=1800)
    # an earlier report must not speak for this run
    (clone.root / ".cache" / "junit.xml").unlink(missing_ok=True)
    ran = clone.run(
        ["make", "test", "TESTS=--junitxml=.cache/junit.xml"],
        log="tests.log",
        timeout_s=TEST_LIMIT_S + 600,
        check=False,
    )
    counts = junit(clone)[0]
    held = (
        ran.status == 0
        and ran.seconds <= TEST_LIMIT_S
        and counts["skipped"] == 0
        and counts["tests"] > 0
    )
    return Outcome(held=held, figures={**counts, "seconds": round(ran.seconds, 1)})


def named_tests(*patterns: str) -> Callable[[Clone, Mapping[str, Any]], Outcome]:
    """Return a check that tests of these names ran and passed in the part ``tests``."""

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        cases = junit(clone)[1]
        found: dict[str, str] = {}
        for pattern in patterns:
            hits = {name: state for name, state in cases.items() if re.search(pattern, name)}
            found |= hits or {pattern: "no such test"}
        return Outcome(held=all(v == "passed" for v in found.values()), figures=found)

    return run


def real_rows(
    ids: tuple[str, ...], source: Callable[[Clone], list[dict[str, Any]]], agent: str, want: int
) -> Callable[[Clone, Mapping[str, Any]], Outcome]:
    """Return a check that grades real rows with the gold patch or with none."""

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        rows = [row for row in source(clone) if row["instance_id"] in ids]
        path = clone.root / ".cache" / f"rows-{ids[0]}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(rows))
        ran = clone.run(
            [
                ".venv/bin/python",
                "launchers/evaluate.py",
                "--config=configs/swe.py",
                f"--tasks={path}",
                f"--agent={agent}",
            ],
            log=f"rows-{ids[0]}-{agent}.log",
            timeout_s=900,
        )
        result = json.loads(ran.output.strip().splitlines()[-1])
        held = (
            result["resolved"] == want
            and result["total"] == len(ids)
            and result["infra_failures"] == 0
        )
        return Outcome(held=held, figures=result)

    return run


def _dev_rows(clone: Clone) -> list[dict[str, Any]]:
    return json.loads((clone.root.parent / "shared/data/swebench_lite_dev.json").read_text())


def _nemo_rows(clone: Clone) -> list[dict[str, Any]]:
    wheel = next((clone.root / ".cache" / "test-downloads").glob("nemo_gym-*.whl"))
    text = zipfile.ZipFile(wheel).read(NEMO_ROWS).decode()
    return [json.loads(line) for line in text.splitlines()]


def _jsonl(clone: Clone, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (clone.root / path).read_text().splitlines()]


def junit(clone: Clone, report: str = "junit.xml") -> tuple[dict[str, int], dict[str, str]]:
    """Return the counts and {test id: passed | failed | skipped} of a test run.

    Args:
        clone: where it ran.
        report: its file under .cache; by default that of the part ``tests``.
    """
    root = ElementTree.parse(clone.root / ".cache" / report).getroot()
    cases: dict[str, str] = {}
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        bad = "failed" if kinds & {"failure", "error"} else "passed"
        state = "skipped" if "skipped" in kinds else bad
        cases[f"{case.get('classname')}::{case.get('name')}"] = state
    counts = {
        "tests": len(cases),
        "failed": sum(state == "failed" for state in cases.values()),
        "skipped": sum(state == "skipped" for state in cases.values()),
    }
    return counts, cases


PARTS: tuple[Part, ...] = (
    Part(name="setup", promise="a fresh clone sets itself up", run=setup),
    *(
        Part(
            name=f"train-seed-{seed}",
            promise="make train in 20 min, 512 episodes over 128 tasks, lower bound above 0",
            run=train_seed(seed),
        )
        for seed in SEEDS
    ),
    *(
        Part(
            name=f"control-seed-{seed}",
            promise="permuted rewards, half the steps",
            run=control_seed(seed),
        )
        for seed in CONTROL_SEEDS
    ),
    Part(
        name="gain",
        promise="mean gain >= 10 points, control < 4 and its interval holds 0",
        run=gain,
    ),
    Part(name="mismatch", promise="mismatch_abs_mean < 1e-4 nats at every step", run=mismatch),
    Part(name="wall-time", promise="the stages add up to the wall time in 5 %", run=wall_time),
    Part(name="tests", promise="make test in 15 min after downloads, 0 skipped", run=tests),
    Part(
        name="sympy-gold",
        promise="sympy row, gold patch: 1 of 1",
        run=real_rows((SYMPY_ROW,), _nemo_rows, "gold", 1),
    ),
    Part(
        name="sympy-noop",
        promise="sympy row, no patch: 0 of 1",
        run=real_rows((SYMPY_ROW,), _nemo_rows, "noop", 0),
    ),
    Part(
        name="dev-gold",
        promise="three dev rows, gold patch: 3 of 3",
        run=real_rows(DEV_ROWS, _dev_rows, "gold", 3),
    ),
    Part(
        name="dev-noop",
        promise="three dev rows, no patch: 0 of 3",
        run=real_rows(DEV_ROWS, _dev_rows, "noop", 0),
    ),
    Part(
        name="exactness",
        promise="lr 0: ten steps bit-equal, at T 0.6; same ids in any slot beside any request",
        run=named_tests(
            "test_zero_lr_job_at_temperature_0_6_keeps_every_bit",
            "test_zero_lr_keeps_every_bit",
            "test_in_every_slot",
            "test_beside_thirty_others_in_any_order",
        ),
    ),
    Part(
        name="kill-resume",
        promise="killed five times, parameters bit-equal, nothing left in 15 s",
        run=named_tests("test_killed_five_times_ends_with_the_same_bits_and_leaves_nothing"),
    ),
    Part(
        name="bad-input",
        promise="unknown key, damaged checkpoint, no bubblewrap, port in use, disk full",
        run=named_tests(
            "test_unknown_key_is_named_with_the_nearest_one",
            "test_damaged_newest_checkpoint_falls_back",
            "test_missing_bubblewrap_names_the_package",
            "test_port_in_use_is_one_clear_line",
            "test_full_disk_while_checkpointing",
        ),
    ),
    Part(
        name="defences",
        promise="hidden tests, fresh grading, blame, ledger, ratio and mask shift, docker step",
        run=named_tests(
            "test_the_hidden_tests_are_nowhere_in_the_agents_sandbox",
            "test_grading_is_in_a_fresh_sandbox",
            r"actor.test_blame",
            r"batching.test_ledger",
            "test_on_policy_ratio_is_one_and_a_shift_is_noticed",
            r"docker.*_step|_step.*docker",
        ),
    ),
    Part(
        name="house",
        promise="import contracts, ruff, mypy run in make test",
        run=named_tests("test_floors_and_wings_hold", "test_format", "test_lint", "test_types"),
    ),
)
