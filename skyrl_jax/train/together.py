"""A run over several processes, as process 0 sees it: it plays and decides, all train in step.

Process 0 has the actor side (tasks, sandboxes, server) and tells the others by messages
what to do with it: ``tick`` (it lives; once a second while it waits for episodes), the name of a
method of the policy or publisher, or ``end``. Before each device program all processes meet on the
host. After every message each process asks JAX whether one of them got SIGTERM, so that all of them
hear of it after the same message (train/follow.py is the other side).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from skyrl_jax.core.config import RunConfig, diff_config, flatten_config
from skyrl_jax.core.errors import ConfigError, PeerError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.checkpoint import Restored
from skyrl_jax.learner.distributed import Peers, ProcessGroup
from skyrl_jax.sync.publish import Publisher
from skyrl_jax.train.exchange import write_batches
from skyrl_jax.train.policy import Policy

EXCHANGE = "exchange"  # folder of the run folder: batches on their way to the others
_TICK_S = 1.0
# After SIGTERM a step that has moved the parameters may end within so many seconds, since its
# checkpoint can only be written at its end.
_REST_S = 30.0


class Lead:
    """What process 0 tells the others. Its methods may be called from several threads.

    Args:
        peers: all processes; this is number 0.
        workdir: the run folder, which all processes see.
    """

    def __init__(self, peers: ProcessGroup, workdir: Path) -> None:
        """Remember the arguments; batches of a run that was killed are removed."""
        self.peers = peers
        self._workdir = workdir
        self._lock = threading.Lock()
        self._batches = 0
        self._changes = 0  # of the parameters
        self._settled = -1  # the change that the host state belongs to
        self._saved = -1  # the change that the newest checkpoint has
        self._closed = False
        self.stop = False  # SIGTERM was sent to one of the processes
        shutil.rmtree(workdir / EXCHANGE, ignore_errors=True)

    def tick(self) -> bool:
        """Tell the others that process 0 lives; return whether one was told to stop.

        Raises:
            PeerError: one has failed or died.
        """
        if self._lock.acquire(blocking=False):  # else something is being done: they know
            try:
                self.peers.check_alive()
                self._say("tick")
            finally:
                self._lock.release()
        return self.stop

    @contextlib.contextmanager
    def all_do(self, name: str, *, changes: bool = False, **details: Any) -> Iterator[None]:
        """Around a part of a run that all processes do at the same time.

        Args:
            name: what the others are to do (train/follow.py).
            changes: whether it changes the parameters or the optimizer.
            details: what they need to know for it; JSON.

        Raises:
            PeerError: one is missing, late or dead, or the run is ending and this would change it.
        """
        with self._lock:
            if changes and self._closed:
                raise PeerError(f"the run was told to stop: no {name} begins now")
            self._changes += changes  # before it begins: half done is not settled
            self._say(name, **details)
            self.peers.ready(name)
            with self.peers.running(name):
                yield

    def close(self) -> None:
        """From now on nothing changes the parameters; waits for a change that has begun."""
        with self._lock:
            self._closed = True

    def end(self, code: int) -> None:
        """Tell the others to end, with this exit code."""
        with self._lock:
            self._say("end", code=code)

    def settle(self, *, saved: bool = False) -> None:
        """Note that the host state belongs to the parameters as they are, and whether on disk."""
        self._settled = self._changes
        if saved:
            self._saved = self._changes

    @property
    def settled(self) -> bool:
        """Whether the host state belongs to the parameters: False within a step."""
        return self._settled == self._changes

    @property
    def unsaved(self) -> bool:
        """Whether a checkpoint can be written now that says more than the newest one."""
        return self.settled and self._saved != self._changes

    @property
    def begun(self) -> bool:
        """Whether there is a host state at all: False until the warm start is over."""
        return self._settled >= 0

    def inside(self, path: Path) -> str:
        """Return a path of the run folder as the others can use it."""
        return os.path.relpath(path, self._workdir)

    def share(self, batches: Sequence[Batch]) -> str:
        """Write batches where the others read them; return the folder's path in the run folder."""
        self._batches += 1
        folder = self._workdir / EXCHANGE / f"{self._batches:06d}"
        write_batches(folder, batches)
        # All have done what the one before was for: they came for something newer since.
        shutil.rmtree(folder.with_name(f"{self._batches - 2:06d}"), ignore_errors=True)
        return self.inside(folder)

    def _say(self, name: str, **details: Any) -> None:
        self.peers.send({"do": name, **details})
        self.stop = self.peers.stop_requested() or self.stop


