"""The train step and the scoring step: pure, jitted, one program for any micro-batch count.

    batch [B, T] -> B / micro_rows micro-batches -> score -> sum(loss_weights * loss) -> gradients
    added in fp32 -> clip, AdamW

Every reduction is baked into ``loss_weights``, so the split changes nothing but memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from skyrl_jax.batching.packing import ROUTED
from skyrl_jax.core.config import LearnerConfig, ModelConfig, ObjectiveConfig
from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.objective import policy_loss as policy_loss  # part of this face
from skyrl_jax.learner.objective import supervised_loss as supervised_loss
from skyrl_jax.learner.optimizer import learning_rate, make_optimizer
from skyrl_jax.learner.state import Params, TrainState, check_offload, state_shardings
from skyrl_jax.models import decoder
from skyrl_jax.models.attention import check_rows_and_heads
from skyrl_jax.models.sharding import check_micro_rows, row_sharding, spec
from skyrl_jax.rl import diagnostics
from skyrl_jax.rl.diagnostics import Tally
from skyrl_jax.rl.logprobs import (
    TokenStats,
    shift_right,
    token_logprobs,
    vocab_parallel_logprobs,
)

ScoreFn = Callable[[Params, Batch], TokenStats]
Metrics = dict[str, Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_score_fn(
    model_cfg: ModelConfig,
    learner_cfg: LearnerConfig,
    mesh: jax.sharding.Mesh | None = None,
    *,
    entropy_gradient: bool = False,
) -> ScoreFn:
    """Return ``score_fn(params, batch) -> TokenStats`` of a language model.

    With a ``mesh`` that spreads the vocabulary the head stays where it is (rl/logprobs.py).
    Of a model with routed experts ``aux`` is the routers' MoeStats (models/moe.py), and a batch may
    have channel ``routed_experts``: int32 [B, T, L, k], the experts that the engine sent each token
    through, -1 where it did not say (padding; the last sampled token, which was never fed).
    """
    dtypes = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    if learner_cfg.compute_dtype not in dtypes:
        raise ConfigError(
            f"config key 'learner.compute_dtype' is {learner_cfg.compute_dtype!r}; known: "
            + ", ".join(dtypes)
        )
    if learner_cfg.remat not in ("none", *decoder.REMAT):
        raise ConfigError(
            f"config key 'learner.remat' is {learner_cfg.remat!r}; known: none, "
            + ", ".join(decoder.REMAT)
        )
    decoder.check_config(model_cfg)
    if mesh is not None:
        heads = (model_cfg.num_heads, model_cfg.num_kv_heads)
        check_rows_and_heads(*heads, learner_cfg.row_length, mesh)
        check_micro_rows(learner_cfg.micro_rows, mesh)

    def score(params: Params, batch: Batch) -> TokenStats:
        tokens = jnp.asarray(batch.tokens)
        hidden, routers = decoder.hidden_and_stats_fn(
            model_cfg,
            params,
            tokens,
            jnp.asarray(batch.positions),
            jnp.asarray(batch.segment_ids),
            dtype=dtypes[learner_cfg.compute_dtype],
            remat=learner_cfg.remat,
            experts=_replayed(model_cfg, batch),
            mesh=mesh,
        )
        logprobs, entropy = _head_logprobs(
            mesh,
            shift_right(hidden),
            decoder.head(model_cfg, params),
            tokens,
            jnp.asarray(batch.temperature),
            chunk=learner_cfg.logprob_chunk,
            entropy_gradient=entropy_gradient,
        )
        # The first token of a segment has no predecessor that may be read.
        first = jnp.asarray(batch.positions) == 0
        logprobs, entropy = (jnp.where(first, 0.0, x) for x in (logprobs, entropy))
        return TokenStats(logprobs, entropy, aux=routers)

    return score


def _replayed(model_cfg: ModelConfig, batch: Batch) -> Array | None:
    """Return channel ``routed_experts`` as [N, L, k], or ``None`` where the batch has none."""
    routed = batch.channels.get(ROUTED)
    if routed is None:
        return None
    want = (*batch.tokens.shape, model_cfg.num_layers, model_cfg.experts_per_token)
    if not model_cfg.num_experts or tuple(routed.shape) != want:
        asks = list(want) if model_cfg.num_experts else "none: it has no experts"
        raise DataError(
            f"batch channel {ROUTED!r} has shape {list(routed.shape)}; the model (family "
            f"{model_cfg.family!r}) asks for {asks}"
        )
    return jnp.asarray(routed).reshape(-1, *want[2:])


def _head_logprobs(
    mesh: jax.sharding.Mesh | None,
    hidden: Array,
    head: Array,
    tokens: Array,
    temperature: Array,
    **options: Any,
) -> tuple[Array, Array]:
    """Score [B, T] tokens with the head where it lies: spread over the vocabulary, or whole."""
    vocab = None if mesh is None else spec(mesh, ("embed", "vocab"), head.shape)
    if mesh is not None and vocab is not None and vocab[1] is not None:
        rows = spec(mesh, ("rows", "tokens"), tokens.shape)
        return vocab_parallel_logprobs(
            hidden, head, tokens, temperature, mesh=mesh, rows=rows, vocab=vocab, **options
        )
    flat = (hidden.reshape(tokens.size, -1), head, tokens.reshape(-1), temperature.reshape(-1))
    logprobs, entropy = token_logprobs(*flat, **options)
    return logprobs.reshape(tokens.shape), entropy.reshape(tokens.shape)


def make_train_step(
    model_cfg: ModelConfig,
    learner_cfg: LearnerConfig,
    objective: ObjectiveConfig | None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    score_fn: ScoreFn | None = None,
) -> TrainStep:
    """Return the jitted ``train_step(state, batch) -> (state, metrics)``.

    The state is donated where memory is dear. On a single CPU device it is not: XLA's code for it
    copies a donated state before it writes, into memory that the system hands out anew in each step
    (a tenth of a small step), so that the old state's memory is only lost.

    Args:
        model_cfg: the model's shape.
        learner_cfg: optimizer, micro-batch and precision.
        objective: the RL objective, or ``None`` for supervised fine-tuning.
        mesh: devices to shard over, or ``None`` for one device.
        score_fn: another policy than the language model of ``model_cfg``.

    Raises:
        ConfigError: settings that do not fit together, or a mesh that does not fit the model.
    """
    check_offload(learner_cfg, mesh)
    entropy_gradient = objective is not None and objective.entropy_coef != 0
    score = score_fn or make_score_fn(
        model_cfg, learner_cfg, mesh, entropy_gradient=entropy_gradient
    )
    loss_fn = policy_loss(objective) if objective is not None else supervised_loss()

    def total_loss(params: Params, micro: Batch) -> tuple[Array, Tally]:
        return loss_fn(score(params, micro), micro)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return apply_update(learner_cfg, total_loss, state, batch, mesh)

    out = None
    if mesh is not None:
        out = (state_shardings(model_cfg, learner_cfg, mesh), None)
    donated = 0 if _memory_is_dear(mesh) else ()
    return jax.jit(train_step, donate_argnums=donated, out_shardings=out)


def apply_update(
    learner_cfg: LearnerConfig,
    total_loss: Callable[[Params, Batch], tuple[Array, Tally]],
    state: TrainState,
    batch: Batch,
    mesh: jax.sharding.Mesh | None = None,
    *,
    in_place: bool = True,
) -> tuple[TrainState, Metrics]:
    """Take one optimizer update over a batch, micro-batch by micro-batch; traceable.

    Args:
        learner_cfg: optimizer and micro-batch.
        total_loss: (the state's params, micro-batch) -> (loss, tally).
        state: whatever is trained; only its ``params`` get gradients.
        batch: [B, T] arrays, B a multiple of ``micro_rows``.
        mesh: devices the rows are spread over.
        in_place: as in ``loss_and_gradients``.

    Returns:
        The next state and the metrics. Tokens: ``num_tokens`` are those of sequences (no padding),
        ``num_trained_tokens`` those in the loss; ``lr`` is that of this update.
    """
    optimizer, schedule = make_optimizer(learner_cfg), learning_rate(learner_cfg)
    loss, tally, grads = loss_and_gradients(
        total_loss, state.params, batch, learner_cfg.micro_rows, mesh, in_place=in_place
    )
    grad_norm = optax.tree.norm(grads)
    moments = state.opt_state
    if learner_cfg.offload_optimizer:
        moments = jax.device_put(moments, jax.memory.Space.Device)
    updates, opt_state = optimizer.update(grads, moments, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = diagnostics.finish(tally) | {
        "num_tokens": jnp.sum(jnp.asarray(batch.segment_ids) != 0),
        "loss": loss,
        "grad_norm": grad_norm,
        "update_norm": optax.tree.norm(updates),
        "lr": schedule(state.opt_state.num_applied),
        "num_skipped_updates": opt_state.num_skipped,
    }
    return TrainState(state.step + 1, params, opt_state), metrics


def loss_and_gradients(
    total_loss: Callable[[Params, Batch], tuple[Array, Tally]],
    params: Params,
    batch: Batch,
    micro_rows: int,
    mesh: jax.sharding.Mesh | None = None,
    *,
    in_place: bool = True,
) -> tuple[Array, Tally, Params]:
    """Return (loss, tally, fp32 gradients), summed over the micro-batches; traceable.

    Args:
        total_loss: (params, micro-batch) -> (loss, tally).
        params: what is trained.
        batch: [B, T] arrays, B a multiple of ``micro_rows``.
        micro_rows: rows of a micro-batch.
        mesh: devices the rows are spread over.
        in_place: add gradients where they arise if memory is dear; False for few parameters.
    """
    micro = _split(batch, micro_rows, mesh)
    used = _used(jnp.any(micro.loss_weights != 0, axis=(1, 2)))
    accumulate = _accumulate_in_place if in_place and _memory_is_dear(mesh) else _accumulate
    return accumulate(total_loss, params, micro, used)


def make_sft_step(
    model_cfg: ModelConfig, learner_cfg: LearnerConfig, mesh: jax.sharding.Mesh | None = None
) -> TrainStep:
    """Return the train step of supervised fine-tuning: loss = sum(loss_weights * -log p)."""
    return make_train_step(model_cfg, learner_cfg, None, mesh)


def make_logprob_step(
    model_cfg: ModelConfig,
    learner_cfg: LearnerConfig,
    mesh: jax.sharding.Mesh | None = None,
    *,
    score_fn: ScoreFn | None = None,
) -> Callable[[Params, Batch], TokenStats]:
    """Return the jitted ``logprob_step(params, batch) -> TokenStats`` (log-probs and entropies)."""
    score = score_fn or make_score_fn(model_cfg, learner_cfg, mesh)

    def logprob_step(params: Params, batch: Batch) -> TokenStats:
        micro = _split(batch, learner_cfg.micro_rows, mesh)
        zeros = jnp.zeros(micro.tokens.shape, jnp.float32)

        def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            stats = score(params, _pick(micro, i))
            return carry[0].at[i].set(stats.logprobs), carry[1].at[i].set(stats.entropy)

        used = _used(jnp.any(micro.segment_ids != 0, axis=(1, 2)))
        logprobs, entropy = jax.lax.fori_loop(0, used, body, (zeros, zeros))
        shape = batch.tokens.shape
        return TokenStats(logprobs.reshape(shape), entropy.reshape(shape))

    return jax.jit(logprob_step)


def _split(batch: Batch, micro_rows: int, mesh: jax.sharding.Mesh | None) -> Batch:
    rows = batch.tokens.shape[0]
    if rows % micro_rows:
        raise ConfigError(
            f"batch of {rows} rows cannot be split into micro-batches of 'learner.micro_rows' = "
            f"{micro_rows}; pad it to a multiple (batching.packing.pack does)"
        )

    def one(x: Any) -> Any:
        y = jnp.asarray(x).reshape(rows // micro_rows, micro_rows, *x.shape[1:])
        if mesh is None:
            return y
        constrain: Any = jax.lax.with_sharding_constraint
        return constrain(y, row_sharding(mesh, y.shape, lead=1))

    split: Batch = jax.tree.map(one, batch)
    return split


def _pick(micro: Batch, i: Array) -> Batch:
    def one(x: Array) -> Any:
        return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    picked: Batch = jax.tree.map(one, micro)
    return picked


def _used(flags: Array) -> Array:
    """Return 1 + the index of the last True (0 if none): trailing empty micro-batches cost 0."""
    return jnp.max(jnp.where(flags, jnp.arange(1, flags.size + 1), 0))


def _accumulate(
    total_loss: Callable[[Params, Batch], tuple[Array, Tally]],
    params: Params,
    micro: Batch,
    used: Array,
) -> tuple[Array, Tally, Params]:
    """Sum loss, tally and fp32 gradients over the first ``used`` micro-batches.

    Holds the sums and a micro-batch's own gradients side by side: 8 bytes a parameter.
    """
    gradient = jax.value_and_grad(total_loss, has_aux=True)

    def body(i: Array, carry: Any) -> Any:
        loss, tally, grads = carry
        (part, new_tally), new = gradient(params, _pick(micro, i))
        summed = jax.tree.map(lambda g, n: g + n.astype(jnp.float32), grads, new)
        return loss + part, diagnostics.merge(tally, new_tally), summed

    shapes = jax.eval_shape(total_loss, params, _pick(micro, jnp.zeros((), jnp.int32)))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    loss, tally, grads = jax.lax.fori_loop(0, used, body, (*zero, grads))
    return loss, tally, grads


def _accumulate_in_place(
    total_loss: Callable[[Params, Batch], tuple[Array, Tally]],
    params: Params,
    micro: Batch,
    used: Array,
) -> tuple[Array, Tally, Params]:
    """Do what ``_accumulate`` does with 4 bytes a parameter: gradients are added where they arise.

    In the backward pass each layer adds its own into the sums. XLA's CPU code for that is slower
    (a sixth of a small step), so a single CPU device does without.
    """
    sums = jax.tree.map(lambda p: jax.new_ref(jnp.zeros(p.shape, jnp.float32)), params)

    def body(i: Array, carry: tuple[Array, Tally]) -> tuple[Array, Tally]:
        loss, tally = carry
        pull: Any  # its type does not know with_refs
        part, pull, new_tally = jax.vjp(
            lambda p: total_loss(p, _pick(micro, i)), params, has_aux=True
        )
        pull.with_refs(sums)(jnp.ones_like(part))
        return loss + part, diagnostics.merge(tally, new_tally)

    shapes = jax.eval_shape(total_loss, params, _pick(micro, jnp.zeros((), jnp.int32)))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    loss, tally = jax.lax.fori_loop(0, used, body, zero)
    return loss, tally, jax.tree.map(jax.ref.freeze, sums)


def _memory_is_dear(mesh: jax.sharding.Mesh | None) -> bool:
    """Whether the step runs on anything but one CPU device."""
    if mesh is None:
        return jax.default_backend() != "cpu"
    return mesh.size > 1 or mesh.devices.flat[0].platform != "cpu"
