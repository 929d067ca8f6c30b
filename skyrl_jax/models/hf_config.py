"""config.json of a Hugging Face folder <-> ModelConfig, for every family of models/families.py.

A key that would change what the model computes and that this decoder does not know is refused by
name: weights that load into the wrong function are worse than weights that do not load.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.models.families import FAMILIES, Family, check_config, family_of

# our ModelConfig field -> (HF config.json key, type)
_KEYS: dict[str, tuple[str, type]] = {
    "vocab_size": ("vocab_size", int),
    "hidden_size": ("hidden_size", int),
    "num_layers": ("num_hidden_layers", int),
    "num_heads": ("num_attention_heads", int),
    "num_kv_heads": ("num_key_value_heads", int),
    "intermediate_size": ("intermediate_size", int),
    "rms_norm_eps": ("rms_norm_eps", float),
    "max_position": ("max_position_embeddings", int),
}
_EXPERT_KEYS: dict[str, tuple[str, type]] = {
    "num_experts": ("num_experts", int),
    "experts_per_token": ("num_experts_per_tok", int),
    "moe_intermediate_size": ("moe_intermediate_size", int),
}
_ROPE_KEYS: dict[str, tuple[str, type]] = {
    "rope_factor": ("factor", float),
    "rope_low_freq_factor": ("low_freq_factor", float),
    "rope_high_freq_factor": ("high_freq_factor", float),
    "rope_original_position": ("original_max_position_embeddings", int),
}
# Keys that change what is computed, and the one value that this decoder computes. A key that is
# missing or null has it.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config_to_hf(cfg: ModelConfig, dtype: str = "float32", **extra: Any) -> dict[str, Any]:
    """Return the config.json of a model; ``extra`` adds keys (bos_token_id, eos_token_id, ...)."""
    family = family_of(cfg)
    values: dict[str, Any] = {hf: getattr(cfg, ours) for ours, (hf, _) in _KEYS.items()}
    values |= {
        "architectures": [family.architecture],
        "model_type": cfg.family,
        "head_dim": cfg.head_dim,
        "tie_word_embeddings": cfg.tie_embeddings,
        "rope_theta": cfg.rope_theta,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "torch_dtype": dtype,
    }
    if not family.qkv_bias:
        values["attention_bias"] = False
    if cfg.rope_factor != 1.0:
        # the older of the two spellings: releases before and after 5 read it
        scaling = {hf: getattr(cfg, ours) for ours, (hf, _) in _ROPE_KEYS.items()}
        values["rope_scaling"] = scaling | {"rope_type": "llama3"}
    if family.experts:
        values |= {hf: getattr(cfg, ours) for ours, (hf, _) in _EXPERT_KEYS.items()}
        values |= {"norm_topk_prob": cfg.norm_topk_prob}
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return values | extra


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Turn a config.json into a ModelConfig.

    Raises:
        ConfigError: another family or architecture than those known, a missing key, a value of the
            wrong type, or a feature that this code does not compute.
    """
    # what the HF classes of all families take where config.json is silent
    defaults = {"tie_word_embeddings": False, "norm_topk_prob": False}
    values = dict(values)
    family = _family(values)
    _refuse_unknown_features(values, family)
    fields: dict[str, Any] = {ours: _value(values, *key) for ours, key in _KEYS.items()}
    fields |= _rope_from_hf(values)
    if family.experts:
        # newer releases may write the name that all their expert models share
        shared = {"num_experts": values.get("num_local_experts"), **values}
        fields |= {ours: _value(shared, *key) for ours, key in _EXPERT_KEYS.items()}
        fields["norm_topk_prob"] = _value(defaults | values, "norm_topk_prob", bool)
    tied = _value(defaults | values, "tie_word_embeddings", bool)
    cfg = ModelConfig(
        family=values["model_type"],
        head_dim=_head_dim(values, family),
        tie_embeddings=tied,
        checkpoint="",
        **fields,
    )
    check_config(cfg)
    return cfg


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """Read the ModelConfig of an HF folder.

    Raises:
        WeightsError: no readable config.json there.
        ConfigError: it is not a model that this decoder computes.
    """
    path = Path(directory) / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"cannot read {path}: {error}; it must be the JSON object that describes the model"
        ) from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} must hold a JSON object, it holds a {type(values).__name__}")
    try:
        return config_from_hf(values)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None


