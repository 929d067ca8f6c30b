"""Two real processes of 4 CPU devices each, as one learner, against one process of 8.

They feed their own rows, save and restore together, refuse a folder that is not shared, name who
is late without entering a collective (fault C42), stop after the same step when one gets SIGTERM,
and do not outlive each other.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from skyrl_jax.core.config import MeshConfig
from skyrl_jax.learner.checkpoint import Checkpoints
from skyrl_jax.learner.distributed import EXIT_PEER_LOST, EXIT_PREEMPTED
from skyrl_jax.learner.state import abstract_state

WORKER = Path(__file__).with_name("two_processes.py")


class Worker:
    """A process of the learner; ``said`` grows by one JSON value a line."""

    def __init__(self, env, devices, log, given):
        flags = f"--xla_force_host_platform_device_count={devices} "
        flags += "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
        self.log = log
        self.said = {}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(given)],
            env=env | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.update(json.loads(line))

    def wait_for(self, name, timeout_s=120):
        until = time.monotonic() + timeout_s
        while name not in self.said:
            assert time.monotonic() < until and self.process.poll() is None, self.tail()
            time.sleep(0.05)
        return self.said[name]

    def end(self, timeout_s=60):
        """Return the exit code and the seconds it took."""
        began = time.monotonic()
        self.process.wait(timeout_s)
        self._reader.join(5)
        return self.process.returncode, time.monotonic() - began

    def tail(self):
        return f"{self.said}\n{self.log.read_text(errors='replace')[-3000:]}"


@pytest.fixture
def start(child_env, tmp_path, model_cfg, learner_cfg):
    """Return start(scenario, index, **more) -> Worker; all are killed at the end."""
    workers = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = dataclasses.replace(model_cfg, hidden_size=32, head_dim=8, intermediate_size=48)
    learner = dataclasses.replace(learner_cfg, lr=1e-3, row_length=16, micro_rows=8, remat="full")
    sizes = {"data": 2, "fsdp": 4}
    given = {
        "model": dataclasses.asdict(model),
        "learner": dataclasses.asdict(learner),
        "mesh": {item.name: sizes.get(item.name, 1) for item in dataclasses.fields(MeshConfig)},
        "folder": str(tmp_path),
    }
    where = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "file_delay_s": 1.0}
    where["folder"] = str(tmp_path / "roll")

    def make(scenario, index=0, devices=4, **limits):
        more = {"scenario": scenario, "where": where | {"process_id": index} | limits}
        log = tmp_path / f"{scenario}-{index}.log"
        workers.append(Worker(child_env, devices, log, given | more))
        return workers[-1]

    make.template = abstract_state(model, learner)
    yield make
    for worker in workers:
        worker.process.kill()  # SIGTERM would be taken for a preemption notice
        worker.process.wait()


def test_two_processes_are_one_learner(start, tmp_path):
    one = start("alone", devices=8)
    pair = [start("pair", index) for index in range(2)]

    for worker in pair:  # a folder of its own for each
        text = worker.wait_for("unshared")
        assert text.startswith(f"ConfigError: {tmp_path}/own-0 of process 0 is not shared: "), text
        assert "process 1 has not seen" in text and f"{tmp_path}/own-1" in text

    for worker in pair:
        worker.wait_for("logprobs")
    assert one.end(120)[0] == 0, one.tail()
    losses = np.array(one.said["losses"])
    assert len(losses) == 10 and np.all(np.diff(losses) < 0)
    for worker in pair:
        assert worker.said["own"] == 8 * 16  # half of the rows; the others were nonsense
        np.testing.assert_allclose(worker.said["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(worker.said["logprobs"], one.said["logprobs"], atol=1e-5)
        assert worker.wait_for("again") is True  # restored: the same five losses, bit for bit
        assert worker.said["host"] == {"cursor": 5000} and worker.said["step"] == 5000

    for worker in pair:
        assert worker.wait_for("damaged") == {"step": 5000, "skipped": [5001]}
    for worker in pair:  # C42: process 1 was late
        late = worker.wait_for("late")
        assert late["entered"] == 0
        assert late["text"].startswith("PeerError: process 1 has not come to 'update 11' within 1")
    for worker in pair:
        worker.wait_for("running")

    os.kill(pair[1].process.pid, signal.SIGTERM)
    for worker in pair:
        code, seconds = worker.end()
        assert code == EXIT_PREEMPTED, worker.tail()
        assert seconds < 60
    stopped = pair[0].said["stopped"]
    assert stopped == pair[1].said["stopped"] and stopped["number"] > 10_000

    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:  # here, on one device
        found = checkpoints.restore(start.template)
    assert (found.step, found.skipped) == (stopped["number"], ())
    assert found.host == {"cursor": stopped["number"]}
    assert int(found.state.step) == stopped["updates"]


def test_a_killed_process_ends_the_other_with_its_name(start):
    limits = {"lost_after_s": 6.0, "heartbeat_timeout_s": 20}
    pair = [start("killed", index, **limits) for index in range(2)]
    for worker in pair:
        worker.wait_for("running")
    time.sleep(0.5)  # process 0 is inside the collective by now
    pair[1].process.kill()
    code, seconds = pair[0].end()
    assert code == EXIT_PEER_LOST, pair[0].tail()
    assert seconds < 60
    log = pair[0].tail()
    assert "error: process 1 has gone: no sign of life for 6 s" in log
    assert "died during 'update 1'" in log


def test_a_process_that_never_starts_is_named(start):
    worker = start("absent", 0, start_timeout_s=3.0)
    code, _ = worker.end()
    assert code == EXIT_PEER_LOST, worker.tail()
    assert worker.said["error"].startswith("process 1 has not come to ")
