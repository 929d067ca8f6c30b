"""HF folders: names, bitwise round trip, replacement."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import WeightsError
from skyrl_jax.models import hf
from tests.models import tiny


def model_config(**changes):
    values = dict(
        family="qwen3",
        vocab_size=37,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=20,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        max_position=64,
        checkpoint="",
    )
    return ModelConfig(**(values | changes))


def host_params(cfg, dtype=np.float32):
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), tiny.params(cfg, seed=3))


def assert_bit_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_round_trip_is_bitwise(tmp_path, tied, dtype):
    cfg = model_config(tie_embeddings=tied)
    params = host_params(cfg, dtype)
    folder = hf.save_hf(tmp_path / "model", cfg, params, files={"tokenizer.json": b"{}"})
    loaded_cfg, loaded = hf.load_hf(folder)
    assert loaded_cfg == cfg
    assert_bit_equal(params, loaded)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == np.dtype(dtype).name
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_names_and_orientation_are_those_of_qwen3(tmp_path):
    cfg = model_config()
    params = host_params(cfg)
    hf.save_hf(tmp_path / "m", cfg, params)
    tensors = load_file(str(tmp_path / "m" / "model.safetensors"))
    assert len(tensors) == 3 + 11 * cfg.num_layers
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert q.shape == (24, 16)
    assert np.array_equal(q, params["layers"]["q"][1].T)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (16, 20)
    assert tensors["lm_head.weight"].shape == (37, 16)
    norm = tensors["model.layers.0.post_attention_layernorm.weight"]
    assert np.array_equal(norm, params["layers"]["mlp_norm"][0])


def test_replaces_an_existing_folder(tmp_path):
    cfg = model_config()
    params = host_params(cfg)
    hf.save_hf(tmp_path / "m", cfg, params)
    changed = jax.tree.map(lambda x: x + 1, params)
    hf.save_hf(tmp_path / "m", cfg, changed)
    assert_bit_equal(hf.load_hf(tmp_path / "m")[1], changed)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_failed_write_leaves_the_old_folder(tmp_path):
    cfg = model_config()
    params = host_params(cfg)
    hf.save_hf(tmp_path / "m", cfg, params)
    with pytest.raises(TypeError):
        hf.save_hf(tmp_path / "m", cfg, params, files={"x": "not bytes"})
    assert_bit_equal(hf.load_hf(tmp_path / "m")[1], params)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def hf_names(*per_layer):
    def names(cfg):
        ends = ["model.embed_tokens.weight", "model.norm.weight"]
        ends += [] if cfg.tie_embeddings else ["lm_head.weight"]
        return ends + [
            f"model.layers.{i}.{name}" for i in range(cfg.num_layers) for name in per_layer
        ]

    return names


ATTENTION = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
)
DENSE = tuple(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
HF_NAMES = {
    "llama": hf_names(*ATTENTION, *DENSE),
    "qwen2": hf_names(*ATTENTION, *DENSE, *(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "qwen3": hf_names(*ATTENTION, *DENSE, *NORMS),
    "qwen3_moe": hf_names(
        *ATTENTION,
        *NORMS,
        "mlp.gate.weight",
        *(f"mlp.experts.{e}.{x}_proj.weight" for e in range(5) for x in ("gate", "up", "down")),
    ),
}


@pytest.mark.parametrize("changes", [{}, tiny.SCALING, {"tie_embeddings": True}])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_makes_the_round_trip_bitwise(tmp_path, family, changes):
    cfg = tiny.config(family, **changes)
    params = jax.tree.map(np.asarray, tiny.params(cfg))
    hf.save_hf(tmp_path / "a", cfg, params)
    again, loaded = hf.load_hf(tmp_path / "a")
    assert again == cfg
    assert_bit_equal(params, loaded)
    hf.save_hf(tmp_path / "b", again, loaded)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    # safetensors' own reader sees the names of the family, and what they hold
    tensors = load_file(str(tmp_path / "a" / "model.safetensors"))
    assert sorted(tensors) == sorted(HF_NAMES[family](cfg))
    for name, array in hf.hf_tensors(cfg, params):
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(tensors[name], array)


def test_expert_tensors_are_oriented_as_in_hf():
    cfg = tiny.config("qwen3_moe")
    params = tiny.params(cfg)
    tensors = dict(hf.hf_tensors(cfg, params))
    layers = params["layers"]
    assert tensors["model.layers.1.mlp.gate.weight"].shape == (5, 20)
    down = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert down.shape == (20, 12)
    np.testing.assert_array_equal(down, layers["expert_down"][1, 3].T)
    up = tensors["model.layers.0.mlp.experts.4.up_proj.weight"]
    np.testing.assert_array_equal(up, layers["expert_up"][0, 4].T)


def test_leaves_that_do_not_fit_are_not_written(tmp_path):
    cfg = model_config()
    params = host_params(cfg)
    for leaf, text in (
        (np.zeros((2, 3), np.float32), r"layers\.q is float32\[2, 3\].*shape \[2, 16, 24\]"),
        (np.zeros((2, 16, 24), np.float64), r"layers\.q is float64.*float32, float16, bfloat16"),
        (None, r"layers\.q is missing"),
    ):
        changed = params | {"layers": params["layers"] | {"q": leaf}}
        with pytest.raises(WeightsError, match=text):
            hf.save_hf(tmp_path / "m", cfg, changed)
    assert not list(tmp_path.iterdir())
