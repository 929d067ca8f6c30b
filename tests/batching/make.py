"""Small episodes, groups and sequences by hand."""

from __future__ import annotations

import numpy as np

from skyrl_jax.core.config import ObjectiveConfig
from skyrl_jax.core.types import (
    Completion,
    Episode,
    Score,
    Sequence,
    Status,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def turn(prompt, ids, logprobs=None, version=1) -> Turn:
    return Turn(
        prompt_ids=tuple(prompt),
        completion=Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-0.1 * i for i in ids) if logprobs is None else tuple(logprobs),
            weight_versions=(version,) * len(ids),
            finish_reason="stop",
        ),
    )


def episode(*turns, task="t", index=0, status=Status.FINISHED, reason="submit") -> Episode:
    return Episode(
        task_id=task, sample_index=index, messages=(), turns=tuple(turns), status=status,
        reason=reason, submission="x", temperature=0.7,
    )  # fmt: skip


def trajectory(reward, *turns, **options) -> Trajectory:
    """``reward`` None makes a FAILED trajectory."""
    if reward is None:
        options |= {"status": Status.FAILED, "reason": "infra:engine"}
        return Trajectory(episode=episode(*turns, **options), score=None)
    score = Score(value=reward, verdict="resolved" if reward else "unresolved")
    return Trajectory(episode=episode(*turns, **options), score=score)


def group(rewards, task="t", turns=None) -> TrajectoryGroup:
    turns = (turn([1, 2], [3, 4]),) if turns is None else turns
    members = [trajectory(r, *turns, task=task, index=i) for i, r in enumerate(rewards)]
    return TrajectoryGroup(task_id=task, trajectories=tuple(members))


def sequence(mask, rollout="t/0", start=1) -> Sequence:
    mask = np.asarray(mask, np.float32)
    return Sequence(
        rollout_id=rollout,
        token_ids=np.arange(start, start + len(mask), dtype=np.int32),
        mask=mask,
        behavior_logprobs=(-0.5 * mask).astype(np.float32),
        weight_versions=np.where(mask > 0, 4, -1).astype(np.int32),
        temperature=0.7,
    )


def objective(**changes) -> ObjectiveConfig:
    values = {
        "advantage": "grpo", "normalize_std": False, "clip_low": 0.2, "clip_high": 0.28,
        "dual_clip": 0.0, "kl_coef": 0.0, "kl_kind": "k3", "entropy_coef": 0.0,
        "reduction": "token_mean", "reduction_norm": 0.0, "permute_rewards": False,
        "masked_reasons": (),
        "zeroed_reasons": (),
    }  # fmt: skip
    return ObjectiveConfig(**{**values, **changes})
