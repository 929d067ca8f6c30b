"""A run over several processes: the others do what process 0 does, with the same batches."""

import asyncio
import dataclasses
import json
import threading
import time

import numpy as np
import pytest

from configs.swe import get_config
from skyrl_jax.core.config import parse_config
from skyrl_jax.core.errors import ConfigError, DataError, PeerError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.agreement import Agreement, MemoryStore
from skyrl_jax.learner.distributed import Peers
from skyrl_jax.train.exchange import read_batches, write_batches
from skyrl_jax.train.follow import Follower, follow
from skyrl_jax.train.together import Lead, LeadPolicy, check_same_config, ticking


class Room(Peers):
    """Processes that are threads; SIGTERM comes with message ``stop_at``."""

    def __init__(self, store, index, stop_at=0):
        self.index, self.count = index, 2
        self.met = Agreement(store, index, 2, deadline_s=5.0, lost_after_s=30.0)
        self.stop_at = stop_at
        self.asked = 0

    def gather(self, name, value=None, *, deadline_s=None):
        return self.met.gather(name, value, deadline_s=deadline_s)

    def send(self, message):
        return self.met.send(message)

    def receive(self):
        return self.met.receive()

    def check_alive(self):
        self.met.check_alive()

    def stop_requested(self):
        self.asked += 1
        return self.asked == self.stop_at


class Recorder:
    """In place of a policy or publisher: writes down what it is asked to do."""

    def __init__(self):
        self.calls = []

    params = "params"

    def __enter__(self):
        self.calls.append("open")
        return self

    def __exit__(self, *error):
        self.calls.append("close")

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            return ("cast", [], None) if name == "cast" else {}

        return call


def batch(seed=0, **channels):
    rng = np.random.default_rng(seed)
    ints = {name: rng.integers(0, 9, (4, 6)).astype(np.int32) for name in ("tokens", "positions")}
    floats = ("behavior_logprobs", "advantages", "loss_weights", "temperature")
    return Batch(
        **ints,
        segment_ids=np.ones((4, 6), np.int32),
        **{name: rng.normal(size=(4, 6)).astype(np.float32) for name in floats},
        channels=channels,
    )


def assert_equal(one, other):
    for item in dataclasses.fields(Batch):
        if item.name != "channels":
            np.testing.assert_array_equal(getattr(one, item.name), getattr(other, item.name))
            assert getattr(one, item.name).dtype == getattr(other, item.name).dtype
    assert one.channels.keys() == other.channels.keys()
    for name, array in one.channels.items():
        np.testing.assert_array_equal(array, other.channels[name])


def test_batches_survive_the_way_and_are_mapped_not_loaded(tmp_path):
    sent = [batch(0, ref_logprobs=np.full((4, 6), -2.5, np.float32)), batch(1)]
    write_batches(tmp_path / "000001", sent)
    found = read_batches(tmp_path / "000001")
    for one, other in zip(sent, found, strict=True):
        assert_equal(one, other)
    assert isinstance(found[0].tokens, np.memmap)


def test_a_batch_that_is_not_there_is_an_error_with_a_deadline(tmp_path):
    with pytest.raises(DataError, match="do all processes see the same --workdir"):
        read_batches(tmp_path / "000001", wait_s=0.1)
    write_batches(tmp_path / "000002", [batch()])
    (tmp_path / "000002" / "0" / "tokens.npy").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"tokens\.npy of a batch cannot be read"):
        read_batches(tmp_path / "000002")


