"""The learner of a run: its state, its compiled steps, its checkpoints.

One program each for supervised steps, policy updates and scoring: every batch is padded to the
same number of rows, and empty trailing rows cost nothing.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import TrainingError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.checkpoint import Checkpoints, Restored
from skyrl_jax.learner.distributed import Peers
from skyrl_jax.learner.reference import CHANNEL, make_reference_channel
from skyrl_jax.learner.spread import feeding, whole
from skyrl_jax.learner.state import TrainState, state_from_params
from skyrl_jax.learner.step import make_logprob_step, make_sft_step
from skyrl_jax.models import hf
from skyrl_jax.models.decoder import init_params
from skyrl_jax.models.sharding import make_mesh, param_shardings
from skyrl_jax.train.frozen import Frozen, needs_frozen
from skyrl_jax.train.pretrained import load_pretrained
from skyrl_jax.train.speed import devices_peak, learner_speed
from skyrl_jax.train.trained import Lora, make_trained


class Policy:
    """Owns the train state of a run. Use as a context manager.

    It begins with ``start_sft`` (a warm start, optional) and ``start_rl``, or with ``restore``.

    Args:
        config: the run's configuration.
        folder: where checkpoints go.
        peers: the other processes of the learner, which make the same calls in the same order.

    Raises:
        ConfigError: the mesh does not fit the devices, or the adapters do not fit the model.
    """

    def __init__(self, config: RunConfig, folder: Path, peers: Peers | None = None) -> None:
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
        args = (config.model, config.learner, self._mesh)
        self._trained = make_trained(config, self._mesh)
        self._train_step = feeding(self._trained.step, self._mesh)
        self._sft_step = feeding(make_sft_step(config.model, self._sft_cfg, self._mesh), self._mesh)
        self._logprob_step = feeding(make_logprob_step(*args), self._mesh)
        self._to_reference = make_reference_channel(*args, logprob_step=self._logprob_step)
        self._peak = devices_peak(config, self._mesh)
        self._checkpoints = Checkpoints(folder, keep=config.train.keep_checkpoints, peers=peers)
        self._frozen: Frozen | None = None
        if needs_frozen(config):
            self._frozen = Frozen(config, folder / "frozen", self._mesh)
        self._open = ExitStack()
        self._warm: TrainState | None = None  # of the warm start, which trains every parameter
        self._state: TrainState | None = None  # of RL
        self._base: Any = None  # the frozen params, where the run has some

    def __enter__(self) -> Policy:
        """Open the checkpoint folders."""
        with ExitStack() as stack:
            stack.enter_context(self._checkpoints)
            if self._frozen is not None:
                stack.enter_context(self._frozen)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the checkpoint folders."""
        self._open.__exit__(kind, error, trace)

    @property
    def params(self) -> Any:
        """The policy's params as a plain tree (with LoRA: base and adapters in one)."""
        if self._warm is not None:
            return self._warm.params
        return self._trained.whole(self.state, self._base)

    @property
    def state(self) -> TrainState:
        """The current state."""
        state = self._warm if self._warm is not None else self._state
        if state is None:
            raise RuntimeError("Policy has no state yet: call start_sft, start_rl or restore")
        return state

    @property
    def frozen(self) -> Any:
        """The params as they were when RL began; ``None`` where the run does not keep them."""
        return self._base

    def start_sft(self) -> None:
        """Start from the first params with the warm start's optimizer."""
        params = self._first_params()
        self._warm = state_from_params(self._config.model, self._sft_cfg, params, self._mesh)

    def start_rl(self) -> None:
        """Keep the params (the first ones where there are none); start the RL optimizer."""
        begun = self._warm is not None or self._state is not None
        params = self.params if begun else self._first_params()
        if self._frozen is not None:
            self._base = self._frozen.take(params)
        self._state = self._trained.start(params)
        self._warm = None

    def sft_update(self, batch: Batch) -> dict[str, float]:
        """Take one supervised step."""
        self._warm, metrics = self._sft_step(self.state, batch)
        return _floats(metrics)

    def update(self, minibatches: Sequence[Batch]) -> dict[str, float]:
        """Score the batch once, then take one optimizer update per mini-batch and epoch.

        The ratio of every update is against the log-probs of the params before the first one
        (``proximal_logprobs``), in the learner's own arithmetic; a KL penalty is against the
        log-probs of the policy with which RL began (``ref_logprobs``).

        Returns:
            The updates' metrics (counts summed, others averaged), how many updates were skipped as
            not finite, the scoring's ``mismatch_*`` against the engine, and the learner's speed.

        Raises:
            TrainingError: every update of the step was skipped.
        """
        began = time.perf_counter()
        params = self._trained.scoring(self.state, self._base)
        scored = [whole(self._logprob_step(params, batch).logprobs) for batch in minibatches]
        anchored = [
            self._anchored(b, logprobs) for b, logprobs in zip(minibatches, scored, strict=True)
        ]
        marked = time.perf_counter()
        rows: list[dict[str, float]] = []
        skipped = int(self.state.opt_state.num_skipped)
        for _ in range(self._config.learner.epochs_per_batch):
            for batch in anchored:
                self._state, metrics = self._train_step(self.state, batch, self._base)
                rows.append(_floats(metrics))
        ended = time.perf_counter()
        skipped = int(self.state.opt_state.num_skipped) - skipped
        if rows and skipped == len(rows):
            raise TrainingError(
                f"all {skipped} updates of this step had a gradient that is not finite and were "
                "skipped; the parameters are those before the step. Lower learner.lr, or look at "
                "the rewards and log-probs in the last rollouts file"
            )
        speed = learner_speed(
            self._config.model,
            minibatches,
            epochs=self._config.learner.epochs_per_batch,
            seconds=ended - marked,
            peak=self._peak,
        )
        speed |= {"score_s": marked - began, "update_s": ended - marked}
        counts = {"skipped_updates": float(skipped)}
        return _joined(rows) | counts | mismatch(minibatches, scored) | speed

    def save(self, step: int, host: Mapping[str, Any]) -> None:
        """Write a checkpoint of the state and the host's own values."""
        self._checkpoints.save(step, self.state, host)

    def restore(self) -> Restored | None:
        """Load the newest whole checkpoint; ``None`` where there is none.

        Raises:
            CheckpointError: none can be used, or the frozen params that belong to it are gone.
        """
        restored = self._checkpoints.restore(self._trained.template())
        if restored is not None:
            self._state = restored.state
            if self._frozen is not None:
                self._base = self._frozen.restore()
        return restored

    def export_peft(self, folder: Path, base: Path, **extra: Any) -> None:
        """LoRA: write the adapters as a PEFT folder; nothing where every parameter is trained.

        Args:
            folder: the PEFT folder to make.
            base: the Hugging Face folder to make of the base, which the PEFT folder names. Where
                the base is ``model.checkpoint`` as it is on disk, that is named instead.
            extra: of the base's folder (``extra_config``, ``files``: models/hf.py).
        """
        if not isinstance(self._trained, Lora):
            return
        name, config = self._config.model.checkpoint, self._config
        if name and not config.sft.max_steps:
            base = Path(name)
        else:
            hf.save_hf(base, config.model, self._base, **extra)
        self._trained.export(self.state, folder, str(base.absolute()))

    def _first_params(self) -> Any:
        model = self._config.model
        shardings = None if self._mesh is None else param_shardings(model, self._mesh)
        if model.checkpoint:
            return load_pretrained(model, shardings)
        return init_params(model, jax.random.key(self._config.seed), shardings)

    def _anchored(self, batch: Batch, logprobs: np.ndarray) -> Batch:
        """Add the log-probs that an update is measured against."""
        channels = {**batch.channels, "proximal_logprobs": logprobs}
        if self._config.objective.kl_coef:
            channels[CHANNEL] = np.asarray(self._to_reference(batch, self._base).channels[CHANNEL])
        return dataclasses.replace(batch, channels=channels)


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


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}


def _joined(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum the counts of a step's updates and average everything else."""
    names = [name for name in (rows[0] if rows else {}) if name != "num_skipped_updates"]
    sums = {name: sum(row[name] for row in rows) for name in names}
    return {n: total if n.startswith("num_") else total / len(rows) for n, total in sums.items()}
