"""One process of test_two_processes.py: python two_processes.py JSON. Prints JSON lines."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_jax.core.config import LearnerConfig, MeshConfig, ModelConfig
from skyrl_jax.core.errors import ConfigError, PeerError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.checkpoint import Checkpoints
from skyrl_jax.learner.distributed import (
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
    Peers,
    ProcessGroup,
    Rendezvous,
    leave,
)
from skyrl_jax.learner.spread import feeding, spread_batch, whole
from skyrl_jax.learner.state import abstract_state, init_state, state_shardings
from skyrl_jax.learner.step import make_logprob_step, make_train_step
from skyrl_jax.models.sharding import make_mesh, row_sharding

SHAPE = (16, 16)


def say(**values):
    print(json.dumps(values), flush=True)


def whole_batch():
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.5, 1.5, SHAPE).astype(np.float32) / np.prod(SHAPE)
    weights[:, [0, 7]] = 0
    return Batch(
        tokens=rng.integers(0, 40, SHAPE).astype(np.int32),
        segment_ids=np.tile(np.repeat([1, 2], [7, 9]), (SHAPE[0], 1)).astype(np.int32),
        positions=np.tile(np.r_[np.arange(7), np.arange(9)], (SHAPE[0], 1)).astype(np.int32),
        behavior_logprobs=np.zeros(SHAPE, np.float32),
        advantages=np.zeros(SHAPE, np.float32),
        loss_weights=weights,
        temperature=np.full(SHAPE, 0.8, np.float32),
    )


def own_rows_only(batch, mesh):
    """Return the batch with nonsense in the rows of the other processes' devices."""
    where = row_sharding(mesh, SHAPE).addressable_devices_indices_map(SHAPE)
    own = np.zeros(SHAPE, bool)
    for index in where.values():
        own[index] = True
    nonsense = {"loss_weights": 1e6, "segment_ids": 0}
    return own, jax.tree_util.tree_map_with_path(
        lambda path, x: np.where(own, x, np.asarray(nonsense.get(path[0].name, 1), x.dtype)), batch
    )


class Trainer:
    def __init__(self, given):
        learner = {k: tuple(v) if isinstance(v, list) else v for k, v in given["learner"].items()}
        self.configs = ModelConfig(**given["model"]), LearnerConfig(**learner)
        self.mesh = make_mesh(MeshConfig(**given["mesh"]))
        self.own, self.batch = own_rows_only(whole_batch(), self.mesh)
        self.step = feeding(make_train_step(*self.configs, None, self.mesh), self.mesh)
        self.score = feeding(make_logprob_step(*self.configs, self.mesh), self.mesh)
        self.state = init_state(*self.configs, jax.random.key(0), self.mesh)

    def train(self, steps):
        losses = []
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.batch)
            losses.append(float(jax.device_get(metrics)["loss"]))
        return losses

    def logprobs(self):
        return whole(self.score(self.state.params, self.batch).logprobs).tolist()

    def template(self):
        return jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
            abstract_state(*self.configs),
            state_shardings(*self.configs, self.mesh),
        )


def alone(given):
    trainer = Trainer(given)
    assert jax.device_count() == 8 and trainer.own.all()
    Peers().ready("step 1")
    say(losses=trainer.train(10), logprobs=trainer.logprobs())


def pair(given):
    with ProcessGroup(Rendezvous(**given["where"])) as peers:
        assert (jax.device_count(), jax.local_device_count()) == (8, 4)
        folder = Path(given["folder"])
        say(unshared=refusal(lambda: peers.check_shared(folder / f"own-{peers.index}")))
        trainer = Trainer(given)
        with Checkpoints(folder / "checkpoints", keep=2, peers=peers) as checkpoints:
            assert checkpoints.restore(trainer.template()) is None
            peers.ready("train")
            losses = trainer.train(5)
            checkpoints.save(5000, trainer.state, {"cursor": 5000} if peers.index == 0 else {})
            later = trainer.train(5)
            say(losses=losses + later, own=int(trainer.own.sum()), logprobs=trainer.logprobs())
            restored = checkpoints.restore(trainer.template())
            trainer.state = restored.state
            say(again=trainer.train(5) == later, host=restored.host, step=restored.step)
            say(damaged=damaged(peers, trainer, checkpoints))
            say(late=late(peers, trainer))
            say(stopped=until_stopped(peers, trainer, checkpoints))
    leave(EXIT_PREEMPTED)


def damaged(peers, trainer, checkpoints):
    """The newest checkpoint is cut where one process may read and another not: all pass it over."""
    checkpoints.save(5001, trainer.state, {})
    if peers.index == 0:
        files = (checkpoints.root / "005001" / "state").rglob("*")
        largest = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 3])
    peers.ready("the file is cut")
    found = checkpoints.restore(trainer.template())
    trainer.state = found.state
    return {"step": found.step, "skipped": [item.step for item in found.skipped]}


def refusal(call):
    try:
        call()
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def late(peers, trainer):
    """Process 1 comes too late to a meeting: nobody may take the step behind it."""
    entered = []

    def step():
        peers.ready("update 11", deadline_s=1.0)
        entered.append(trainer.train(1))

    if peers.index == 1:
        time.sleep(2.5)
    return {"text": refusal(step), "entered": len(entered)}


def until_stopped(peers, trainer, checkpoints):
    say(running=True)
    time.sleep(1.5)  # the notice comes before the first question
    number = 10_000  # of a resumed run
    while True:
        number += 1
        peers.ready(f"step {number}")
        with peers.running(f"step {number}"):
            trainer.train(1)
        if peers.stop_requested():
            break
    checkpoints.save(number, trainer.state, {"cursor": number})
    return {"number": number, "updates": int(trainer.state.step)}


def killed(given):
    """Process 1 stands still before a collective that process 0 has entered, and is killed."""
    try:
        with ProcessGroup(Rendezvous(**given["where"])) as peers:
            mesh = make_mesh(MeshConfig(**given["mesh"]))
            rows = dataclasses.replace(whole_batch(), channels={})
            add = jax.jit(lambda batch: jnp.sum(batch.loss_weights))
            total = float(add(spread_batch(mesh, rows)))
            assert abs(total - rows.loss_weights.sum()) < 1e-4
            peers.ready("update 1")
            say(running=True)
            if peers.index == 1:
                time.sleep(600)
            with peers.running("update 1"):
                float(add(spread_batch(mesh, rows)))
    except PeerError as error:
        say(error=str(error))
        leave(EXIT_PEER_LOST)


def absent(given):
    """Process 0 is the only one that starts."""
    try:
        with ProcessGroup(Rendezvous(**given["where"])):
            say(error="")
    except PeerError as error:
        say(error=str(error))
        leave(EXIT_PEER_LOST)


if __name__ == "__main__":
    everything = json.loads(sys.argv[1])
    {"alone": alone, "pair": pair, "killed": killed, "absent": absent}[everything["scenario"]](
        everything
    )
    leave(0)
