"""AdamW with global-norm clipping and a guard against non-finite gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from skyrl_jax.core.config import LearnerConfig


class SkipState(NamedTuple):
    """State of ``skip_nonfinite``: updates done, updates refused, and the optimizer's own state."""

    num_applied: Int[Array, ""]
    num_skipped: Int[Array, ""]
    inner: Any


def learning_rate(cfg: LearnerConfig) -> optax.Schedule:
    """Return the schedule: linear warmup over ``warmup_steps`` updates, then constant ``lr``.

    The first update already moves: update i of the warmup has lr * (i + 1) / (warmup_steps + 1).
    """
    lr, warmup = cfg.lr, cfg.warmup_steps

    def schedule(count: Any) -> Any:
        return lr * jnp.minimum(1.0, (count + 1.0) / (warmup + 1.0))

    return schedule


def make_optimizer(cfg: LearnerConfig) -> optax.GradientTransformation:
    """Return clip -> AdamW, wrapped so that a non-finite gradient changes nothing.

    Weight decay spares the norm scales. ``max_grad_norm`` 0 = no clipping.
    """
    adamw = optax.adamw(
        learning_rate(cfg),
        b1=cfg.beta1,
        b2=cfg.beta2,
        eps=1e-8,
        weight_decay=cfg.weight_decay,
        mask=_decayed,
    )
    clip = [optax.clip_by_global_norm(cfg.max_grad_norm)] if cfg.max_grad_norm else []
    return skip_nonfinite(optax.chain(*clip, adamw))


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer: where any gradient is inf or NaN, no param and no moment changes.

    One such update would put NaN into the moments and poison every later step.
    """

    def init(params: Any) -> SkipState:
        zero = jnp.zeros((), jnp.int32)
        return SkipState(zero, zero, inner.init(params))

    def update(grads: Any, state: SkipState, params: Any = None) -> tuple[Any, SkipState]:
        finite = jnp.isfinite(optax.tree.norm(grads))
        updates, after = inner.update(grads, state.inner, params)
        # x + -0.0 is x in every bit, also for x = -0.0.
        updates = jax.tree.map(lambda u: jnp.where(finite, u, -0.0), updates)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state.inner)
        applied = state.num_applied + jnp.where(finite, 1, 0)
        skipped = state.num_skipped + jnp.where(finite, 0, 1)
        return updates, SkipState(applied, skipped, kept)

    return optax.GradientTransformation(init, update)


def _decayed(params: Any) -> Any:
    def one(path: Any, _: Any) -> bool:
        name = str(path[-1].key)
        return not (name.endswith("norm") or name == "scale")

    return jax.tree_util.tree_map_with_path(one, params)
