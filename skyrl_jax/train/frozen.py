"""Params that stay as they were when RL began: the base of LoRA, the reference of a KL penalty.

    WORKDIR/checkpoints/frozen/000000/

They are written once, before the first checkpoint, and only ever read after it: a policy that has
moved cannot give them back.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import CheckpointError
from skyrl_jax.learner.checkpoint import Checkpoints
from skyrl_jax.learner.reference import abstract_reference, reference_params
from skyrl_jax.learner.state import Params


class Frozen:
    """The frozen params of a run, on disk and on the devices. Use as a context manager.

    With LoRA they are its base in fp32, which is also the reference of a KL penalty; else that
    reference alone, in ``learner.reference_dtype``.

    Args:
        config: of the run.
        folder: where they lie.
        mesh: devices to shard over, or ``None`` for one device.
    """

    def __init__(self, config: RunConfig, folder: Path, mesh: jax.sharding.Mesh | None) -> None:
        """Remember the arguments; nothing is read or written yet."""
        self._config = config
        self._mesh = mesh
        self._dtype = "float32" if config.learner.lora_rank else config.learner.reference_dtype
        self._disk = Checkpoints(folder, keep=1)

    def __enter__(self) -> Frozen:
        """Open the folder."""
        self._disk.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the folder."""
        self._disk.__exit__(kind, error, trace)

    def take(self, params: Params) -> Params:
        """Copy the policy's params as they are now; return the copy when it is on disk."""
        kept = reference_params(self._config.model, params, self._dtype, self._mesh)
        self._disk.save(0, kept, {})
        return kept

    def restore(self) -> Params:
        """Return the params that were taken when RL began.

        Raises:
            CheckpointError: they are not there, damaged or of another model or dtype.
        """
        shapes = abstract_reference(self._config.model, self._dtype, self._mesh)
        found = self._disk.restore(shapes)
        if found is None:
            raise CheckpointError(
                f"{self._disk.root} does not hold the policy as it was when RL began, which "
                "objective.kl_coef and learner.lora_rank need: bring it back from a copy, or start "
                "a new --workdir with these keys set from the first step on"
            )
        return on_device(found.state)


def needs_frozen(config: RunConfig) -> bool:
    """Return whether a run reads the params of its first policy all along."""
    return bool(config.objective.kl_coef or config.learner.lora_rank)


def on_device(tree: Any) -> Any:
    """Return a tree whose numpy leaves are device arrays, so that no call moves them again."""
    return jax.tree.map(jnp.asarray, tree)
