"""What goes wrong on a real command line: one clear line, exit code 2, nothing lost."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.jobs import ROOT, command, finish


def test_unknown_key_is_named_with_the_nearest_one(tmp_path):
    result = finish(command(tmp_path / "run", "--config.learner.learning_rate=1"))
    assert result.returncode == 2
    assert "'learner.learning_rate'" in result.stderr
    assert "'learner." in result.stderr.split("nearest known key is")[1]
    assert not (tmp_path / "run").exists()


def test_value_that_makes_no_sense_is_refused_before_anything_starts(tmp_path):
    result = finish(command(tmp_path / "run", "--config.rollout.top_p=0.9"))
    assert result.returncode == 2
    assert "top_p" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_mesh_or_a_profile_that_cannot_be_is_one_line_before_anything_starts(tmp_path):
    for flag, told in (
        ("--config.mesh.tensor=2", "mesh.tensor = 2 does not divide model.num_kv_heads = 1 (leaf"),
        ("--config.mesh.expert=2", "mesh.expert = 2, but family 'qwen3' has no experts: use 1"),
        ("--profile_steps=301", "there is no step 301, since train.steps = 300 is the last one"),
    ):
        result = finish(command(tmp_path / "run", flag))
        assert result.returncode == 2
        assert told in result.stderr and len(result.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "run").exists()


def test_missing_config_says_what_to_give():
    result = finish([sys.executable, "launchers/train.py"])
    assert result.returncode == 2
    assert "--config=configs/swe.py" in result.stderr


def test_missing_bubblewrap_names_the_package(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("git", "cc", "mount", "umount"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    argv = command(tmp_path / "run")
    result = subprocess.run(
        argv,
        cwd=ROOT,
        env=dict(os.environ) | {"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "bubblewrap" in result.stderr


def test_port_in_use_is_one_clear_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = finish(
            [
                sys.executable,
                "launchers/serve.py",
                f"--model={tmp_path}",
                f"--port={port}",
                "--wait_for_weights",
            ]
        )
    assert result.returncode != 0
    assert str(port) in result.stderr
    assert "Traceback" not in result.stderr


def test_a_configured_server_that_is_not_there_is_named_before_anything_is_made(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        argv = command(tmp_path / "run", f"--config.engine.servers=('{url}',)")
        result = finish(argv)  # bound and not listening: refused
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"engine.servers names {url}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "tasks.json").exists()


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("whole_run")
def test_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path):
    run = tmp_path / "run"
    first = finish(command(run, train__steps=2))
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    newest = run / "checkpoints" / "000002"
    victims = [p for p in newest.rglob("*") if p.is_file() and p.stat().st_size > 1000]
    for path in victims:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    second = finish(command(run, train__steps=3))
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert "checkpoint 2 is damaged" in second.stdout
    assert "resuming after step 1" in second.stdout


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("whole_run")
def test_full_disk_while_checkpointing_ends_clearly_and_keeps_the_last_good_one(tmp_path):
    disk, ballast = tmp_path / "disk", tmp_path / "disk" / "ballast"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)], check=True)
    try:
        run = disk / "run"
        first = finish(command(run, train__steps=1))
        assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
        free = shutil.disk_usage(disk).free
        # Room for the next step's weights and episodes, not for a checkpoint beside them.
        ballast.write_bytes(b"\0" * max(0, free - _weights_bytes(run) * 3 // 2))
        second = finish(command(run, train__steps=3))
        assert second.returncode == 2, second.stdout[-3000:] + second.stderr[-3000:]
        # (Orbax's own writer thread prints its traceback before or after it)
        ours = [line for line in second.stderr.splitlines() if line.startswith("error: ")]
        assert len(ours) == 1, second.stderr[-3000:]
        assert ours[0].startswith("error: cannot write checkpoint 2: the disk under"), ours
        assert ours[0].endswith("is full; the last good one is step 1"), ours
        ballast.unlink()
        third = finish(command(run, train__steps=3))
        assert third.returncode == 0, third.stdout[-3000:] + third.stderr[-3000:]
        assert "resuming after step" in third.stdout
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _weights_bytes(run: Path) -> int:
    folder = max((run / "weights").glob("v*"))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
