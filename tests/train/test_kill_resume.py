"""kill -9 anywhere, start again: the same bits in the end, and nothing left behind meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from configs.swe import get_config
from skyrl_jax.core.config import parse_config
from skyrl_jax.learner.checkpoint import Checkpoints
from skyrl_jax.learner.state import abstract_state
from tests.train.jobs import SMALL, command, finish, start

STEPS = 8
# Held-out tasks are measured on the way: that must not move a bit of the training. The KL penalty
# is against the policy of step 0, which every start must find again as it was.
EVAL = {"tasks__heldout": 2, "eval__episodes": 8, "eval__every": 3, "objective__kl_coef": 0.1}


def _params(workdir: Path) -> dict[str, np.ndarray]:
    values = get_config("quickstart")
    values.update_from_flattened_dict(SMALL)
    config = parse_config(values.to_dict())
    with Checkpoints(workdir / "checkpoints", keep=3) as checkpoints:
        restored = checkpoints.restore(abstract_state(config.model, config.learner))
    assert restored is not None
    assert restored.step == STEPS
    leaves = jax.tree_util.tree_leaves_with_path(restored.state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _metric_steps(workdir: Path) -> list[int]:
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    steps = []
    for line in path.read_text().splitlines():
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:
            continue  # the line being written
    return steps


def _after_step(step: int) -> Callable[[Path], bool]:
    def reached(workdir: Path) -> bool:
        return max(_metric_steps(workdir), default=0) >= step

    return reached


def _in_checkpoint_write(workdir: Path) -> bool:
    folder = workdir / "checkpoints"
    return _after_step(1)(workdir) and any("orbax-checkpoint-tmp" in p for p in os.listdir(folder))


def _in_publish(workdir: Path) -> bool:
    folder = workdir / "weights"
    versions = [p for p in folder.iterdir() if p.name.startswith("v")]
    return any(p.is_dir() and not (p / "COMPLETE").exists() for p in versions)


def _kill_when(process, workdir: Path, reached: Callable[[Path], bool], log: Path) -> None:
    """Wait for the moment, kill -9 the job alone, and check that nothing of it is left."""
    deadline = time.monotonic() + 180
    while not (workdir.exists() and _safe(reached, workdir)):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.001)
    family = psutil.Process(process.pid).children(recursive=True)
    sandboxes = _mount_namespaces(child.pid for child in family)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive, f"left 15 s after the kill: {[p.cmdline() for p in alive]}"
    assert _cgroups(process.pid) == [], "cgroups left 15 s after the kill"
    left = sandboxes & _mount_namespaces(psutil.pids())
    assert not left, f"mount namespaces of sandboxes left 15 s after the kill: {left}"


def _safe(reached: Callable[[Path], bool], workdir: Path) -> bool:
    try:
        return reached(workdir)
    except FileNotFoundError:  # the run moves its folders while we look
        return False


def _mount_namespaces(pids: Iterable[int]) -> set[str]:
    """Return the mount namespaces that processes live in; a sandbox's mounts live and die there."""
    found = set()
    for pid in pids:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/mnt"))
        except OSError:  # that process has just ended
            continue
    return found - {os.readlink("/proc/self/ns/mnt")}


def _cgroups(owner: int) -> list[str]:
    """Return the cgroups of a dead owner (run.pid.start time) that still exist after 15 s."""
    found: list[str] = []
    for _ in range(150):
        root = Path("/sys/fs/cgroup")
        both = [*root.glob(f"*/skyrl/*.{owner}.*"), *root.glob(f"skyrl/*.{owner}.*")]  # v1, v2
        found = [str(p) for p in both if p.is_dir()]
        if not found:
            return []
        time.sleep(0.1)
    return found


@pytest.mark.timeout(800)
@pytest.mark.xdist_group("whole_run")
def test_killed_five_times_ends_with_the_same_bits_and_leaves_nothing(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = finish(command(whole, train__steps=STEPS, **EVAL))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]

    argv, log = command(broken, train__steps=STEPS, **EVAL), tmp_path / "log"
    moments = [
        ("publish", _in_publish),
        ("checkpoint", _in_checkpoint_write),
        ("step 3", _after_step(3)),
        ("step 5", _after_step(5)),
        ("step 6", _after_step(6)),
    ]
    for name, reached in moments:
        process = start(argv, log)
        try:
            _kill_when(process, broken, reached, log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if name == "checkpoint":
            parts = os.listdir(broken / "checkpoints")
            assert any("orbax-checkpoint-tmp" in part for part in parts), parts
    last = finish(argv)
    assert last.returncode == 0, last.stdout[-3000:] + last.stderr[-3000:]
    assert "resuming after step" in last.stdout
    assert _metric_steps(broken) == list(range(1, STEPS + 1))

    one, two = _params(whole), _params(broken)
    assert one.keys() == two.keys()
    moved = 0
    for name, leaf in one.items():
        assert leaf.tobytes() == two[name].tobytes(), f"{name} differs"
        moved += leaf.size
    assert moved > 0
    epoch = set().union(*(_tasks(whole, step) for step in range(1, 5)))
    assert len(epoch) == SMALL["tasks.train"], "2 tasks a step: 4 steps play each of the 8"
    curves = [
        json.loads((run / "summary.json").read_text())["resolved_curve"] for run in (whole, broken)
    ]
    assert [step for step, _ in curves[0]] == [0, 3, 6, STEPS]
    assert curves[0] == curves[1]
    for step in range(1, STEPS + 1):
        assert _ids(whole, step) == _ids(broken, step), f"episodes of step {step} differ"


def _tasks(workdir: Path, step: int) -> set[str]:
    lines = (workdir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["task_id"] for line in lines}


def _ids(workdir: Path, step: int) -> list[list[int]]:
    lines = (workdir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [row["token_ids"] for line in lines for row in json.loads(line)["rows"]]
