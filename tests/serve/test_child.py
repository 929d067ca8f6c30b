"""A server and the process that starts it."""

import json
import os
import subprocess

from skyrl_jax.serve.child import ServerChild
from skyrl_jax.serve.process import ServeOptions
from tests.serve import running


def test_a_server_whose_starter_is_gone_does_not_start(tmp_path):
    """The starter was killed before the kernel was told to end the server with it."""
    with subprocess.Popen(["true"]) as starter:
        pass
    flags = (f"--parent_pid={starter.pid}", "--port=0")
    process = running.launch(tmp_path / "absent", *flags, port_file=tmp_path / "port")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"--parent_pid={starter.pid} is not the parent" in output.strip().splitlines()[-1]


def test_a_child_server_knows_its_starter(tmp_path):
    child = ServerChild(ServeOptions(model="m"))
    options = json.loads(child._argv(tmp_path / "port")[-1])
    assert options["parent_pid"] == os.getpid()
