"""How many floating point operations a packed batch costs, and what part of the peak that is.

Per token and matmul parameter: 2 forward, 4 backward. Attention, per layer and query head of size
K, over a segment of S tokens of which each sees those up to itself (S^2 / 2 pairs): 2 K a pair for
the scores, 2 K for the mix, twice that backward. So, over all segments of a batch,

    model FLOPs     6 (N + D V) sum(S) + 12 L H K sum(S^2) / 2
    hardware FLOPs  without remat   (6 N + 8 D V) sum(S) + 12 L H K sum(S^2) / 2
                    with remat      (8 N + 8 D V) sum(S) + 16 L H K sum(S^2) / 2

N = matmul parameters of the layers that a token uses (``layer_matmul_params``), D V = those of the
output projection, tied or not (an embedding look-up costs nothing). The logits are always computed
twice (rl/logprobs.py), the layers where remat is "full"; padding is counted in neither.
MFU = model FLOPs / (seconds x peak), HFU = hardware FLOPs / (seconds x peak).

Source: PaLM (arXiv 2204.02311, appendix B), which counts no causal half; we count the pairs that
the mask keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_jax.core.config import ModelConfig

# Dense bf16 FLOP/s of one JAX device (a chip; of TPU7x half of one) by its ``device_kind``.
# Sources: Google Cloud's page of each TPU version; NVIDIA's data sheets, without sparsity.
PEAK_BF16: dict[str, float] = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def layer_matmul_params(cfg: ModelConfig) -> int:
    """Return N: parameters of all layers' projections that one token is multiplied with.

    q, k, v, o, gate, up and down; in a mixture the router and the experts a token is sent to.
    """
    heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    ffn = 3 * cfg.intermediate_size
    if cfg.num_experts:
        ffn = 3 * cfg.experts_per_token * cfg.moe_intermediate_size + cfg.num_experts
    return cfg.num_layers * cfg.hidden_size * (2 * heads + 2 * kv + ffn)


def step_flops(
    cfg: ModelConfig,
    segment_lengths: Sequence[int],
    *,
    hardware: bool = False,
    remat: bool = False,
) -> float:
    """Return the FLOPs of one forward and backward pass over packed segments.

    Args:
        cfg: the model's shape.
        segment_lengths: tokens of each segment (batching.packing.segment_lengths).
        hardware: count what is computed, not what the model needs.
        remat: the layers are computed again in the backward pass ("full"); hardware FLOPs alone.
    """
    n = layer_matmul_params(cfg)
    lengths = [int(s) for s in segment_lengths]
    tokens, pairs = sum(lengths), sum(s * s for s in lengths) / 2
    again = 4 / 3 if hardware and remat else 1.0
    head = 8 if hardware else 6
    attention = 12 * cfg.num_layers * cfg.num_heads * cfg.head_dim * pairs
    return again * (6 * n * tokens + attention) + head * cfg.hidden_size * cfg.vocab_size * tokens


def mfu(flops: float, seconds: float, peak_flops: float) -> float:
    """Return the share of the peak that was used: flops / (seconds x peak).

    Args:
        flops: of the step (``step_flops``: model FLOPs give MFU, hardware FLOPs HFU).
        seconds: wall time of the step.
        peak_flops: FLOP/s of all devices together, in the compute dtype.

    Raises:
        ValueError: no time or no peak.
    """
    if seconds <= 0 or peak_flops <= 0:
        raise ValueError(
            f"mfu needs seconds > 0 and peak_flops > 0, got {seconds:g} s and {peak_flops:g} FLOP/s"
        )
    return flops / (seconds * peak_flops)


def peak_flops(device_kind: str, compute_dtype: str) -> float | None:
    """Return the FLOP/s that one device could reach at most; ``None`` where that is not known.

    Args:
        device_kind: of a jax device.
        compute_dtype: of the matmuls; makers state the peak of fp32 ones in several meanings, so
            only "bfloat16" has one here.
    """
    return PEAK_BF16.get(device_kind) if compute_dtype == "bfloat16" else None
