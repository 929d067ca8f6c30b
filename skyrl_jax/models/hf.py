"""Params <-> a Hugging Face folder (config.json + safetensors), bit for bit.

Writing is here; reading is in models/hf_read.py, config.json in models/hf_config.py and the names
in models/hf_tensors.py. All of it works on numpy arrays, so a host that moves weights needs no
accelerator for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import WeightsError
from skyrl_jax.models.families import layer_shapes, param_shapes
from skyrl_jax.models.folder import whole_folder
from skyrl_jax.models.hf_config import (
    check_same_model,
    config_from_hf,
    config_to_hf,
    load_config,
)
from skyrl_jax.models.hf_read import INDEX, load_hf, load_sharded
from skyrl_jax.models.hf_tensors import DTYPES, HfTensor, hf_table

__all__ = [
    "check_same_model",
    "config_from_hf",
    "config_to_hf",
    "hf_tensors",
    "layer_shapes",
    "load_config",
    "load_hf",
    "load_sharded",
    "save_hf",
]

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def save_hf(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    params: Any,
    *,
    extra_config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write an HF folder; it appears under its name only when complete.

    One tensor is in memory at a time, beside ``params`` itself.

    Args:
        directory: the folder to make; one that exists is replaced.
        cfg: the model's shape.
        params: the params pytree (numpy or jax, fp32, fp16 or bf16).
        extra_config: further config.json keys (bos_token_id, eos_token_id, ...).
        files: further files by name, e.g. ``{"tokenizer.json": ...}``.
        max_shard_bytes: a model with more tensor bytes is cut into files of at most this many
            (a larger tensor has a file of its own) and an index.

    Raises:
        WeightsError: a leaf of ``params`` is missing or has another shape or dtype than can be
            written.
    """
    _check_params(cfg, params)
    dtype = np.dtype(params["final_norm"]["scale"].dtype).name
    config = config_to_hf(cfg, dtype, **(extra_config or {}))
    with whole_folder(directory) as folder:
        _write_weights(folder, params, _shards(hf_table(cfg), params, max_shard_bytes))
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
    return Path(directory)


def hf_tensors(cfg: ModelConfig, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (HF name, array) one at a time; arrays are C-contiguous copies or views."""
    for tensor in hf_table(cfg):
        yield tensor.name, _host(params, tensor)


def _check_params(cfg: ModelConfig, params: Any) -> None:
    for group, leaves in param_shapes(cfg).items():
        for name, shape in leaves.items():
            leaf = params.get(group, {}).get(name)
            if leaf is None or tuple(leaf.shape) != shape or np.dtype(leaf.dtype) not in _CODES:
                found = "is missing" if leaf is None else f"is {leaf.dtype}{list(leaf.shape)}"
                raise WeightsError(
                    f"leaf {group}.{name} {found}; a {cfg.family} model of this config has shape "
                    f"{list(shape)} in one of {', '.join(kind.name for kind in _CODES)}"
                )


def _host(params: Any, tensor: HfTensor) -> np.ndarray:
    """Return one tensor as it lies in the file."""
    group, name = tensor.leaf
    leaf = params[group][name]
    array = np.asarray(leaf[tensor.index] if tensor.index else leaf)
    return np.ascontiguousarray(array.T if tensor.transposed else array)


def _dtype(params: Any, tensor: HfTensor) -> np.dtype:
    return np.dtype(params[tensor.leaf[0]][tensor.leaf[1]].dtype)


def _size(params: Any, tensor: HfTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * _dtype(params, tensor).itemsize


def _shards(table: Iterable[HfTensor], params: Any, limit: int) -> list[list[HfTensor]]:
    """Cut the table into runs of at most ``limit`` bytes."""
    shards: list[list[HfTensor]] = [[]]
    filled = 0
    for tensor in table:
        size = _size(params, tensor)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _write_weights(folder: Path, params: Any, shards: Sequence[Sequence[HfTensor]]) -> None:
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", params, shards[0])
        return
    where: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, params, tensors)
        where |= {tensor.name: name for tensor in tensors}
    total = sum(_size(params, tensor) for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))


def _write_file(path: Path, params: Any, tensors: Sequence[HfTensor]) -> None:
    """Write one safetensors file: header length (8 bytes, little-endian), JSON header, tensors.

    By hand because the library's writer wants all tensors of a file in memory at once. Wider
    dtypes come first and the header is padded to 8 bytes, so that every tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: -_dtype(params, tensor).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        end = at + _size(params, tensor)
        code = _CODES[_dtype(params, tensor)]
        header[tensor.name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            handle.write(_host(params, tensor).reshape(-1).view(np.uint8).data)
