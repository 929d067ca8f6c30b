"""A run over several processes, as all but process 0 see it: do what process 0 does, in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from skyrl_jax.core.config import RunConfig
from skyrl_jax.learner.distributed import ProcessGroup
from skyrl_jax.sync.publish import Publisher
from skyrl_jax.train.exchange import read_batches
from skyrl_jax.train.policy import Policy
from skyrl_jax.train.trainable import check_trainable
from skyrl_jax.weights.store import FolderStore

Message = Mapping[str, Any]


class Follower:
    """The parts of the policy and the publisher that lie on this process. A context manager.

    Args:
        policy: this process's policy, not yet open.
        make_publisher: makes this process's publisher; called when process 0 opens the policy.
        workdir: the run folder, as this process sees it.
    """

    def __init__(
        self, policy: Policy, make_publisher: Callable[[], Publisher], workdir: Path
    ) -> None:
        """Remember the arguments."""
        self._policy = policy
        self._make_publisher = make_publisher
        self._workdir = workdir
        self._stack = ExitStack()
        self._publisher: Publisher | None = None
        self._cast: Any = None
        self._doing: dict[str, Callable[[Message], object]] = {
            "open": self._open,
            "restore": lambda message: policy.restore(),
            "start_sft": lambda message: policy.start_sft(),
            "start_rl": lambda message: policy.start_rl(),
            "sft_update": lambda message: policy.sft_update(*self._batches(message)),
            "update": lambda message: policy.update(self._batches(message)),
            "save": lambda message: policy.save(message["step"], {}),  # process 0 writes the host
            "cast": self._cast_params,
            "write": self._write_params,
        }

    def __enter__(self) -> Follower:
        """Return self; process 0 says when the parts are opened."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close what was opened."""
        self._stack.__exit__(*error)

    def do(self, message: Message) -> None:
        """Do what a message of process 0 asks for."""
        self._doing[message["do"]](message)

    def _open(self, message: Message) -> None:
        self._stack.enter_context(self._policy)
        self._publisher = self._stack.enter_context(self._make_publisher())

    def _batches(self, message: Message) -> list[Any]:
        return read_batches(self._workdir / message["batches"])

    def _cast_params(self, message: Message) -> None:
        assert self._publisher is not None
        self._cast = self._publisher.cast(self._policy.params, message["probe_ids"])[0]

    def _write_params(self, message: Message) -> None:
        assert self._publisher is not None
        self._publisher.write(self._workdir / message["folder"], self._cast)
        self._cast = None


def follow(peers: ProcessGroup, follower: Follower) -> int:
    """Do what process 0 says until it ends the run; return the exit code it gives.

    Raises:
        PeerError: a process is missing, late or dead, or process 0 has sent nothing for too long.
    """
    while True:
        message = peers.receive()[1]
        peers.stop_requested()  # process 0 asks at the same point, and decides
        name = message["do"]
        if name == "end":
            return int(message["code"])
        if name != "tick":
            peers.ready(name)
            with peers.running(name):
                follower.do(message)


def make_follower(config: RunConfig, workdir: Path, peers: ProcessGroup) -> Follower:
    """Return the follower of a run.

    Raises:
        ConfigError: the configuration asks for a part that is not built yet.
    """
    check_trainable(config)

    def publisher() -> Publisher:
        store = FolderStore(workdir / "weights", keep=config.train.keep_weight_versions)
        return Publisher(config.model, store, dtype=config.learner.compute_dtype)

    return Follower(Policy(config, workdir / "checkpoints", peers), publisher, workdir)
