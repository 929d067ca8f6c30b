"""The learner of a run: its state, its compiled steps, its checkpoints.

One program each for supervised steps, policy updates and scoring: every batch is padded to the
same number of rows, and empty trailing rows cost nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import TrainingError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.checkpoint import Checkpoints, Restored
from skyrl_jax.learner.state import (
    TrainState,
    abstract_state,
    init_state,
    state_from_params,
    state_shardings,
)
from skyrl_jax.learner.step import make_logprob_step, make_sft_step, make_train_step
from skyrl_jax.models.sharding import make_mesh


class Policy:
    """Owns the train state of a run. Use as a context manager.

    Args:
        config: the run's configuration.
        folder: where checkpoints go.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Build the steps; nothing is compiled or allocated before it is used."""
        self._config = config
        self._sft_cfg = dataclasses.replace(
            config.learner,
            lr=config.sft.lr,
            warmup_steps=config.sft.warmup_steps,
            schedule="constant",  # decay_steps counts RL updates
        )
        mesh = make_mesh(config.mesh)  # refuses axes that do not fit, on one device too
        meshed = jax.device_count() > 1 or config.learner.offload_optimizer
        self._mesh = mesh if meshed else None
        args = (config.model, config.learner)
        self._train_step = make_train_step(*args, config.objective, self._mesh)
        self._sft_step = make_sft_step(config.model, self._sft_cfg, self._mesh)
        self._logprob_step = make_logprob_step(*args, self._mesh)
        self._checkpoints = Checkpoints(folder, keep=config.train.keep_checkpoints)
        self._state: TrainState | None = None

    def __enter__(self) -> Policy:
        """Open the checkpoint folder."""
        self._checkpoints.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the checkpoint folder."""
        self._checkpoints.__exit__(kind, error, trace)

    @property
    def params(self) -> Any:
        """The params pytree of the current state."""
        return self.state.params

    @property
    def state(self) -> TrainState:
        """The current state."""
        if self._state is None:
            raise RuntimeError("Policy has no state yet: call start_sft, start_rl or restore")
        return self._state

    def start_sft(self) -> None:
        """Start from fresh params with the warm start's optimizer."""
        key = jax.random.key(self._config.seed)
        self._state = init_state(self._config.model, self._sft_cfg, key, self._mesh)

    def start_rl(self) -> None:
        """Keep the params (fresh ones where there are none); start the RL optimizer."""
        cfg = self._config
        if self._state is None:
            self.start_sft()
        self._state = state_from_params(cfg.model, cfg.learner, self.params, self._mesh)

    def sft_update(self, batch: Batch) -> dict[str, float]:
        """Take one supervised step."""
        self._state, metrics = self._sft_step(self.state, batch)
        return _floats(metrics)

    def update(self, minibatches: Sequence[Batch]) -> dict[str, float]:
        """Score the batch once, then take one optimizer update per mini-batch and epoch.

        The ratio of every update is against the log-probs of the params before the first one
        (``proximal_logprobs``), in the learner's own arithmetic.

        Returns:
            The updates' metrics averaged, how many updates were skipped as not finite, and the
            scoring's ``mismatch_*`` against the engine.

        Raises:
            TrainingError: every update of the step was skipped.
        """
        scored = [
            np.asarray(self._logprob_step(self.params, batch).logprobs) for batch in minibatches
        ]
        anchored = [
            dataclasses.replace(b, channels={**b.channels, "proximal_logprobs": logprobs})
            for b, logprobs in zip(minibatches, scored, strict=True)
        ]
        rows: list[dict[str, float]] = []
        skipped = int(self.state.opt_state.num_skipped)
        for _ in range(self._config.learner.epochs_per_batch):
            for batch in anchored:
                self._state, metrics = self._train_step(self.state, batch)
                rows.append(_floats(metrics))
        skipped = int(self.state.opt_state.num_skipped) - skipped
        if rows and skipped == len(rows):
            raise TrainingError(
                f"all {skipped} updates of this step had a gradient that is not finite and were "
                "skipped; the parameters are those before the step. Lower learner.lr, or look at "
                "the rewards and log-probs in the last rollouts file"
            )
        return _means(rows) | {"skipped_updates": float(skipped)} | mismatch(minibatches, scored)

    def save(self, step: int, host: Mapping[str, Any]) -> None:
        """Write a checkpoint of the state and the host's own values."""
        self._checkpoints.save(step, self.state, host)

    def restore(self) -> Restored | None:
        """Load the newest whole checkpoint; ``None`` where there is none."""
        template = abstract_state(self._config.model, self._config.learner)
        if self._mesh is not None:
            shardings = state_shardings(self._config.model, self._config.learner, self._mesh)
            template = jax.tree.map(_placed, template, shardings)
        restored = self._checkpoints.restore(template)
        if restored is not None:
            self._state = restored.state
        return restored


def rows_per_minibatch(config: RunConfig) -> int:
    """Return the fixed number of rows of a mini-batch: as many as episodes.

    An episode that no prompt was rewritten in is one sequence of at most ``row_length`` tokens.
    """
    rollout, learner = config.rollout, config.learner
    tasks = math.ceil(rollout.tasks_per_step / learner.updates_per_batch)
    rows = tasks * rollout.samples_per_task
    return math.ceil(rows / learner.micro_rows) * learner.micro_rows


def mismatch(batches: Sequence[Batch], scored: Sequence[np.ndarray]) -> dict[str, float]:
    """Compare the engine's log-probs with the learner's over all trained tokens, in nats.

    Where nothing was trained (no group of the step was mixed) there is nothing to compare, and no
    figure rather than a perfect one.
    """
    gaps = [
        np.abs(batch.behavior_logprobs - logprobs)[batch.loss_weights != 0]
        for batch, logprobs in zip(batches, scored, strict=True)
    ]
    gap = np.concatenate(gaps) if gaps else np.zeros(0)
    if not gap.size:
        return {}
    return {"mismatch_abs_mean": float(gap.mean()), "mismatch_abs_max": float(gap.max())}


def _placed(leaf: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = [name for name in (rows[0] if rows else {}) if name != "num_skipped_updates"]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}
