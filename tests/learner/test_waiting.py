"""Nobody waits without a word: what is missing is said soon and again, an unknown host refused."""

import json
import re
import socket
import subprocess
import sys
import time

import pytest

from launchers.common import unknown_host
from skyrl_jax.core.errors import ConfigError, PeerError
from skyrl_jax.learner.distributed import ProcessGroup, Rendezvous
from skyrl_jax.learner.roll_call import call_roll
from skyrl_jax.learner.waiting import EVERY_S, FIRST_S, waiting


def test_a_long_wait_is_told_again_and_again_and_a_short_one_never():
    said, missing = [], ["process 1"]
    with waiting(lambda: missing[0], 300.0, tell=said.append, first_s=0.02, every_s=0.05):
        while len(said) < 2:
            time.sleep(0.01)
        missing[0] = "process 2"
        while len(said) < 4:
            time.sleep(0.01)
    assert said[0] == "process 1; waited 0 s of at most 300 s" and said[-1].startswith("process 2")
    count = len(said)
    time.sleep(0.15)
    assert len(said) == count, "over is over"
    with waiting(lambda: "x", 300.0, tell=said.append, first_s=5.0):
        pass
    assert len(said) == count
    assert FIRST_S <= 10 and EVERY_S <= 30


def test_the_roll_call_names_who_is_missing_while_it_waits(tmp_path):
    said = []
    with pytest.raises(PeerError, match="processes 0, 2 have not come"):
        call_roll(tmp_path, 1, 3, timeout_s=0.4, tell=said.append)
    text = rf"processes 0, 2 have not come to {tmp_path}; waited 0 s of at most 0 s"
    assert said == [text]


def test_a_host_that_nobody_knows():
    asked = []

    def look_up(host, port):
        asked.append((host, port))
        if host == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")

    assert unknown_host("127.0.0.1:1234") == ""
    assert unknown_host("[::1]:80", look_up) == "" and asked == [("::1", 80)]
    assert "Name or service not known" in unknown_host("nowhere:80", look_up)
    assert unknown_host("a..b:80")


@pytest.mark.parametrize("shared", [True, False])
def test_an_unknown_coordinator_is_refused_as_soon_as_all_are_there(tmp_path, capsys, shared):
    where = Rendezvous(
        coordinator="no such host:1234",
        num_processes=1,
        process_id=0,
        folder=str(tmp_path) if shared else "",
        unknown_host=unknown_host,
    )
    began = time.monotonic()
    with (
        pytest.raises(ConfigError, match=r"--coordinator=no such host:1234: .* knows no such host"),
        ProcessGroup(where),
    ):
        pass
    assert time.monotonic() - began < 30
    told = "note: the host of --coordinator=no such host:1234 is not known here yet"
    assert (told in capsys.readouterr().err) == shared


SILENT = """
import json, sys
from skyrl_jax.core.errors import PeerError
from skyrl_jax.learner.distributed import ProcessGroup, Rendezvous, leave
try:
    with ProcessGroup(Rendezvous(**json.loads(sys.argv[1]))):
        pass
except PeerError as error:
    print(error, file=sys.stderr)
leave(69)
"""


def test_a_coordinator_that_does_not_answer_is_told_while_jax_waits(child_env):
    """A known host where nothing listens: JAX itself would not say a word before it ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": 1}
    done = subprocess.run(
        [sys.executable, "-c", SILENT, json.dumps(where | {"start_timeout_s": 4.0})],
        env=child_env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    told = re.findall(rf"not all processes have met at 127\.0\.0\.1:{port}; waited", done.stderr)
    assert told, done.stderr[-2000:]
