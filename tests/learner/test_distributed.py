"""What several processes need before there are several: flags, texts, and the one-process case."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_jax.core.errors import ConfigError, PeerError
from skyrl_jax.learner.distributed import (
    Peers,
    ProcessGroup,
    Rendezvous,
    rendezvous_from_flags,
)
from skyrl_jax.learner.roll_call import call_roll

NONE = {"distributed": False, "coordinator": "", "num_processes": 0, "process_id": -1}


def test_flags():
    assert rendezvous_from_flags(**NONE) is None
    assert rendezvous_from_flags(**NONE | {"distributed": True}) == Rendezvous()
    given = {"coordinator": "host-0:1234", "num_processes": 4, "process_id": 3}
    for distributed in (False, True):
        where = rendezvous_from_flags(distributed=distributed, **given)
        assert where == Rendezvous(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_processes": 2}, "need --coordinator=HOST:PORT"),
        ({"process_id": 0}, "need --coordinator=HOST:PORT"),
        ({"distributed": True, "num_processes": 2}, "need --coordinator=HOST:PORT"),
        ({"coordinator": "host"}, "'host' must be HOST:PORT"),
        ({"coordinator": "host:1"}, "needs --num_processes=N"),
        ({"coordinator": "host:1", "num_processes": 2}, "--process_id=-1 must be 0 to 1"),
        (
            {"coordinator": "host:1", "num_processes": 2, "process_id": 2},
            "--process_id=2 must be 0 to 1",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        rendezvous_from_flags(**NONE | given)


def test_the_limits_let_a_dead_process_be_noticed_within_a_minute():
    limits = Rendezvous()
    assert limits.lost_after_s * 1.5 < 60 and limits.heartbeat_timeout_s < 60
    # Ours first: its message names the process and says what to do.
    assert limits.lost_after_s * 1.5 < limits.heartbeat_timeout_s


def test_roll_call(tmp_path):
    """Files of an earlier start are there: only the nonces of this one count."""
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            calls = [
                pool.submit(call_roll, tmp_path / "roll", index, 3, timeout_s=10.0)
                for index in range(3)
            ]
            assert [call.result() for call in calls] == [None] * 3
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(call_roll, tmp_path / "roll", index, 3, timeout_s=0.5) for index in (0, 2)
        ]
        for call in calls:
            with pytest.raises(PeerError, match=r"^process 1 has not come to .*roll within 0.5 s"):
                call.result()


def test_one_process_waits_for_nobody(tmp_path):
    peers = Peers()
    assert (peers.index, peers.count) == (0, 1)
    assert peers.gather("x", {"a": 1}) == [{"a": 1}]
    peers.ready("step 1")
    peers.check_shared(tmp_path / "absent")
    assert not peers.stop_requested()
    with pytest.raises(ZeroDivisionError), peers.running("step 1"):
        raise ZeroDivisionError


def test_a_group_that_is_not_entered_says_so():
    with pytest.raises(RuntimeError, match="with statement"):
        ProcessGroup(Rendezvous()).ready("x")
