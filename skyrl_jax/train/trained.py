"""What of the policy RL trains: every parameter, or low-rank adapters on a frozen base.

Both have the same face, so that the learner of a run need not know which it is: a state from
params, a step, the params that score a batch, and the plain params that are published. ``base`` are
the frozen params, which LoRA alone reads.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax

from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.lora import (
    abstract_lora_state,
    adapt,
    export_peft,
    lora_init,
    lora_shardings,
    lora_state,
    make_lora_step,
    merge,
)
from skyrl_jax.learner.state import (
    Params,
    TrainState,
    abstract_state,
    placed,
    state_from_params,
    state_shardings,
)
from skyrl_jax.learner.step import Metrics, make_train_step
from skyrl_jax.models.decoder import abstract_params
from skyrl_jax.models.sharding import param_shardings


class Full:
    """Every parameter is trained.

    Args:
        config: of the run.
        mesh: devices to shard over, or ``None`` for one device.
    """

    def __init__(self, config: RunConfig, mesh: jax.sharding.Mesh | None) -> None:
        self._args = (config.model, config.learner)
        self._mesh = mesh
        self._step = make_train_step(*self._args, config.objective, mesh)

    def start(self, params: Params) -> TrainState:
        """Return the state in which RL begins: a copy of ``params`` and a fresh optimizer."""
        return state_from_params(*self._args, params, self._mesh)

    def template(self) -> TrainState:
        """Return the state as shapes, placed on the mesh: what a checkpoint is restored into."""
        shapes = abstract_state(*self._args)
        if self._mesh is None:
            return shapes
        state: TrainState = placed(shapes, state_shardings(*self._args, self._mesh))
        return state

    def step(self, state: TrainState, batch: Batch, base: Params) -> tuple[TrainState, Metrics]:
        """Take one optimizer update; the old state may be donated (learner/step.py)."""
        return self._step(state, batch)

    def scoring(self, state: TrainState, base: Params) -> Params:
        """Return the policy's params as the step computes with them."""
        return state.params

    def whole(self, state: TrainState, base: Params) -> Params:
        """Return the policy's params as a plain tree."""
        return state.params


class Lora:
    """Adapters are trained, the base is not: the policy is W + alpha / rank A B.

    Args:
        config: of the run.
        mesh: devices to shard over, or ``None`` for one device.

    Raises:
        ConfigError: ``learner.lora_targets`` or ``learner.lora_rank`` do not fit the model.
    """

    def __init__(self, config: RunConfig, mesh: jax.sharding.Mesh | None) -> None:
        model, learner = config.model, config.learner
        self._learner, self._mesh, self._alpha = learner, mesh, learner.lora_alpha
        # the seed's own key makes the params
        self._key = jax.random.fold_in(jax.random.key(config.seed), 1)
        shapes = abstract_params(model)
        init = partial(lora_init, model, shapes, learner.lora_rank, learner.lora_targets)
        self._shapes = jax.eval_shape(init, self._key)
        adapters = None if mesh is None else lora_shardings(self._shapes, mesh)
        self._init = jax.jit(init, out_shardings=adapters)
        whole = None if mesh is None else param_shardings(model, mesh)
        self._merge = jax.jit(partial(merge, alpha=self._alpha), out_shardings=whole)
        self._step = make_lora_step(
            model,
            learner,
            config.objective,
            alpha=self._alpha,
            lora_shapes=self._shapes,
            mesh=mesh,
        )

    def start(self, params: Params) -> TrainState:
        """Return the state in which RL begins: adapters that add nothing yet to ``params``."""
        return lora_state(self._learner, self._init(self._key), self._mesh)

    def template(self) -> TrainState:
        """Return the state as shapes, placed on the mesh: what a checkpoint is restored into."""
        return abstract_lora_state(self._learner, self._shapes, self._mesh)

    def step(self, state: TrainState, batch: Batch, base: Params) -> tuple[TrainState, Metrics]:
        """Take one optimizer update of the adapters; the state is donated."""
        return self._step(state, batch, base)

    def scoring(self, state: TrainState, base: Params) -> Params:
        """Return the policy's params as the step computes with them: adapters beside the base."""
        return adapt(base, state.params, self._alpha)

    def whole(self, state: TrainState, base: Params) -> Params:
        """Return the policy's params as a plain tree: adapters added to the base."""
        return self._merge(base, state.params)

    def export(self, state: TrainState, folder: Path, base_model: str) -> Path:
        """Write the adapters as a PEFT folder that names ``base_model`` as its base."""
        return export_peft(folder, state.params, alpha=self._alpha, base_model=base_model)


def make_trained(config: RunConfig, mesh: jax.sharding.Mesh | None) -> Full | Lora:
    """Return what ``learner.lora_rank`` asks for."""
    return Lora(config, mesh) if config.learner.lora_rank else Full(config, mesh)
