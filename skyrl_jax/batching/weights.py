"""Reductions as numbers: the loss is sum(weights * per-token loss), so these are all of it.

    token_mean          w = mask / number of trained tokens
    sequence_mean       w = mask / (rollouts * trained tokens of the rollout)
    sequence_sum_norm   w = mask / (rollouts * norm)

"rollouts" are those with a trained token. A rollout of ten rows weighs what one of one row does
(except in token_mean, where every token weighs the same). Computed in float64, stored in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import FloatArray, Sequence

REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum_norm")


def loss_weights(
    sequences: Seq[Sequence], reduction: str, *, norm: float = 0.0
) -> list[FloatArray]:
    """Return one weight array [T] per sequence of a mini-batch.

    Args:
        sequences: all rows of one optimizer update.
        reduction: one of REDUCTIONS.
        norm: the constant of sequence_sum_norm, tokens.

    Raises:
        ConfigError: unknown reduction, or sequence_sum_norm without a positive norm.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(
            f"objective.reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}"
        )
    if reduction == "sequence_sum_norm" and not norm > 0:
        raise ConfigError(f"objective.reduction_norm is {norm}; sequence_sum_norm needs > 0 tokens")
    tokens: dict[str, float] = defaultdict(float)
    for sequence in sequences:
        tokens[sequence.rollout_id] += float(sequence.mask.sum(dtype=np.float64))
    rollouts = sum(count > 0 for count in tokens.values())
    total = sum(tokens.values())

    def scale(sequence: Sequence) -> float:
        if reduction == "token_mean":
            return total
        if reduction == "sequence_mean":
            return rollouts * tokens[sequence.rollout_id]
        return rollouts * norm

    return [
        (sequence.mask.astype(np.float64) / (scale(sequence) or 1.0)).astype(np.float32)
        for sequence in sequences
    ]


def sft_weights(
    sequences: Seq[Sequence], *, prompt_loss_weight: float, last_actions: int = 0
) -> list[FloatArray]:
    """Return SFT weights [T] that sum to 1 over the batch.

    Action tokens weigh 1, prompt tokens ``prompt_loss_weight``, a segment's first token 0 (nothing
    predicts it). With ``last_actions`` n > 0 only the last n actions of a row are taught; earlier
    ones (a demonstration's wrong edit) weigh 0: neither action nor prompt.
    """
    raw = [_sft_raw(s.mask, prompt_loss_weight, last_actions) for s in sequences]
    total = sum(float(weights.sum()) for weights in raw)
    return [(weights / (total or 1.0)).astype(np.float32) for weights in raw]


def _sft_raw(
    mask: FloatArray, prompt_loss_weight: float, last_actions: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = np.where(mask > 0, 1.0, prompt_loss_weight)
    starts = np.flatnonzero(np.diff(mask, prepend=np.float32(0)) > 0)
    if last_actions and len(starts) > last_actions:
        first_kept = starts[-last_actions]
        early = (np.arange(len(mask)) < first_kept) & (mask > 0)
        weights[early] = 0.0
    weights[:1] = 0.0
    return weights
