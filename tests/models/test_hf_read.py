"""Reading HF folders: what is wrong is named first; shards are read slice by slice."""

import json
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_jax.core.errors import WeightsError
from skyrl_jax.models import families, hf, sharding
from tests.models import tiny


def one_device(cfg):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape((1,) * 5), sharding.AXES)
    return sharding.param_shardings(cfg, mesh)


@pytest.fixture
def folder(tmp_path):
    """A qwen3 model in three files."""
    cfg = tiny.config("qwen3")
    path = hf.save_hf(tmp_path / "m", cfg, tiny.params(cfg), max_shard_bytes=16_000)
    assert len(list(path.glob("*.safetensors"))) == 3
    return path


def rewrite(folder, change):
    """Apply ``change`` to the tensors of the folder and leave them in one file."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(str(path))
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, str(folder / "model.safetensors"))


def refused(folder, text):
    """Both readers say the same, and the sharded one before it looks at any device."""
    cfg = tiny.config("qwen3")
    with pytest.raises(WeightsError, match=text):
        hf.load_hf(folder)
    with pytest.raises(WeightsError, match=text):
        hf.load_sharded(folder, cfg, shardings=None)


def test_a_cut_model_has_an_index_that_others_read(folder):
    cfg = tiny.config("qwen3")
    params = jax.tree.map(np.asarray, tiny.params(cfg))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    assert index["metadata"] == {"total_size": total}
    tensors = dict(hf.hf_tensors(cfg, params))
    assert set(index["weight_map"]) == set(tensors)
    for file in set(index["weight_map"].values()):
        held = load_file(str(folder / file))
        assert {n for n, f in index["weight_map"].items() if f == file} == set(held)
        assert sum(x.nbytes for x in held.values()) <= 16_000
        for name, array in held.items():
            np.testing.assert_array_equal(array, tensors[name])
    tiny.bit_equal(hf.load_hf(folder)[1], params)
    # a file that the index does not name is not part of the model
    save_file({"extra": np.zeros(3, np.float32)}, str(folder / "adapter.safetensors"))
    tiny.bit_equal(hf.load_hf(folder)[1], params)


def test_wrong_tensors_are_named_with_what_would_be_right(folder):
    norm = "model.norm.weight"
    rewrite(folder, lambda t: None)
    whole = load_file(str(folder / "model.safetensors"))

    def put(tensors):
        save_file(tensors, str(folder / "model.safetensors"))

    put({name: x for name, x in whole.items() if name != norm})
    refused(folder, r"lack tensor 'model\.norm\.weight' of shape \[20\]")
    put({name: x for name, x in whole.items() if name != "lm_head.weight"})
    refused(folder, r"lack tensor 'lm_head\.weight' of shape \[37, 20\].*not tied")
    put(whole | {norm: np.zeros(3, np.float32)})
    refused(folder, r"'model\.norm\.weight' has shape \[3\], the config asks for \[20\]")
    q = "model.layers.1.self_attn.q_proj.weight"
    put(whole | {q: np.zeros((20, 32), np.float32)})
    refused(folder, r"1\.self_attn\.q_proj\.weight' has shape \[20, 32\].*asks for \[32, 20\]")
    put(whole | {norm: np.zeros(20, np.int32)})
    refused(folder, r"'model\.norm\.weight' is stored as I32; known: F32, F16, BF16")
    put(whole | {"model.layers.2.mlp.up_proj.weight": np.zeros((28, 20), np.float32)})
    refused(folder, r"'model\.layers\.2\.mlp\.up_proj\.weight', which the model has not.*2 layers")
    # what old exporters leave behind, and no model reads
    put(whole | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    hf.load_hf(folder)


def test_wrong_files_are_named(folder):
    second = sorted(folder.glob("*.safetensors"))[1]
    content = second.read_bytes()
    second.write_bytes(content[:-10])
    refused(folder, rf"cannot read .*{second.name}.*copied again")
    second.write_bytes(content[:50])
    refused(folder, rf"cannot read .*{second.name}")
    second.unlink()
    refused(folder, rf"lacks file '{second.name}', which model\.safetensors\.index\.json names")
    second.write_bytes(content)
    index = folder / "model.safetensors.index.json"
    index.write_text("[]")
    refused(folder, r"cannot read .*index\.json.*weight_map")
    index.unlink()
    save_file({"model.norm.weight": np.zeros(20, np.float32)}, str(folder / "other.safetensors"))
    refused(folder, r"'model\.norm\.weight' is in model-00003-of-00003\.safetensors and in other")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    refused(folder, r"no \*\.safetensors file")


def test_layers_without_end_fill_no_memory(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    tracemalloc.start()
    with pytest.raises(WeightsError, match=r"lack tensor 'model\.layers\.2\.input_layernorm"):
        hf.load_hf(folder)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_another_models_folder_is_refused_though_its_tensors_fit(folder):
    cfg = tiny.config("qwen3", rope_theta=5e6)
    with pytest.raises(WeightsError, match=r"rope_theta 10000\.0, the model has 5000000\.0"):
        hf.load_sharded(folder, cfg, shardings=None)


def test_a_tied_model_may_hold_its_head_too(tmp_path):
    cfg = tiny.config("llama", tie_embeddings=True)
    folder = hf.save_hf(tmp_path / "m", cfg, tiny.params(cfg))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert "lm_head" not in hf.load_hf(folder)[1]


def test_mixed_dtypes_of_one_leaf_come_in_float32(folder):
    name = "model.layers.1.self_attn.q_proj.weight"
    half = ml_dtypes.bfloat16
    rewrite(folder, lambda t: t.update({name: t[name].astype(half)}))
    _, params = hf.load_hf(folder)
    wanted = np.asarray(tiny.params(tiny.config("qwen3"))["layers"]["q"])
    assert params["layers"]["q"].dtype == np.float32
    np.testing.assert_array_equal(params["layers"]["q"][0], wanted[0])
    np.testing.assert_array_equal(params["layers"]["q"][1], wanted[1].astype(half))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_device_gets_what_the_host_reads(tmp_path, family):
    cfg = tiny.config(family)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params(cfg))
    folder = hf.save_hf(tmp_path / "m", cfg, half)
    loaded = hf.load_sharded(folder, cfg, one_device(cfg))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(loaded))
    tiny.bit_equal(loaded, hf.load_hf(folder)[1])
    masters = hf.load_sharded(folder, cfg, one_device(cfg), dtype=jnp.float32)
    tiny.bit_equal(masters, jax.tree.map(lambda x: x.astype(jnp.float32), half))


def large(folder):
    """Write a random qwen3 model of 64 MB; return the writer's peak beside the params, bytes."""
    cfg = tiny.config(
        "qwen3",
        vocab_size=4096,
        hidden_size=512,
        num_layers=4,
        num_heads=8,
        head_dim=64,
        intermediate_size=1536,
    )
    rng = np.random.default_rng(0)
    params = {
        group: {n: rng.standard_normal(shape, np.float32) for n, shape in leaves.items()}
        for group, leaves in families.param_shapes(cfg).items()
    }
    tracemalloc.start()
    hf.save_hf(folder, cfg, params, max_shard_bytes=24 * 10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(x.nbytes for x in jax.tree.leaves(params)) > 64 * 10**6
    return peak


SCRIPT = """
import json, sys
import jax
import numpy as np
from skyrl_jax.core.config import MeshConfig
from skyrl_jax.models import hf, sharding

def memory(name):
    # Not getrusage: its peak begins with that of the process that started this one.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

assert jax.device_count() == 8
mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, context=1))
jax.block_until_ready(jax.device_put(np.zeros(8)))
folder, *others = sys.argv[1:]
cfg = hf.load_config(folder)
shardings = sharding.param_shardings(cfg, mesh)
before = memory("VmRSS")
params = hf.load_sharded(folder, cfg, shardings)
extra = memory("VmHWM") - before
shards = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
whole = sum(x.nbytes for x in jax.tree.leaves(params))
del params
spread = {}
for other in others:
    cfg, want = hf.load_hf(other)
    got = hf.load_sharded(other, cfg, sharding.param_shardings(cfg, mesh))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == y.tobytes()
    spread[cfg.family] = {n: str(x.sharding.spec) for n, x in got["layers"].items()}
print(json.dumps({"extra": extra, "shards": shards, "whole": whole, "spread": spread}))
"""


def test_eight_devices_get_the_same_and_the_host_holds_little_more_than_their_shards(
    tmp_path, child_env
):
    peak = large(tmp_path / "large")
    # the writer holds one tensor (8.4 MB: the embedding) beside the params
    assert peak < 10 * 10**6
    others = []
    for family in tiny.FAMILIES:
        small = tiny.config(family, tie_embeddings=family == "qwen2")
        others.append(hf.save_hf(tmp_path / family, small, tiny.params(small)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "large"), *map(str, others)],
        env=child_env | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["whole"] > 64 * 10**6
    assert out["shards"] < 2.1 * out["whole"]  # two replicas, each sharded four ways
    assert out["extra"] < out["shards"] + 40 * 10**6, out
    assert "(None, None, 'fsdp', 'tensor')" in out["spread"]["qwen3_moe"]["expert_up"]
    assert "tensor" in out["spread"]["qwen2"]["q_bias"]
