"""What tells the model families of this decoder apart: a table of facts, no branches on names.

| family    | biases of q, k, v | norms of q, k | feed-forward   | head size in config.json        |
|-----------|-------------------|---------------|----------------|---------------------------------|
| llama     | no                | no            | dense          | head_dim or hidden_size / heads |
| qwen2     | yes               | no            | dense          | head_dim or hidden_size / heads |
| qwen3     | no                | yes           | dense          | head_dim (must be there)        |
| qwen3_moe | no                | yes           | routed experts | head_dim or hidden_size / heads |

A new family is a row here, and code only for a fact that no row has yet. Shapes: D model, H query
heads, G key/value heads, K head dim, F ffn (of one expert in ``expert_*``), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import ConfigError

# Values of a model without rope scaling and of one without experts (ModelConfig's defaults).
_NO_SCALING = {
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_position": 0,
}
_NO_EXPERTS = {
    "num_experts": 0,
    "experts_per_token": 0,
    "moe_intermediate_size": 0,
    "norm_topk_prob": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts of one family; its name is ``model_type`` of config.json."""

    architecture: str  # the class name in ``architectures`` of config.json
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    needs_head_dim: bool = False  # config.json must say it: HF's default is not hidden / heads


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm=True, needs_head_dim=True),
    "qwen3_moe": Family(architecture="Qwen3MoeForCausalLM", qk_norm=True, experts=True),
}


def family_of(cfg: ModelConfig) -> Family:
    """Return the facts of a model's family.

    Raises:
        ConfigError: no such family; the message lists those known.
    """
    if cfg.family not in FAMILIES:
        raise ConfigError(
            f"config key 'model.family' is {cfg.family!r}; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[cfg.family]


def check_config(cfg: ModelConfig) -> None:
    """Refuse a model that this code does not compute.

    Raises:
        ConfigError: unknown family, sizes that do not divide, or experts or rope scaling that do
            not fit together; names the key and what would be right.
    """
    family = family_of(cfg)
    if cfg.num_heads % cfg.num_kv_heads:
        raise ConfigError(
            f"config key 'model.num_heads' ({cfg.num_heads}) must be a multiple of "
            f"'model.num_kv_heads' ({cfg.num_kv_heads})"
        )
    if cfg.head_dim % 2:
        raise ConfigError(f"config key 'model.head_dim' must be even, got {cfg.head_dim}")
    if family.experts:
        _check_experts(cfg)
    else:
        _check_unused(cfg, _NO_EXPERTS, f"family {cfg.family!r} has no experts")
    if cfg.rope_factor == 1.0:
        _check_unused(cfg, _NO_SCALING, "'model.rope_factor' 1.0 means no rope scaling")
    else:
        _check_scaling(cfg)


def layer_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf of one layer (``params["layers"]`` without its L axis)."""
    family = family_of(cfg)
    d, k = cfg.hidden_size, cfg.head_dim
    heads, kv = cfg.num_heads * k, cfg.num_kv_heads * k
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "q": (d, heads),
        "k": (d, kv),
        "v": (d, kv),
        "o": (heads, d),
    }
    if family.qkv_bias:
        shapes |= {"q_bias": (heads,), "k_bias": (kv,), "v_bias": (kv,)}
    if family.qk_norm:
        shapes |= {"q_norm": (k,), "k_norm": (k,)}
    shapes["mlp_norm"] = (d,)
    if family.experts:
        e, f = cfg.num_experts, cfg.moe_intermediate_size
        shapes |= {"router": (d, e), "expert_gate": (e, d, f), "expert_up": (e, d, f)}
        shapes["expert_down"] = (e, f, d)
    else:
        f = cfg.intermediate_size
        shapes |= {"gate": (d, f), "up": (d, f), "down": (f, d)}
    return shapes


def param_shapes(cfg: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shape of every leaf of the params pytree (what ``init_params`` makes)."""
    v, d = cfg.vocab_size, cfg.hidden_size
    layers = {name: (cfg.num_layers, *shape) for name, shape in layer_shapes(cfg).items()}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "embed": {"embedding": (v, d)},
        "layers": layers,
        "final_norm": {"scale": (d,)},
    }
    if not cfg.tie_embeddings:
        shapes["lm_head"] = {"kernel": (d, v)}
    return shapes


def _check_unused(cfg: ModelConfig, wanted: dict[str, object], why: str) -> None:
    for key, value in wanted.items():
        if getattr(cfg, key) != value:
            raise ConfigError(
                f"config key 'model.{key}' is {getattr(cfg, key)!r}, but {why}: leave it at "
                f"{value!r}"
            )


def _check_experts(cfg: ModelConfig) -> None:
    for key in ("num_experts", "moe_intermediate_size"):
        if getattr(cfg, key) < 1:
            raise ConfigError(
                f"config key 'model.{key}' must be at least 1 in family {cfg.family!r}, got "
                f"{getattr(cfg, key)}"
            )
    if not 1 <= cfg.experts_per_token <= cfg.num_experts:
        raise ConfigError(
            f"config key 'model.experts_per_token' must be from 1 to 'model.num_experts' "
            f"({cfg.num_experts}), got {cfg.experts_per_token}"
        )


def _check_scaling(cfg: ModelConfig) -> None:
    low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
    if cfg.rope_factor < 1.0 or not 0 < low < high:
        raise ConfigError(
            f"rope scaling needs 'model.rope_factor' of at least 1 ({cfg.rope_factor:g}) and "
            f"0 < 'model.rope_low_freq_factor' ({low:g}) < 'model.rope_high_freq_factor' ({high:g})"
        )
    if cfg.rope_original_position < 1:
        raise ConfigError(
            "config key 'model.rope_original_position' must be the number of positions the model "
            f"was trained on before scaling (8192 in Llama 3.1), got {cfg.rope_original_position}"
        )
