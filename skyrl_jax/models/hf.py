"""Params <-> a Hugging Face folder (config.json + model.safetensors), bit for bit.

Works on numpy arrays only, so a host that moves weights needs no accelerator for it. Kernels are
[in, out] here and [out, in] there; the stacked L axis here is one tensor per layer there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import ConfigError, WeightsError

# (our leaf, HF name inside model.layers.<i>, transposed)
LAYER_NAMES = (
    ("attn_norm", "input_layernorm.weight", False),
    ("q", "self_attn.q_proj.weight", True),
    ("k", "self_attn.k_proj.weight", True),
    ("v", "self_attn.v_proj.weight", True),
    ("o", "self_attn.o_proj.weight", True),
    ("q_norm", "self_attn.q_norm.weight", False),
    ("k_norm", "self_attn.k_norm.weight", False),
    ("mlp_norm", "post_attention_layernorm.weight", False),
    ("gate", "mlp.gate_proj.weight", True),
    ("up", "mlp.up_proj.weight", True),
    ("down", "mlp.down_proj.weight", True),
)
# our ModelConfig field -> HF config.json key
CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_position": "max_position_embeddings",
}


def config_to_hf(cfg: ModelConfig, dtype: str = "float32", **extra: Any) -> dict[str, Any]:
    """Return the config.json of a model; ``extra`` adds keys (bos_token_id, eos_token_id, ...)."""
    values = {hf: getattr(cfg, ours) for ours, hf in CONFIG_KEYS.items()}
    return values | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": cfg.family,
        "rope_theta": cfg.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "torch_dtype": dtype,
        **extra,
    }


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Turn a config.json into a ModelConfig.

    Raises:
        ConfigError: another family than those known, a missing key, or a feature that this code
            does not compute (attention bias, rope scaling, sliding window).
    """
    family = values.get("model_type")
    if family != "qwen3":
        raise ConfigError(f"config.json has model_type {family!r}; known families: qwen3")
    rope = values.get("rope_parameters") or {}
    scaled = values.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    for key, bad in (
        ("rope_scaling", scaled),
        ("attention_bias", values.get("attention_bias")),
        ("use_sliding_window", values.get("use_sliding_window")),
    ):
        if bad:
            raise ConfigError(f"config.json sets {key}, which this decoder does not compute")
    theta = values.get("rope_theta", rope.get("rope_theta"))
    missing = sorted(hf for hf in CONFIG_KEYS.values() if hf not in values)
    if missing or theta is None:
        raise ConfigError(f"config.json lacks {missing[0] if missing else 'rope_theta'!r}")
    fields = {ours: values[hf] for ours, hf in CONFIG_KEYS.items()}
    return ModelConfig(family=family, rope_theta=float(theta), checkpoint="", **fields)


def hf_tensors(cfg: ModelConfig, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (HF name, array) one at a time; arrays are C-contiguous copies or views."""

    def host(x: Any, transposed: bool) -> np.ndarray:
        array = np.asarray(x)
        return np.ascontiguousarray(array.T if transposed else array)

    yield "model.embed_tokens.weight", host(params["embed"]["embedding"], False)
    for i in range(cfg.num_layers):
        for ours, name, transposed in LAYER_NAMES:
            yield f"model.layers.{i}.{name}", host(params["layers"][ours][i], transposed)
    yield "model.norm.weight", host(params["final_norm"]["scale"], False)
    if not cfg.tie_embeddings:
        yield "lm_head.weight", host(params["lm_head"]["kernel"], True)


def params_to_hf(cfg: ModelConfig, params: Any) -> dict[str, np.ndarray]:
    """Return every tensor under its HF name, in the dtype of ``params``."""
    return dict(hf_tensors(cfg, params))


def params_from_hf(cfg: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the params pytree (numpy) of HF tensors, in their dtype.

    Raises:
        WeightsError: a tensor is missing, has the wrong shape, or is not one of the model's.
    """
    left = set(tensors)

    def take(name: str, transposed: bool, shape: tuple[int, ...]) -> np.ndarray:
        if name not in tensors:
            raise WeightsError(f"weights lack tensor {name!r}")
        left.discard(name)
        array = np.asarray(tensors[name])
        array = array.T if transposed else array
        if array.shape != shape:
            raise WeightsError(
                f"tensor {name!r} has shape {list(tensors[name].shape)}, the config asks for "
                f"{list(shape[::-1] if transposed else shape)}"
            )
        return array

    v, d = cfg.vocab_size, cfg.hidden_size
    params: dict[str, Any] = {
        "embed": {"embedding": take("model.embed_tokens.weight", False, (v, d)).copy()},
        "layers": {},
        "final_norm": {"scale": take("model.norm.weight", False, (d,)).copy()},
    }
    shapes = layer_shapes(cfg)
    for ours, name, transposed in LAYER_NAMES:
        parts = (
            take(f"model.layers.{i}.{name}", transposed, shapes[ours])
            for i in range(cfg.num_layers)
        )
        params["layers"][ours] = np.stack(list(parts))
    if cfg.tie_embeddings:
        left.discard("lm_head.weight")  # some exporters write the tied copy too
    else:
        kernel = take("lm_head.weight", True, (d, v))
        params["lm_head"] = {"kernel": np.ascontiguousarray(kernel)}
    if left:
        raise WeightsError(f"weights hold tensor {sorted(left)[0]!r}, which the model has not")
    return params


def layer_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf of one layer."""
    d, f, k = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    heads, kv = cfg.num_heads * k, cfg.num_kv_heads * k
    return {
        "attn_norm": (d,),
        "q": (d, heads),
        "k": (d, kv),
        "v": (d, kv),
        "o": (heads, d),
        "q_norm": (k,),
        "k_norm": (k,),
        "mlp_norm": (d,),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }


def save_hf(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    params: Any,
    *,
    extra_config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write an HF folder; it appears under its name only when complete.

    Args:
        directory: the folder to make; one that exists is replaced.
        cfg: the model's shape.
        params: the params pytree (numpy or jax, fp32 or bf16).
        extra_config: further config.json keys (bos_token_id, eos_token_id, ...).
        files: further files by name, e.g. ``{"tokenizer.json": ...}``.
    """
    from safetensors.numpy import save_file

    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = params_to_hf(cfg, params)
    dtype = tensors["model.norm.weight"].dtype.name
    config = config_to_hf(cfg, dtype, **(extra_config or {}))
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        save_file(tensors, str(temporary / "model.safetensors"), metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
        for name, content in (files or {}).items():
            (temporary / name).write_bytes(content)
        for path in temporary.iterdir():
            _sync(path)
        temporary.chmod(0o755)
        _replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """Read the ModelConfig of an HF folder.

    Raises:
        WeightsError: no readable config.json there.
    """
    path = Path(directory) / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} must hold a JSON object, it holds a {type(values).__name__}")
    return config_from_hf(values)


def load_hf(directory: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """Read (ModelConfig, numpy params) from an HF folder with one or several safetensors files.

    Raises:
        WeightsError: files are missing, unreadable or do not fit the config.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    cfg = load_config(directory)
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{directory} holds no *.safetensors file")
    tensors: dict[str, np.ndarray] = {}
    for path in files:
        try:
            tensors |= load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {path}: {error}") from error
    return cfg, params_from_hf(cfg, tensors)


def _sync(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _replace(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    # A folder that is not empty cannot be renamed over: move it aside first.
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    target.rename(aside / "old")
    temporary.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
