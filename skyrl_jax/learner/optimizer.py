"""AdamW with schedules, global-norm clipping and a guard against non-finite gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from skyrl_jax.core.config import LearnerConfig
from skyrl_jax.core.errors import ConfigError


class SkipState(NamedTuple):
    """State of ``skip_nonfinite``: updates done, updates refused, and the optimizer's own state."""

    num_applied: Int[Array, ""]
    num_skipped: Int[Array, ""]
    inner: Any


def learning_rate(cfg: LearnerConfig) -> optax.Schedule:
    """Return the schedule: update index (from 0) -> learning rate.

    Warm-up: update i has lr (i + 1) / (warmup_steps + 1), so the first one already moves and
    update ``warmup_steps`` is the first with the whole ``lr``. After it:

        constant  lr
        cosine    lr (m + (1 - m) (1 + cos(pi x)) / 2),  m = min_lr_fraction,
                  x = min(1, (i - warmup_steps) / (decay_steps - warmup_steps))

    ``decay_steps`` counts from the first update, warm-up included: update ``decay_steps`` and all
    after it have m lr. An update that was skipped as not finite does not count.

    Raises:
        ConfigError: another schedule, or a cosine that would end within the warm-up.

    Source: SGDR (arXiv 1608.03983, eq. 5), one period.
    """
    lr, warmup = cfg.lr, cfg.warmup_steps

    def warming(count: Any) -> Any:
        return lr * jnp.minimum(1.0, (count + 1.0) / (warmup + 1.0))

    if cfg.schedule == "constant":
        return warming
    if cfg.schedule != "cosine":
        raise ConfigError(
            f"config key 'learner.schedule' is {cfg.schedule!r}; known: constant, cosine"
        )
    if cfg.decay_steps <= warmup:
        raise ConfigError(
            f"config key 'learner.decay_steps' is {cfg.decay_steps}: the cosine ends at this "
            f"update, which must be after 'learner.warmup_steps' = {warmup}"
        )
    decay = optax.cosine_decay_schedule(lr, cfg.decay_steps - warmup, alpha=cfg.min_lr_fraction)
    return optax.join_schedules([warming, decay], [warmup])


def make_optimizer(cfg: LearnerConfig) -> optax.GradientTransformation:
    """Return clip -> AdamW, wrapped so that a non-finite gradient changes nothing.

    Weight decay spares norm scales and biases. ``max_grad_norm`` 0 = no clipping.
    ``moment_dtype`` is the dtype in which the first moment is kept between updates: bfloat16 saves
    2 bytes per parameter and rounds what is kept by up to 2^-8 of itself; the update is made
    before that. The second moment stays fp32: at beta2 near 1 its steps are smaller than a
    bfloat16 can hold.
    """
    dtypes = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    if cfg.moment_dtype not in dtypes:
        raise ConfigError(
            f"config key 'learner.moment_dtype' is {cfg.moment_dtype!r}; known: "
            + ", ".join(dtypes)
        )
    adamw = optax.adamw(
        learning_rate(cfg),
        b1=cfg.beta1,
        b2=cfg.beta2,
        eps=1e-8,
        mu_dtype=dtypes[cfg.moment_dtype],
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
        return not (name.endswith(("norm", "bias")) or name == "scale")

    return jax.tree_util.tree_map_with_path(one, params)