class LeadPolicy:
    """Process 0's policy: each of its methods takes the others along."""

    def __init__(self, policy: Policy, lead: Lead) -> None:
        """Remember the arguments."""
        self._policy = policy
        self._lead = lead

    def __enter__(self) -> LeadPolicy:
        """Open the checkpoint folder."""
        with self._lead.all_do("open"):
            self._policy.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the checkpoint folder."""
        self._policy.__exit__(kind, error, trace)

    @property
    def params(self) -> Any:
        """The params pytree of the current state."""
        return self._policy.params

    @property
    def state(self) -> Any:
        """The current state."""
        return self._policy.state

    def start_sft(self) -> None:
        """Start from fresh params with the warm start's optimizer."""
        with self._lead.all_do("start_sft", changes=True):
            self._policy.start_sft()

    def start_rl(self) -> None:
        """Keep the params (fresh ones where there are none); start the RL optimizer."""
        with self._lead.all_do("start_rl", changes=True):
            self._policy.start_rl()

    def sft_update(self, batch: Batch) -> dict[str, float]:
        """Take one supervised step."""
        batches = self._lead.share([batch])
        with self._lead.all_do("sft_update", changes=True, batches=batches):
            return self._policy.sft_update(batch)

    def update(self, minibatches: Sequence[Batch]) -> dict[str, float]:
        """Score the batch once, then take one optimizer update per mini-batch and epoch."""
        batches = self._lead.share(minibatches)
        with self._lead.all_do("update", changes=True, batches=batches):
            return self._policy.update(minibatches)

    def save(self, step: int, host: Mapping[str, Any]) -> None:
        """Write a checkpoint of the state and the host's own values."""
        with self._lead.all_do("save", step=step):
            self._policy.save(step, host)

    def restore(self) -> Restored | None:
        """Load the newest whole checkpoint; ``None`` where there is none."""
        with self._lead.all_do("restore"):
            return self._policy.restore()


class LeadPublisher(Publisher):
    """Process 0's publisher: the others cast the params too, and write their shards of them."""

    def __init__(self, lead: Lead, *args: Any, **options: Any) -> None:
        """Remember who leads; the rest as for ``Publisher``."""
        super().__init__(*args, **options)
        self._lead = lead

    def cast(self, params: Any, probe_ids: Sequence[int]) -> tuple[Any, list[int], np.ndarray]:
        """Return the params as servers get them, each leaf's bit sum, and the probe's log-probs."""
        ids = [int(token) for token in probe_ids]
        with self._lead.all_do("cast", probe_ids=ids):
            return super().cast(params, ids)

    def write(self, folder: Path, cast: Any) -> None:
        """Write cast params to ``folder``."""
        with self._lead.all_do("write", folder=self._lead.inside(folder)):
            super().write(folder, cast)


@contextlib.asynccontextmanager
async def ticking(lead: Lead | None) -> AsyncIterator[None]:
    """While the block runs, tell the others that process 0 lives, and cancel it when told to stop.

    Raises:
        PeerError: another process has failed or died; the block was cancelled.
    """
    owner = asyncio.current_task()
    if lead is None or owner is None:
        yield
        return
    failures: list[PeerError] = []

    async def watch() -> None:
        if failure := await _until_stop(lead):
            failures.append(failure)
        owner.cancel()
        while not failures:  # the block ends orderly, and the others still wait for its end
            await asyncio.sleep(_TICK_S)
            with contextlib.suppress(PeerError):
                lead.tick()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if failures:
            owner.uncancel()
            raise failures[0] from None
        raise
    finally:
        watcher.cancel()


async def _until_stop(lead: Lead) -> PeerError | None:
    """Tick until a process was told to stop and the step is whole; return what went wrong."""
    told = 0.0
    while True:
        await asyncio.sleep(_TICK_S)
        try:
            stop = lead.tick()
        except PeerError as error:
            return error
        told = told or (time.monotonic() if stop else 0.0)
        half = lead.begun and not lead.settled
        if told and not (half and time.monotonic() < told + _REST_S):
            lead.close()
            return None


def check_together(config: RunConfig) -> None:
    """Refuse what one process can train and several cannot yet.

    Raises:
        ConfigError: names the key.
    """
    alone = {
        "objective.kl_coef": config.objective.kl_coef,
        "learner.lora_rank": config.learner.lora_rank,
        "model.checkpoint": config.model.checkpoint,
    }
    for key, value in alone.items():
        if value:
            raise ConfigError(
                f"{key} = {value!r}: several processes train every parameter from fresh weights "
                "and without a reference; use one process for this"
            )


def check_same_config(peers: Peers, config: RunConfig) -> None:
    """Make sure that all processes were started with the same configuration.

    Raises:
        ConfigError: names a process that differs, and in which keys.
    """
    configs = peers.gather("compare configurations", flatten_config(config))
    for index, other in enumerate(configs):
        if changed := diff_config(configs[0], other):
            lines = [f"  {key}: {a!r} -> {b!r}" for key, (a, b) in changed.items()]
            raise ConfigError(
                f"process {index} was started with another configuration than process 0:\n"
                + "\n".join(lines)
            )
