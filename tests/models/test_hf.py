"""HF folders: names, bitwise round trip, refusals."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.models import decoder, hf


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
    params = decoder.init_params(cfg, jax.random.key(3))
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), params)


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


def test_wrong_weights_are_named(tmp_path):
    cfg = model_config()
    folder = hf.save_hf(tmp_path / "m", cfg, host_params(cfg))
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    whole = dict(tensors)
    del tensors["model.norm.weight"]
    save_file(tensors, str(path))
    with pytest.raises(WeightsError, match=r"lack tensor 'model\.norm\.weight'"):
        hf.load_hf(folder)
    save_file(whole | {"model.norm.weight": np.zeros(3, np.float32)}, str(path))
    with pytest.raises(WeightsError, match=r"shape \[3\], the config asks for \[16\]"):
        hf.load_hf(folder)
    save_file(whole | {"extra": np.zeros(3, np.float32)}, str(path))
    with pytest.raises(WeightsError, match="'extra', which the model has not"):
        hf.load_hf(folder)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        hf.load_hf(folder)
    path.unlink()
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        hf.load_hf(folder)


def test_config_refusals():
    good = hf.config_to_hf(model_config())
    assert hf.config_from_hf(good) == model_config()
    newer = {k: v for k, v in good.items() if k != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    assert hf.config_from_hf(newer) == model_config()
    with pytest.raises(ConfigError, match="known families: qwen3"):
        hf.config_from_hf(good | {"model_type": "mamba"})
    with pytest.raises(ConfigError, match="rope_scaling"):
        hf.config_from_hf(good | {"rope_scaling": {"factor": 2.0}})
    with pytest.raises(ConfigError, match="attention_bias"):
        hf.config_from_hf(good | {"attention_bias": True})
    with pytest.raises(ConfigError, match="lacks 'head_dim'"):
        hf.config_from_hf({k: v for k, v in good.items() if k != "head_dim"})
    with pytest.raises(ConfigError, match=r"'model\.family' is 'llama'; known: qwen3"):
        decoder.init_params(dataclasses.replace(model_config(), family="llama"), jax.random.key(0))
    with pytest.raises(ConfigError, match="multiple of"):
        decoder.check_config(model_config(num_kv_heads=3))


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_a_config_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json must hold a JSON object"):
        hf.load_config(tmp_path)


def test_a_config_that_is_no_text_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(WeightsError, match="cannot read"):
        hf.load_config(tmp_path)
