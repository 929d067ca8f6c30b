"""Meetings on the host: all go on or none does, and whoever is late, wrong or dead is named."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_jax.core.errors import PeerError
from skyrl_jax.learner.agreement import Agreement, MemoryStore


def members(count, *, deadline_s=5.0, lost_after_s=30.0):
    store = MemoryStore()
    return store, [
        Agreement(store, index, count, deadline_s=deadline_s, lost_after_s=lost_after_s)
        for index in range(count)
    ]


def together(*calls):
    """Run the calls at the same time; return what each returned or raised."""

    def caught(call):
        try:
            return call()
        except PeerError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(caught, calls))


def test_everybody_gets_every_value():
    store, group = members(3)
    for turn in range(4):
        found = together(
            *(lambda m=m, t=turn, i=i: m.gather("x", [t, i]) for i, m in enumerate(group))
        )
        assert found == [[[turn, 0], [turn, 1], [turn, 2]]] * 3
    # What is over is forgotten: only the last meeting is still in the store.
    assert {key.split("/")[1] for key in store._values} == {"3"}


def test_a_late_process_is_named_and_nobody_goes_on():
    _, group = members(3, deadline_s=0.3)
    began = time.monotonic()

    def late():
        time.sleep(0.6)
        return group[1].gather("update 4")

    found = together(lambda: group[0].gather("update 4"), late, lambda: group[2].gather("update 4"))
    for error in found:  # the late one learns what the others decided
        assert isinstance(error, PeerError)
        assert str(error) == (
            "process 1 has not come to 'update 4' within 0.3 s (there: 0, 2). No device program "
            "was entered"
        )
    assert time.monotonic() - began < 3
    # And they can meet again.
    assert together(*(lambda m=m: m.gather("save", 1) for m in group)) == [[1, 1, 1]] * 3


def test_process_0_can_be_the_late_one():
    _, group = members(2, deadline_s=0.2)

    def late():
        time.sleep(0.5)
        return group[0].gather("update")

    found = together(late, lambda: group[1].gather("update"))
    assert all(str(error).startswith("process 0 has not come to 'update'") for error in found)


def test_the_verdict_is_the_same_for_all_however_close_it_was():
    """Arrivals around the deadline: none of them goes on alone."""
    rng = random.Random(0)
    outcomes = set()
    for _ in range(40):
        _, group = members(2, deadline_s=0.03)
        delays = [rng.uniform(0, 0.06), rng.uniform(0, 0.06)]

        def arrive(member, delay):
            time.sleep(delay)
            return member.gather("x", 7)

        found = together(
            *(lambda m=m, d=d: arrive(m, d) for m, d in zip(group, delays, strict=True))
        )
        went = [not isinstance(outcome, PeerError) for outcome in found]
        assert went[0] == went[1], (delays, found)
        outcomes.add(went[0])
    assert outcomes == {True, False}  # both happened


def test_processes_that_do_different_things_are_told_so():
    _, group = members(2)
    found = together(lambda: group[0].gather("save 3"), lambda: group[1].gather("update 4"))
    for error in found:
        assert "process 1 is at 'update 4' while process 0 is at 'save 3'" in str(error)


def test_why_a_process_left_reaches_the_others_at_once():
    _, group = members(2, deadline_s=30.0)
    began = time.monotonic()

    def fail():
        with group[1]:
            raise ValueError("the disk is full\nmore")

    def wait():
        with group[0]:
            return group[0].gather("update 4")

    with ThreadPoolExecutor(2) as pool:
        waiting, failing = pool.submit(wait), pool.submit(fail)
        with pytest.raises(PeerError, match="process 1 has failed: ValueError: the disk is full$"):
            waiting.result()
        with pytest.raises(ValueError):
            failing.result()
    assert time.monotonic() - began < 10


def test_a_dead_process_is_named_long_before_the_deadline():
    _, group = members(2, deadline_s=60.0, lost_after_s=0.4)
    began = time.monotonic()
    with group[0]:  # the other one never gives a sign of life
        assert group[0].wait_for_lost() == [1]
        with pytest.raises(PeerError, match=r"process 1 has gone: no sign of life for 0\.4 s"):
            group[0].gather("update 4")
    assert time.monotonic() - began < 5


def test_a_slow_process_that_lives_is_not_taken_for_dead():
    _, group = members(2, deadline_s=10.0, lost_after_s=0.4)

    def slow():
        time.sleep(1.5)
        return group[1].gather("update 4", 1)

    with group[0], group[1]:
        assert together(lambda: group[0].gather("update 4", 0), slow) == [[0, 1]] * 2


def test_messages_come_in_order_and_silence_has_an_end():
    _, group = members(2, deadline_s=0.2)
    for number in range(1, 700):  # more than a folder of them
        assert group[0].send({"do": number}) == number
        assert group[1].receive() == (number, {"do": number})
    with pytest.raises(PeerError, match=r"process 0 has sent nothing for 0\.2 s"):
        group[1].receive()


def test_old_messages_are_forgotten():
    store, group = members(2)
    for _ in range(1100):
        group[0].send({"do": "tick"})
    assert len(store._values) < 900


def test_pulse_ends_with_its_process():
    _, group = members(1)
    before = threading.active_count()
    with group[0]:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
