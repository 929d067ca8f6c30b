"""Learner side of the weight bridge: params -> a complete version folder.

The manifest says what the servers must end up with: shapes, dtypes, the sum of each leaf's bit
patterns (computed on device, inside jit), and a probe: prompt ids with the log-probs that the
learner computes from exactly these params.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.types import WeightVersion
from skyrl_jax.learner.export import bit_sum, leaf_name
from skyrl_jax.learner.spread import whole
from skyrl_jax.models import decoder
from skyrl_jax.weights.store import FolderStore


class Publisher:
    """Publish versions to a store; a context manager that owns one Orbax checkpointer.

    Args:
        cfg: the model's shape.
        store: where versions go.
        dtype: what the servers compute in; params are cast to it on device.
        tolerance: nats by which a server's probe log-probs may differ from ours.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        store: FolderStore,
        *,
        dtype: str = "float32",
        tolerance: float = 1e-3,
    ) -> None:
        self._cfg = cfg
        self._store = store
        self._dtype = dtype
        self._tolerance = tolerance
        self._facts = jax.jit(partial(_facts, cfg, dtype))
        together = jax.distributed.is_initialized()
        self._checkpointer = _checkpointer(range(jax.process_count()) if together else ())

    def __enter__(self) -> Publisher:
        """Return self."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the checkpointer."""
        self._checkpointer.close()

    def publish(self, params: Any, number: int, probe_ids: Sequence[int]) -> WeightVersion:
        """Write version ``number``; it is visible to ``latest()`` only when complete.

        Args:
            params: the learner's params pytree.
            number: the version.
            probe_ids: prompt whose log-probs a server must reproduce (2 tokens or more).
        """
        cast, sums, logprobs = self.cast(params, probe_ids)
        manifest = {
            "model": dataclasses.asdict(self._cfg),
            "leaves": {
                name: {"shape": list(leaf.shape), "dtype": leaf.dtype.name, "bit_sum": int(total)}
                for (name, leaf), total in zip(leaves(cast), sums, strict=True)
            },
            "probe": {
                "input_ids": np.asarray(probe_ids, np.int32).tolist(),
                "logprobs": logprobs.tolist(),
                "tolerance": self._tolerance,
            },
        }

        def write(folder: Path) -> None:
            self.write(folder, cast)

        return self._store.publish(number, write, manifest)

    def cast(self, params: Any, probe_ids: Sequence[int]) -> tuple[Any, list[int], np.ndarray]:
        """Return the params as servers get them, each leaf's bit sum, and the probe's log-probs.

        A device program: with several processes all call it together.
        """
        cast, sums, logprobs = self._facts(params, np.asarray(probe_ids, np.int32))
        return cast, jax.device_get(sums), whole(logprobs)

    def write(self, folder: Path, cast: Any) -> None:
        """Write cast params to ``folder``; with several processes each writes its own shards."""
        self._checkpointer.save(folder.absolute(), cast)


class Restorer:
    """Read published params back as numpy; a context manager that owns one checkpointer."""

    def __init__(self) -> None:
        together = jax.distributed.is_initialized()  # and this process reads alone
        self._checkpointer = _checkpointer([jax.process_index()] if together else ())

    def __enter__(self) -> Restorer:
        """Return self."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the checkpointer."""
        self._checkpointer.close()

    def restore(self, folder: Path, manifest: dict[str, Any]) -> Any:
        """Return the params of a version as nested dicts of numpy arrays (no device is used)."""
        target: dict[str, Any] = {}
        for name in manifest["leaves"]:
            *parents, last = name.split(".")
            node = target
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = ocp.RestoreArgs(restore_type=np.ndarray)
        return self._checkpointer.restore(folder.absolute(), restore_args=target)


def leaves(params: Any) -> list[tuple[str, Any]]:
    """Return ("layers.q", leaf) pairs in tree order."""
    flat = jax.tree_util.tree_leaves_with_path(params)
    return [(leaf_name(path), leaf) for path, leaf in flat]


def _facts(cfg: ModelConfig, dtype: str, params: Any, ids: Any) -> tuple[Any, Any, Any]:
    """Cast the params; return them, each leaf's bit sum, and the probe's log-probs."""
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    sums = [bit_sum(leaf) for leaf in jax.tree.leaves(cast)]
    rows = ids[None]
    positions = jnp.arange(ids.shape[0])[None]
    hidden = decoder.hidden_fn(cfg, cast, rows, positions, jnp.ones_like(rows))[0, :-1]
    logits = decoder.matmul(hidden, decoder.head(cfg, cast)).astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits)[jnp.arange(ids.shape[0] - 1), ids[1:]]
    return cast, sums, logprobs


def _checkpointer(members: Sequence[int]) -> Any:
    """Return a checkpointer of the processes ``members``; of the only one where there are none."""
    processes = ocp.options.MultiprocessingOptions()
    if members:
        processes = ocp.options.MultiprocessingOptions(
            primary_host=members[0], active_processes=set(members)
        )
    # one file a chunk instead of OCDBT: half the CPU time for a small model, and on a mesh each
    # host still writes its own shards
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=processes)
    return ocp.Checkpointer(handler, multiprocessing_options=processes)
