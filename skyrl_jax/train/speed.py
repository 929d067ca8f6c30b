"""How fast the learner was: tokens a second, and what share of the devices' peak it used."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from skyrl_jax.batching.packing import segment_lengths
from skyrl_jax.core.config import ModelConfig, RunConfig
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.flops import mfu, peak_flops, step_flops


def learner_speed(
    model: ModelConfig,
    minibatches: Sequence[Batch],
    *,
    epochs: int,
    seconds: float,
    peak: float | None,
) -> dict[str, float]:
    """Return ``learner_tokens_per_s`` and, where the peak is known, ``mfu``.

        tokens per second = epochs sum(tokens of sequences) / seconds
        mfu               = epochs (model FLOPs, learner/flops.py) / (seconds peak)

    Args:
        model: its shape.
        minibatches: each was one update an epoch.
        epochs: times that each was gone through.
        seconds: wall time of these updates.
        peak: FLOP/s of all devices together, or ``None``.

    Without a mini-batch there is no figure.
    """
    if not minibatches:
        return {}
    lengths = np.concatenate([segment_lengths(batch) for batch in minibatches])
    found = {"learner_tokens_per_s": epochs * float(lengths.sum()) / seconds}
    if peak is not None:
        found["mfu"] = mfu(epochs * step_flops(model, lengths.tolist()), seconds, peak)
    return found


def devices_peak(config: RunConfig, mesh: jax.sharding.Mesh | None) -> float | None:
    """Return the FLOP/s of the learner's devices together, ``None`` where no MFU can be told.

    That is where the device's peak in the compute dtype is not known, and with LoRA, whose step
    leaves out most weight gradients that the model FLOPs count.
    """
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    one = peak_flops(devices[0].device_kind, config.learner.compute_dtype)
    return None if one is None or config.learner.lora_rank else one * len(devices)
