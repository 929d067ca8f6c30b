"""Which tensor of a Hugging Face folder is which part of our params.

Kernels are [in, out] here and [out, in] there; the stacked L and E axes here are one tensor per
layer and expert there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.models.families import layer_shapes

# our leaf -> (HF name inside model.layers.<i>, transposed); {e} is an expert's number
_LAYER_NAMES: dict[str, tuple[str, bool]] = {
    "attn_norm": ("input_layernorm.weight", False),
    "q": ("self_attn.q_proj.weight", True),
    "k": ("self_attn.k_proj.weight", True),
    "v": ("self_attn.v_proj.weight", True),
    "o": ("self_attn.o_proj.weight", True),
    "q_bias": ("self_attn.q_proj.bias", False),
    "k_bias": ("self_attn.k_proj.bias", False),
    "v_bias": ("self_attn.v_proj.bias", False),
    "q_norm": ("self_attn.q_norm.weight", False),
    "k_norm": ("self_attn.k_norm.weight", False),
    "mlp_norm": ("post_attention_layernorm.weight", False),
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
    "router": ("mlp.gate.weight", True),
    "expert_gate": ("mlp.experts.{e}.gate_proj.weight", True),
    "expert_up": ("mlp.experts.{e}.up_proj.weight", True),
    "expert_down": ("mlp.experts.{e}.down_proj.weight", True),
}
# safetensors' name of a dtype -> numpy's
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
Leaf = tuple[str, str]


class HfTensor(NamedTuple):
    """One tensor of the folder: it is ``leaf[index]``, the other way round where ``transposed``.

    Worked example: layer 3's q is ("model.layers.3.self_attn.q_proj.weight", ("layers", "q"),
    (3,), True, (H K, D)), and params["layers"]["q"][3] is its transpose [D, H K].
    """

    name: str
    leaf: Leaf
    index: tuple[int, ...]
    transposed: bool
    shape: tuple[int, ...]  # in the file


def hf_table(cfg: ModelConfig) -> Iterator[HfTensor]:
    """Yield every tensor of a model, layer by layer.

    A config of a billion layers must end at the first that no file holds, not fill the memory.
    """
    v, d = cfg.vocab_size, cfg.hidden_size
    yield HfTensor("model.embed_tokens.weight", ("embed", "embedding"), (), False, (v, d))
    shapes = layer_shapes(cfg)
    for layer in range(cfg.num_layers):
        for leaf, shape in shapes.items():
            yield from _of_layer(layer, leaf, shape)
    yield HfTensor("model.norm.weight", ("final_norm", "scale"), (), False, (d,))
    if not cfg.tie_embeddings:
        yield HfTensor("lm_head.weight", ("lm_head", "kernel"), (), True, (v, d))


def _of_layer(layer: int, leaf: str, shape: tuple[int, ...]) -> Iterator[HfTensor]:
    name, transposed = _LAYER_NAMES[leaf]
    name = f"model.layers.{layer}.{name}"
    if "{e}" not in name:
        there = shape[::-1] if transposed else shape
        yield HfTensor(name, ("layers", leaf), (layer,), transposed, there)
        return
    for e in range(shape[0]):
        at = (layer, e)
        yield HfTensor(name.format(e=e), ("layers", leaf), at, transposed, shape[:0:-1])
