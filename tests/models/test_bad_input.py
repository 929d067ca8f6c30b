"""Models that cannot be loaded or spread: named, with what is right, before a device has any."""

import json

import jax
import pytest
from jax.sharding import AbstractMesh
from safetensors.numpy import load_file, save_file

from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.models import decoder, hf, sharding
from tests.models import tiny

Q = "model.layers.1.self_attn.q_proj.weight"


def without_a_tensor(folder):
    tensors = load_file(str(folder / "model.safetensors"))
    save_file({n: x for n, x in tensors.items() if n != Q}, str(folder / "model.safetensors"))


def with_a_wrong_shape(folder):
    tensors = load_file(str(folder / "model.safetensors"))
    turned = tensors | {Q: tensors[Q].T.copy()}
    save_file(turned, str(folder / "model.safetensors"))


def of_unknown_architecture(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mamba"}))


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (without_a_tensor, WeightsError, rf"lack tensor '{Q}' of shape \[32, 20\]"),
        (with_a_wrong_shape, WeightsError, rf"'{Q}' has shape \[20, 32\].*asks for \[32, 20\]"),
        (of_unknown_architecture, ConfigError, "'mamba'.*llama, qwen2, qwen3, qwen3_moe"),
        (cut_short, WeightsError, r"cannot read .*model\.safetensors.*copied again"),
    ],
)
def test_a_spoilt_folder_is_named_before_a_device_holds_anything(tmp_path, spoil, error, text):
    cfg = tiny.config("qwen3")
    folder = hf.save_hf(tmp_path / "m", cfg, tiny.params(cfg))
    mesh = AbstractMesh((1, 2, 2, 1, 1), sharding.AXES)
    shardings = sharding.param_shardings(cfg, mesh)  # no device at all: none is needed to refuse
    hf.load_hf(folder)
    spoil(folder)
    live = len(jax.live_arrays())
    with pytest.raises(error, match=text):
        hf.load_sharded(folder, cfg, shardings)
    with pytest.raises(error, match=text):
        hf.load_hf(folder)
    assert len(jax.live_arrays()) <= live


def test_a_mesh_that_does_not_divide_the_heads_is_named_before_a_device_holds_anything():
    cfg = tiny.config("qwen3", num_heads=6, num_kv_heads=2)
    mesh = AbstractMesh((1, 1, 4, 1, 1), sharding.AXES)
    live = len(jax.live_arrays())
    with pytest.raises(
        ConfigError, match=r"mesh\.tensor = 4.*num_heads = 6.*layers\.q.*divisor of 2"
    ):
        decoder.init_params(cfg, None, sharding.param_shardings(cfg, mesh))
    assert len(jax.live_arrays()) <= live