def check_same_model(
    cfg: ModelConfig, directory: str | os.PathLike[str], *, whose: str = "the model"
) -> None:
    """Refuse a folder whose config.json describes another model than ``cfg``.

    Shapes alone do not tell: another rope_theta fits every tensor and computes nonsense.

    Raises:
        WeightsError: names every field that differs, and both values.
        ConfigError: config.json is not a model that this decoder computes.
    """
    ours, theirs = dataclasses.asdict(cfg), dataclasses.asdict(load_config(directory))
    differing = [
        f"{name} {theirs[name]!r}, {whose} has {ours[name]!r}"
        for name in ours
        if name not in ("checkpoint", "max_position") and ours[name] != theirs[name]
    ]
    if differing:
        raise WeightsError(f"{directory}/config.json has " + "; it has ".join(differing))


def _family(values: Mapping[str, Any]) -> Family:
    name, known = values.get("model_type"), ", ".join(FAMILIES)
    architectures = values.get("architectures")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"config.json has model_type {name!r} (architectures {architectures!r}); known "
            f"families: {known}"
        )
    family = FAMILIES[name]
    architectures = [family.architecture] if architectures in (None, []) else architectures
    if not isinstance(architectures, list) or family.architecture not in architectures:
        raise ConfigError(
            f"config.json has architectures {architectures!r}; of family {name!r} this decoder "
            f"computes [{family.architecture!r}] (families: {known})"
        )
    return family


def _refuse_unknown_features(values: Mapping[str, Any], family: Family) -> None:
    for key, only in _ONLY.items():
        if values.get(key) is not None and values[key] != only:
            raise ConfigError(
                f"config.json sets {key} to {values[key]!r}; this decoder computes {only!r} alone"
            )
    # in qwen2 the biases of q, k and v are no choice, and this key is not read
    if values.get("attention_bias") and not family.qkv_bias:
        raise ConfigError(
            "config.json sets attention_bias to true; in this family this decoder computes false "
            "alone"
        )
    if values.get("quantization_config"):
        raise ConfigError(
            "config.json sets quantization_config; this decoder reads float32, float16 and "
            "bfloat16 weights: use the release that is not quantized"
        )
    layers = values.get("layer_types") or []
    layers = layers if isinstance(layers, list) else [layers]
    others = [kind for kind in layers if kind != "full_attention"]
    if others:
        raise ConfigError(
            f"config.json has {others[0]!r} among its layer_types; this decoder computes "
            "'full_attention' alone"
        )


def _rope_from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_theta and the rope_* fields from both spellings.

    Older releases of transformers write rope_theta and rope_scaling {rope_type or type, factor,
    ...}; those from 5 on write rope_parameters {rope_type, rope_theta, factor, ...}.
    """
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    given = values.get(key) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"config.json key {key!r} must be an object, got {given!r}")
    theta = values.get("rope_theta", given.get("rope_theta"))
    if "rope_theta" in given and theta != given["rope_theta"]:
        raise ConfigError(
            f"config.json has rope_theta {theta!r} and {key}.rope_theta {given['rope_theta']!r}; "
            "leave one of them out"
        )
    fields: dict[str, Any] = {"rope_theta": _value({"rope_theta": theta}, "rope_theta", float)}
    kind = given.get("rope_type", given.get("type"))
    if kind == "default" or not set(given) - {"rope_theta"}:
        return fields
    if kind != "llama3":
        raise ConfigError(
            f"config.json has {key} of type {kind!r}, which this decoder does not compute; known: "
            "default, llama3"
        )
    inherited = {"original_max_position_embeddings": values.get("original_max_position_embeddings")}
    scaling = {
        ours: _value(inherited | dict(given), hf, kind, f"{key}.")
        for ours, (hf, kind) in _ROPE_KEYS.items()
    }
    # a factor of 1 scales nothing: the same model as one without scaling
    return fields | (scaling if scaling["rope_factor"] != 1.0 else {})


def _head_dim(values: Mapping[str, Any], family: Family) -> int:
    if values.get("head_dim") is not None or family.needs_head_dim:
        return _value(values, "head_dim", int)
    size, heads = (_value(values, key, int) for key in ("hidden_size", "num_attention_heads"))
    if heads < 1 or size % heads:
        raise ConfigError(
            f"config.json lacks 'head_dim', and hidden_size {size} is no multiple of "
            f"num_attention_heads {heads}"
        )
    return size // heads


def _value(values: Mapping[str, Any], key: str, kind: type, prefix: str = "") -> Any:
    value = values.get(key)
    if value is None:
        raise ConfigError(f"config.json lacks {prefix + key!r}")
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 8192.0: some tools write every number of rope_scaling as a float
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(
            f"config.json key {prefix + key!r} must be {kind.__name__}, got {value!r}"
        )
    if kind is not bool and not 0 < value < float("inf"):
        raise ConfigError(f"config.json key {prefix + key!r} must be above 0, got {value!r}")
    return value
