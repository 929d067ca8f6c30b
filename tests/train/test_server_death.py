"""The server is killed under a running job: the job ends soon, and says what happened."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.train.jobs import command, start


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("whole_run")
def test_a_killed_server_ends_the_run_within_seconds_with_its_code(tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(command(run, train__steps=500), log)
    try:
        deadline = time.monotonic() + 180
        while not (run / "rollouts" / "step_000001.jsonl").exists():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        (server,) = [p for p in children if any("serve" in part for part in p.cmdline()[:3])]
        os.kill(server.pid, signal.SIGKILL)
        assert process.wait(timeout=30) == 2, log.read_text()[-3000:]
        assert "error: the server ended with code -9" in log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
