"""What a step costs: floating point operations, bytes over the links, and the longer of the two.

    compute seconds   model FLOPs / (chips x peak x MFU)       for MFU 40, 50 and 60 %
    link seconds      bytes a chip sends / published rate of its links
    step seconds      max of both: as if all transfers hid behind compute

The link rate is that of all ports together, so the link time is a lower bound: a ring along one
axis of a slice, or a slice too small to wrap around, has fewer ports. A row counts as one segment
of its full length: the most that attention can cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.learner.flops import layer_matmul_params, step_flops
from skyrl_jax.plan.chips import Topology

MFUS = (0.4, 0.5, 0.6)
TYPICAL_MFU = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step. ``compute_s`` and ``step_s``: by MFU."""

    compute_s: Mapping[float, float]
    link_s: float
    step_s: Mapping[float, float]

    def binds(self, mfu: float) -> str:
        """Return which of the two is the longer at an MFU: "compute" or "links"."""
        return "links" if self.link_s > self.compute_s[mfu] else "compute"


def step_time(flops: float, sent_per_chip: float, topology: Topology) -> StepTime:
    """Return the seconds of a step.

    Args:
        flops: model FLOPs of the step on all chips.
        sent_per_chip: bytes that one chip sends in the step.
        topology: the chips.
    """
    peak = topology.num_chips * topology.chip.peak_flops
    compute = {mfu: flops / (peak * mfu) for mfu in MFUS}
    link = sent_per_chip / topology.link_bytes_per_s
    return StepTime(
        compute_s=compute, link_s=link, step_s={mfu: max(s, link) for mfu, s in compute.items()}
    )


def model_flops(model: ModelConfig, rows: int, seq_len: int) -> float:
    """Return the FLOPs that a step over ``rows`` full rows needs."""
    return step_flops(model, [seq_len] * rows)


def hardware_flops(model: ModelConfig, rows: int, seq_len: int, remat: str) -> float:
    """Return the FLOPs that are computed, by what the backward pass computes again.

    Forward is a third of forward and backward; the logits are always computed twice. "full" runs
    the layers' forward again; "dots" keeps the projections, and runs the attention again;
    "attn_out" keeps what the attention gave, and runs the projections again and the scores (half
    of the attention's forward). These are the plain attention's; a fused kernel computes the
    scores once more in any case.

    Args:
        model: the model's shape.
        rows: full rows of the step.
        seq_len: tokens of a row.
        remat: the policy (models/decoder.py).
    """
    tokens = rows * seq_len
    layers = 6.0 * layer_matmul_params(model) * tokens
    head = 2.0 * model.hidden_size * model.vocab_size * tokens
    attention = model_flops(model, rows, seq_len) - layers - 3 * head
    again = {"none": (0.0, 0.0), "dots": (0.0, 1.0), "attn_out": (1.0, 0.5), "full": (1.0, 1.0)}
    projections, scores = again[remat]
    return layers * (1 + projections / 3) + attention * (1 + scores / 3) + 4 * head
