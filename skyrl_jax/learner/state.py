"""The whole state of a learner, and Batch as a pytree."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from skyrl_jax.core.config import LearnerConfig, ModelConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.optimizer import make_optimizer
from skyrl_jax.models.decoder import abstract_params, init_params
from skyrl_jax.models.sharding import param_shardings, spec

Params = Any

HOST_MEMORY = "pinned_host"  # jax's name for host memory that a device reads by itself

# core/ knows no jax; this is where Batch learns to enter a jitted function.
jax.tree_util.register_dataclass(
    Batch,
    data_fields=[
        "tokens",
        "segment_ids",
        "positions",
        "behavior_logprobs",
        "advantages",
        "loss_weights",
        "temperature",
        "channels",
    ],
    meta_fields=[],
)


class TrainState(NamedTuple):
    """Everything an update reads and writes. ``step`` counts optimizer updates."""

    step: Int[Array, ""]
    params: Params
    opt_state: Any


def init_state(
    model_cfg: ModelConfig,
    learner_cfg: LearnerConfig,
    key: Array,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
    """Return a fresh state, sharded over ``mesh`` where one is given."""
    shardings = None if mesh is None else param_shardings(model_cfg, mesh)
    params = init_params(model_cfg, key, shardings)
    return state_from_params(model_cfg, learner_cfg, params, mesh)


def state_from_params(
    model_cfg: ModelConfig,
    learner_cfg: LearnerConfig,
    params: Params,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
    """Return a state with given params (e.g. after a warm start) and a fresh optimizer.

    The params are copied: the train step donates its state, and the caller keeps its own tree.
    """
    check_offload(learner_cfg, mesh)
    # As host or device arrays alike: one program.
    params = jax.tree.map(jnp.asarray, params)
    if mesh is None:
        state: TrainState = _fresh(learner_cfg, params)
        return state
    shardings = state_shardings(model_cfg, learner_cfg, mesh)
    state = jax.jit(fresh_state, static_argnums=0, out_shardings=shardings)(learner_cfg, params)
    return state


def abstract_state(model_cfg: ModelConfig, learner_cfg: LearnerConfig) -> TrainState:
    """Return the state as shapes and dtypes (what a checkpoint is restored into)."""
    params = abstract_params(model_cfg)
    opt_state = jax.eval_shape(make_optimizer(learner_cfg).init, params)
    zero = jax.eval_shape(lambda: jnp.zeros((), jnp.int32))
    return TrainState(zero, params, opt_state)


def state_shardings(
    model_cfg: ModelConfig,
    learner_cfg: LearnerConfig,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> TrainState:
    """Return a sharding per leaf: moments lie where their parameters lie, counters everywhere.

    With ``learner.offload_optimizer`` the moments lie in the memory of the hosts (``pinned_host``)
    of those devices: 8 bytes per parameter less of each device's own between updates.
    """
    return shardings_like(
        param_shardings(model_cfg, mesh),
        abstract_state(model_cfg, learner_cfg),
        mesh,
        offload=learner_cfg.offload_optimizer,
    )


def shardings_like(
    params: Params,
    state: TrainState,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    offload: bool = False,
) -> TrainState:
    """Return a sharding per leaf of ``state``, from those of its params (any params pytree)."""
    by_path = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    everywhere = jax.sharding.NamedSharding(mesh, spec(mesh, (), ()))

    def one(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        near = [s for key, s in by_path.items() if leaf.ndim and name.endswith(key)]
        if near and offload and name.startswith(".opt_state"):
            return near[0].with_memory_kind(HOST_MEMORY)
        return near[0] if near else everywhere

    shardings: TrainState = jax.tree_util.tree_map_with_path(one, state)
    return shardings


def placed(shapes: Any, shardings: Any) -> Any:
    """Return shapes with a sharding each: what a checkpoint is restored into on a mesh."""
    struct: Any = jax.ShapeDtypeStruct  # not typed

    def one(leaf: Any, sharding: Any) -> Any:
        return struct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, shardings)


def check_offload(learner_cfg: LearnerConfig, mesh: jax.sharding.Mesh | None) -> None:
    """Refuse to offload the optimizer where there is nothing to offload to, or no mesh to say it.

    Raises:
        ConfigError: names the key and what would be right.
    """
    if not learner_cfg.offload_optimizer:
        return
    if mesh is None:
        raise ConfigError(
            "config key 'learner.offload_optimizer' is True, which needs a mesh: pass the one of "
            "models.sharding.make_mesh, of one device too"
        )
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        raise ConfigError(
            "config key 'learner.offload_optimizer' is True, but the devices are CPUs: their "
            "memory is the host's already; use False"
        )


def fresh_state(learner_cfg: LearnerConfig, params: Params) -> TrainState:
    """Return a state that owns an fp32 copy of ``params`` (any pytree); traceable."""
    ours = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    return TrainState(jnp.zeros((), jnp.int32), ours, make_optimizer(learner_cfg).init(ours))


@functools.partial(jax.jit, static_argnums=0)
def _fresh(learner_cfg: LearnerConfig, params: Params) -> TrainState:
    return fresh_state(learner_cfg, params)
