"""Start the real job as a child process, small: shared by the tests of the whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A real run in every part, small in every number. The entropy bonus makes every step move the
# parameters, also where no group is mixed.
SMALL = {
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.intermediate_size": 128,
    "tasks.train": 8,
    "tasks.heldout": 0,
    "tasks.unseen": 0,
    "tasks.templates": 25,
    "sft.max_steps": 4,
    "sft.rewrite_steps": 1,
    "sft.probe_from": 99,
    "sft.openings": 24,
    "sft.batch_size": 16,
    "objective.entropy_coef": 0.01,
    "rollout.tasks_per_step": 2,
    "rollout.samples_per_task": 4,
    "rollout.max_new_tokens": 64,
    "engine.slots": 8,
    "eval.episodes": 0,
    "eval.unseen_episodes": 0,
    "eval.greedy": False,
    "train.checkpoint_every": 1,
    "train.keep_checkpoints": 3,
}


def command(workdir: Path, *extra: str, **overrides: object) -> list[str]:
    """Return the command line of a small run; keys of ``overrides`` use ``__`` for the dot."""
    values = SMALL | {key.replace("__", "."): value for key, value in overrides.items()}
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    return [
        sys.executable,
        "launchers/train.py",
        "--config=configs/swe.py:quickstart",
        f"--workdir={workdir}",
        *flags,
        *extra,
    ]


def start(argv: Sequence[str], log: Path, env: dict[str, str] | None = None) -> subprocess.Popen:
    """Start a run in its own session, its output in ``log``."""
    with log.open("ab") as file:
        return subprocess.Popen(
            argv,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ) | (env or {}),
            start_new_session=True,
        )


def finish(
    argv: Sequence[str], timeout_s: float = 240, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed."""
    return subprocess.run(
        argv,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=dict(os.environ) | (env or {}),
        stdin=subprocess.DEVNULL,
        check=False,
    )
