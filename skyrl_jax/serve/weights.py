"""Reading a HF folder for the engine: checked against the served model before anything changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import WeightsError
from skyrl_jax.models import hf


def read_weights(folder: Path, cfg: ModelConfig) -> Any:
    """Return the fp32 params of ``folder``.

    Raises:
        WeightsError: no such folder, a corrupt file, another model's shapes, or values that are
            not finite.
    """
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder} is no HF model folder: config.json is missing")
    hf.check_same_model(cfg, folder, whose="the served model")
    return _checked(hf.load_hf(folder)[1], folder, "")


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids that config.json names (it may name none)."""
    value = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def random_params(cfg: ModelConfig) -> dict[str, Any]:
    """Return params of the right shapes, to compile and check programs before weights arrive."""
    draw = np.random.default_rng(0)

    def leaf(*shape: int) -> np.ndarray:
        return (draw.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    params: dict[str, Any] = {
        "embed": {"embedding": leaf(cfg.vocab_size, cfg.hidden_size)},
        "layers": {
            name: leaf(cfg.num_layers, *shape) for name, shape in hf.layer_shapes(cfg).items()
        },
        "final_norm": {"scale": np.ones((cfg.hidden_size,), np.float32)},
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = {"kernel": leaf(cfg.hidden_size, cfg.vocab_size)}
    return params


def _checked(node: Any, folder: Path, path: str) -> Any:
    if isinstance(node, dict):
        return {key: _checked(value, folder, f"{path}/{key}") for key, value in node.items()}
    array = np.asarray(node, np.float32)
    if not np.isfinite(array).all():
        raise WeightsError(f"{folder}: tensor {path[1:]!r} holds values that are not finite")
    return array
