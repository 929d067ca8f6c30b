"""A llama model in a GGUF file (llama.cpp's format) -> params, and a Hugging Face folder of them.

    python -m skyrl_jax.models.gguf MODEL.gguf OUT

writes OUT with config.json, float32 safetensors, tokenizer.json and tokenizer_config.json. From
there on everything sees an HF folder, and only this step needs the package gguf (extra ``gguf``).

Beside the names, two things differ from an HF folder:

- tensors may be quantised: they become float32 here;
- the rows of q and k lie in the order of interleaved rope, which rotates channels 2 i and 2 i + 1
  of a head together, where HF and this decoder rotate i and i + K/2: row 2 i + j of a head is row
  i + j K/2 here (K head dim, j is 0 or 1).

Source: the GGUF specification of ggml (keys, tensor names, dimensions).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import ConfigError, SkyrlError, WeightsError
from skyrl_jax.models.families import check_config, param_shapes
from skyrl_jax.models.gguf_file import GgufFile
from skyrl_jax.models.gguf_tokenizer import special_ids, tokenizer_files
from skyrl_jax.models.hf import save_hf
from skyrl_jax.models.hf_tensors import HfTensor, Leaf, hf_table

# our leaf -> GGUF name; {} is the layer's number
_NAMES: dict[Leaf, str] = {
    ("embed", "embedding"): "token_embd.weight",
    ("layers", "attn_norm"): "blk.{}.attn_norm.weight",
    ("layers", "q"): "blk.{}.attn_q.weight",
    ("layers", "k"): "blk.{}.attn_k.weight",
    ("layers", "v"): "blk.{}.attn_v.weight",
    ("layers", "o"): "blk.{}.attn_output.weight",
    ("layers", "mlp_norm"): "blk.{}.ffn_norm.weight",
    ("layers", "gate"): "blk.{}.ffn_gate.weight",
    ("layers", "up"): "blk.{}.ffn_up.weight",
    ("layers", "down"): "blk.{}.ffn_down.weight",
    ("final_norm", "scale"): "output_norm.weight",
    ("lm_head", "kernel"): "output.weight",
}
# our ModelConfig field -> key behind "llama."
_SIZES: dict[str, str] = {
    "hidden_size": "embedding_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position": "context_length",
}
# Keys behind "llama." that change what is computed, and the one value that this decoder computes.
_ONLY: dict[str, Any] = {"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0}
_KNOWN = {
    *_SIZES.values(),
    *_ONLY,
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
}


def read_gguf(path: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """Return (ModelConfig, numpy params in float32) of a llama GGUF file.

    Raises:
        WeightsError: the file cannot be read, lacks a key or tensor, has one that the model has
            not, or stores a tensor in a way that is not read; names it.
        ConfigError: it holds a model that this decoder does not compute.
    """
    file = GgufFile(path)
    config = _config(file)
    return config, _params(file, config)


def convert(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the model and tokenizer of a GGUF file as an HF folder; a folder ``out`` is replaced.

    Raises:
        WeightsError: as ``read_gguf``.
        ConfigError: as ``read_gguf``, or the tokenizer is of a kind that is not read.
    """
    file = GgufFile(path)
    config = _config(file)
    files = tokenizer_files(file, config.max_position)
    ids = special_ids(file)
    return save_hf(out, config, _params(file, config), extra_config=ids, files=files)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a file; 0 when the folder was written, 1 when an error was printed."""
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_jax.models.gguf",
        description="Write the llama model in a GGUF file as a Hugging Face folder.",
    )
    parser.add_argument("file", help="a .gguf file")
    parser.add_argument("out", help="the folder to make; one that exists is replaced")
    options = parser.parse_args(argv)
    try:
        print(convert(options.file, options.out))
    except SkyrlError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.value("general.architecture", str)
    if architecture != "llama":
        raise ConfigError(
            f"{file.path} holds a model of architecture {architecture!r}; known: llama"
        )
    _refuse_unknown_features(file)
    sizes = {ours: file.value(f"llama.{key}", int) for ours, key in _SIZES.items()}
    kv_heads = file.value("llama.attention.head_count_kv", int, sizes["num_heads"])
    for name, size in {**sizes, "num_kv_heads": kv_heads}.items():
        if size < 1:
            raise WeightsError(f"{file.path}: {name} must be at least 1, it is {size}")
    embedding = file.tensors.get("token_embd.weight")
    rows = None if embedding is None else int(embedding.shape[-1])  # dimensions: fastest first
    cfg = ModelConfig(
        family="llama",
        vocab_size=file.value("llama.vocab_size", int, rows),
        num_kv_heads=kv_heads,
        head_dim=_head_dim(file, sizes),
        rope_theta=file.value("llama.rope.freq_base", float, 10000.0),
        rms_norm_eps=file.value("llama.attention.layer_norm_rms_epsilon", float),
        tie_embeddings="output.weight" not in file.tensors,
        checkpoint="",
        **sizes,
    )
    check_config(cfg)
    return cfg


def _refuse_unknown_features(file: GgufFile) -> None:
    for key, only in _ONLY.items():
        found = file.value(f"llama.{key}", type(only), only)
        if found != only:
            raise ConfigError(
                f"{file.path} sets llama.{key} to {found!r}; this decoder computes {only!r} alone"
            )
    ours = (key.removeprefix("llama.") for key in file.fields if key.startswith("llama."))
    for key in ours:
        if key not in _KNOWN:
            raise ConfigError(f"{file.path} sets llama.{key}, which this decoder does not compute")


def _head_dim(file: GgufFile, sizes: dict[str, int]) -> int:
    width, heads = sizes["hidden_size"], sizes["num_heads"]
    head_dim: int = file.value("llama.attention.key_length", int, width // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        found = file.value(key, int, head_dim)
        if found != head_dim:
            raise ConfigError(
                f"{file.path} sets {key} to {found}; this decoder computes the size of its key "
                f"heads, {head_dim}, alone"
            )
    return head_dim


def _params(file: GgufFile, cfg: ModelConfig) -> dict[str, Any]:
    _check_tensors(file, hf_table(cfg))
    params = {
        group: {name: np.empty(shape, np.float32) for name, shape in leaves.items()}
        for group, leaves in param_shapes(cfg).items()
    }
    for tensor in hf_table(cfg):
        group, name = tensor.leaf
        array = _dequantised(file, _name(tensor)).reshape(tensor.shape)
        if name in ("q", "k"):
            array = _half_split(array, cfg.head_dim)
        params[group][name][tensor.index] = array.T if tensor.transposed else array
    return params


def _name(tensor: HfTensor) -> str:
    return _NAMES[tensor.leaf].format(*tensor.index)


def _check_tensors(file: GgufFile, table: Iterable[HfTensor]) -> None:
    left = set(file.tensors)
    for tensor in table:
        name = _name(tensor)
        if name not in left:
            raise WeightsError(
                f"{file.path}: the file lacks tensor {name!r} of shape {list(tensor.shape)}"
            )
        left.discard(name)
        shape = tuple(int(n) for n in reversed(file.tensors[name].shape))
        if shape != tensor.shape:
            raise WeightsError(
                f"{file.path}: tensor {name!r} has shape {list(shape)}, its keys ask for "
                f"{list(tensor.shape)}"
            )
    if "rope_freqs.weight" in left:
        raise ConfigError(
            f"{file.path} holds tensor 'rope_freqs.weight', a table of scaled rope frequencies, "
            "which is not read here: use the HF folder of this model"
        )
    if left:
        raise WeightsError(
            f"{file.path}: the file holds tensor {min(left)!r}, which a llama model has not"
        )


def _dequantised(file: GgufFile, name: str) -> np.ndarray:
    """Return a tensor in float32, in the order of the file."""
    from gguf.quants import dequantize

    tensor = file.tensors[name]
    try:
        values: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise WeightsError(
            f"{file.path}: tensor {name!r} is stored as {tensor.tensor_type.name}, which is not "
            "read; known: F32, F16, BF16 and the block-quantised kinds that the package gguf "
            "dequantises (Q8_0, Q4_1, Q6_K, ...)"
        ) from error
    return values


def _half_split(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the rows [H K, D] of q or k in the order of half-split rope."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    sys.exit(main())
