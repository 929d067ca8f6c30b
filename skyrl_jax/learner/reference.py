"""The frozen reference policy of the KL term: its params, and its log-probs beside a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from skyrl_jax.core.config import LearnerConfig, ModelConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.state import Params, placed
from skyrl_jax.learner.step import ScoreFn, make_logprob_step
from skyrl_jax.models.decoder import abstract_params
from skyrl_jax.models.sharding import param_shardings
from skyrl_jax.rl.logprobs import TokenStats

CHANNEL = "ref_logprobs"


def reference_params(
    model_cfg: ModelConfig,
    params: Params,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
) -> Params:
    """Return a copy of ``params`` that training does not touch, sharded like the policy.

    Args:
        model_cfg: the model's shape.
        params: the policy's params at the time the reference is taken.
        dtype: "float32", or "bfloat16" for half of the memory (the KL of a policy that did not
            move is then the rounding of its weights, not 0).
        mesh: devices the policy is sharded over.

    Raises:
        ConfigError: another dtype.
    """
    kind = _dtype(dtype)

    def copied(tree: Params) -> Params:
        return jax.tree.map(lambda x: jnp.array(x, kind, copy=True), tree)

    shardings = None if mesh is None else param_shardings(model_cfg, mesh)
    return jax.jit(copied, out_shardings=shardings)(params)


def abstract_reference(
    model_cfg: ModelConfig, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> Params:
    """Return the reference as shapes and dtypes, with its shardings on a mesh.

    It is what a stored one is restored into; arguments and errors as in ``reference_params``.
    """
    struct: Any = jax.ShapeDtypeStruct  # not typed
    kind = _dtype(dtype)
    shapes = jax.tree.map(lambda x: struct(x.shape, kind), abstract_params(model_cfg))
    return shapes if mesh is None else placed(shapes, param_shardings(model_cfg, mesh))


def make_reference_channel(
    model_cfg: ModelConfig,
    learner_cfg: LearnerConfig,
    mesh: jax.sharding.Mesh | None = None,
    *,
    score_fn: ScoreFn | None = None,
    logprob_step: Callable[[Params, Batch], TokenStats] | None = None,
) -> Callable[[Batch, Params], Batch]:
    """Return ``reference_channel(batch, ref_params) -> batch`` with channel ``ref_logprobs``.

    The channel holds log p_ref(token) in fp32 nats, of the same tokens at the same temperature as
    the policy's own (learner/step.py), 0 where a token has no predecessor. Other channels stay.

    Args:
        model_cfg: the model's shape.
        learner_cfg: micro-batch and precision.
        mesh: devices to shard over, or ``None`` for one device.
        score_fn: another policy than the language model of ``model_cfg``.
        logprob_step: a scoring step that is there already, so that it is compiled once.
    """
    step = logprob_step or make_logprob_step(model_cfg, learner_cfg, mesh, score_fn=score_fn)

    def reference_channel(batch: Batch, ref_params: Params) -> Batch:
        # Channels that the batch already has would make a second program of the same scoring.
        bare = dataclasses.replace(batch, channels={})
        logprobs: Any = step(ref_params, bare).logprobs
        return dataclasses.replace(batch, channels={**batch.channels, CHANNEL: logprobs})

    return reference_channel


def _dtype(name: str) -> Any:
    dtypes = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    if name not in dtypes:
        raise ConfigError(f"reference dtype {name!r}; known: {', '.join(dtypes)}")
    return dtypes[name]