@pytest.fixture
def two(tmp_path):
    """Return two(stop_at) -> (lead, its policy, what process 1 recorded, its thread)."""
    threads = []

    def make(stop_at=0):
        store = MemoryStore()
        room = Room(store, 0, stop_at), Room(store, 1, stop_at)
        here, there, publisher = Recorder(), Recorder(), Recorder()
        ended = []

        def other():
            with Follower(there, lambda: publisher, tmp_path) as follower:
                ended.append(follow(room[1], follower))

        threads.append(threading.Thread(target=other, daemon=True))
        threads[-1].start()
        lead = Lead(room[0], tmp_path)
        return lead, LeadPolicy(here, lead), (there, publisher, ended, room), threads[-1]

    yield make
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_the_others_do_the_same_in_the_same_order(two, tmp_path):
    lead, policy, (there, publisher, ended, room), thread = two()
    batches = [batch(seed) for seed in range(4)]
    with policy:
        policy.restore()
        policy.start_sft()
        policy.sft_update(batches[0])
        policy.start_rl()
        policy.save(0, {"step": 0})
        lead.tick()
        policy.update(batches[1:3])
        policy.update(batches[3:])
        with lead.all_do("cast", probe_ids=[1, 2]):
            pass
        with lead.all_do("write", folder="weights/v1/orbax"):
            pass
    lead.end(0)
    thread.join(10)
    assert ended == [0]
    names = [call if isinstance(call, str) else call[0] for call in there.calls]
    assert names == [
        *("open", "restore", "start_sft", "sft_update", "start_rl", "save", "update", "update"),
        "close",
    ]
    assert_equal(there.calls[3][1], batches[0])
    assert there.calls[5] == ("save", 0, {})  # the host's part is process 0's
    for one, other in zip(there.calls[6][1] + there.calls[7][1], batches[1:], strict=True):
        assert_equal(one, other)
    assert publisher.calls == [
        "open",
        ("cast", "params", [1, 2]),
        ("write", tmp_path / "weights/v1/orbax", "cast"),
        "close",
    ]
    # Each asked for a preemption after every message.
    assert room[0].asked == room[1].asked == 12
    # At most the batches of two steps lie in the exchange folder.
    assert len(list((tmp_path / "exchange").iterdir())) == 2


def test_what_can_be_saved_when_the_run_is_told_to_stop(two):
    lead, policy, _, _ = two()
    with policy:
        assert not lead.begun and not lead.unsaved
        policy.start_rl()
        assert not lead.unsaved  # no host state yet
        policy.save(0, {})
        lead.settle(saved=True)
        assert lead.begun and lead.settled and not lead.unsaved
        policy.update([batch()])
        assert not lead.settled and not lead.unsaved  # within a step: of no use
        lead.settle()
        assert lead.unsaved
        lead.close()
        with pytest.raises(PeerError, match="no update begins now"):
            policy.update([batch()])
        assert lead.unsaved
    lead.end(75)


def test_sigterm_to_any_cancels_the_run_of_process_0(two):
    lead, policy, (_, _, ended, _), thread = two(stop_at=3)

    async def play():
        async with ticking(lead):
            with policy:  # message 1
                await asyncio.sleep(30)  # messages 2, 3: ticks

    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(play())
    assert time.monotonic() - began < 10
    assert lead.stop
    lead.end(75)
    thread.join(10)
    assert ended == [75]


def test_a_process_that_fails_ends_the_run_of_process_0_with_its_name(tmp_path):
    store = MemoryStore()
    lead = Lead(Room(store, 0), tmp_path)
    store.put("failed/1", json.dumps("OSError: no space left"))

    async def play():
        async with ticking(lead):
            await asyncio.sleep(30)

    with pytest.raises(PeerError, match="process 1 has failed: OSError: no space left"):
        asyncio.run(play())


def test_another_configuration_is_refused_by_key():
    store = MemoryStore()
    ours = parse_config(get_config("quickstart").to_dict())
    theirs = dataclasses.replace(ours, seed=ours.seed + 1)
    errors = []

    def check(index, value):
        with pytest.raises(ConfigError) as caught:
            check_same_config(Room(store, index), value)
        errors.append(str(caught.value))

    other = threading.Thread(target=check, args=(1, theirs))
    other.start()
    check(0, ours)
    other.join(10)
    assert len(errors) == 2 and all(f"seed: {ours.seed} -> {ours.seed + 1}" in e for e in errors)
    assert all(error.startswith("process 1 was started with another") for error in errors)
