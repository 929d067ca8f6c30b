"""Models that cannot be loaded or spread: named, with what is right, before a device has any."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh
from safetensors.numpy import load_file, save_file

from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.models import decoder, hf, sharding
from tests.models import tiny

CFG = tiny.config("qwen3")
Q = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
CUT = r"cannot read .*/model-00002-of-00003\.safetensors: .*\(an incomplete file must be copied"


def second(folder):
    return folder / "model-00002-of-00003.safetensors"


def rewritten(change):
    """Return a spoiler that changes the tensors of the second file."""

    def spoil(folder):
        tensors = load_file(str(second(folder)))
        assert Q in tensors
        save_file(change(tensors), str(second(folder)))

    return spoil


def configured(**changes):
    """Return a spoiler that changes keys of config.json."""

    def spoil(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def filed(name, text):
    """Return a spoiler that replaces a file by a text."""
    return lambda folder: (folder / name).write_text(text)


def cut(change):
    """Return a spoiler that changes the bytes of the second file."""
    return lambda folder: second(folder).write_bytes(change(second(folder).read_bytes()))


def header_of(length):
    return cut(lambda content: length.to_bytes(8, "little") + content[8:])


def indexed(change):
    """Return a spoiler that changes the index's map from tensors to files."""

    def spoil(folder):
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def without_second(where):
    return {tensor: file for tensor, file in where.items() if "00002" not in file}


# name: (how it is spoilt, the error, its words)
CASES = {
    "tensor missing": (
        rewritten(lambda t: {n: x for n, x in t.items() if n != Q}),
        WeightsError,
        rf"lack tensor '{Q}' of shape \[32, 20\]$",
    ),
    "wrong shape": (
        rewritten(lambda t: t | {Q: t[Q].T.copy()}),
        WeightsError,
        rf"'{Q}' has shape \[20, 32\], the config asks for \[32, 20\]",
    ),
    "wrong dtype": (
        rewritten(lambda t: t | {Q: t[Q].astype("int32")}),
        WeightsError,
        rf"'{Q}' is stored as I32; known: F32, F16, BF16",
    ),
    "tensor of another layer": (
        rewritten(lambda t: t | {Q.replace("1", "7"): t[Q]}),
        WeightsError,
        r"hold tensor 'model\.layers\.7\..*', which the model has not \(family 'qwen3', 2 layers",
    ),
    "cut in the data": (cut(lambda content: content[:-100]), WeightsError, CUT),
    "cut in the header": (cut(lambda content: content[:50]), WeightsError, CUT),
    "cut in the header's length": (cut(lambda content: content[:5]), WeightsError, CUT),
    "empty file": (cut(lambda content: b""), WeightsError, CUT),
    "no safetensors at all": (cut(lambda content: b"<html>not found</html>"), WeightsError, CUT),
    "header longer than the file": (header_of(2**20), WeightsError, CUT),
    "header of an impossible length": (header_of(2**62), WeightsError, CUT),
    "header too short": (header_of(20), WeightsError, CUT),
    "header of no length": (header_of(0), WeightsError, CUT),
    "index names a missing file": (
        lambda folder: second(folder).unlink(),
        WeightsError,
        rf"lacks file 'model-00002-of-00003\.safetensors', which {INDEX} names",
    ),
    "index lacks a file": (
        indexed(without_second),
        WeightsError,
        rf"lack tensor '.*' .*\({INDEX} does not name model-00002-of-00003\.safetensors: not read",
    ),
    "index maps to numbers": (
        indexed(lambda where: dict.fromkeys(where, 2)),
        WeightsError,
        rf"cannot read .*{INDEX}.*must hold .*weight_map",
    ),
    "index maps to lists": (
        indexed(lambda where: {key: ["x"] for key in where}),
        WeightsError,
        rf"cannot read .*{INDEX}.*must hold .*weight_map",
    ),
    "index is empty": (
        indexed(lambda where: {}),
        WeightsError,
        rf"cannot read .*{INDEX}.*names no files.*must hold",
    ),
    "index is no JSON": (filed(INDEX, "{"), WeightsError, rf"cannot read .*{INDEX}.*must hold"),
    "config.json is missing": (
        lambda folder: (folder / "config.json").unlink(),
        WeightsError,
        r"cannot read .*/config\.json: .*must be the JSON object that describes the model",
    ),
    "config.json is no JSON": (
        filed("config.json", '{"model_type": '),
        WeightsError,
        r"cannot read .*/config\.json: .*must be the JSON object that describes the model",
    ),
    "config.json is a list": (
        filed("config.json", "[]"),
        WeightsError,
        r"config\.json must hold a JSON object, it holds a list",
    ),
    "unknown model_type": (
        configured(model_type="mamba"),
        ConfigError,
        r"/unknown model_type: .*'mamba'.*llama, qwen2, qwen3, qwen3_moe",
    ),
    "model_type is a list": (
        configured(model_type=["qwen3"]),
        ConfigError,
        r"\['qwen3'\].*known families: llama, qwen2, qwen3, qwen3_moe",
    ),
    "unknown architecture": (
        configured(architectures=["Qwen3ForSequenceClassification"]),
        ConfigError,
        r"'Qwen3ForSequenceClassification'.*computes \['Qwen3ForCausalLM'\]",
    ),
    "architectures is a number": (
        configured(architectures=3),
        ConfigError,
        r"architectures 3; .*computes \['Qwen3ForCausalLM'\]",
    ),
    "a size is a text": (
        configured(hidden_size="20"),
        ConfigError,
        "'hidden_size' must be int, got '20'",
    ),
    "a size is zero": (
        configured(num_key_value_heads=0),
        ConfigError,
        "'num_key_value_heads' must be above 0, got 0",
    ),
    "a number is none": (
        configured(rope_theta=float("nan")),
        ConfigError,
        "'rope_theta' must be above 0, got nan",
    ),
    "layers without end": (
        configured(num_hidden_layers=1_000_000_000),
        WeightsError,
        r"has num_layers 1000000000, .* has 2|lack tensor 'model\.layers\.2\.",
    ),
    "a file's name is too long": (
        filed(INDEX, json.dumps({"weight_map": {Q: "x" * 5000}})),
        WeightsError,
        f"lacks file 'xxx.*which {INDEX} names",
    ),
    "two angles": (
        configured(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        ConfigError,
        r"rope_theta 10000\.0 and rope_parameters\.rope_theta 500000\.0; leave one",
    ),
    "layer_types is a number": (configured(layer_types=5), ConfigError, "5 among its layer_types"),
    "heads do not divide": (
        configured(num_key_value_heads=3),
        ConfigError,
        r"'model\.num_heads' \(4\) must be a multiple of 'model\.num_kv_heads' \(3\)",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder per case, spoilt its way, and one that is not."""
    root = tmp_path_factory.mktemp("spoilt")
    made = {}
    for name in ("sound", *CASES):
        made[name] = hf.save_hf(root / name, CFG, tiny.params(CFG), max_shard_bytes=16_000)
        if name in CASES:
            CASES[name][0](made[name])
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_spoilt_folder_is_named_before_a_device_holds_anything(folders, name):
    _, error, text = CASES[name]
    mesh = AbstractMesh((1, 2, 2, 1, 1), sharding.AXES)
    shardings = sharding.param_shardings(CFG, mesh)  # no device at all: none is needed to refuse
    live = len(jax.live_arrays())
    for read in (hf.load_hf, lambda folder: hf.load_sharded(folder, CFG, shardings)):
        with pytest.raises(error, match=text) as caught:
            read(folders[name])
        assert len(str(caught.value).splitlines()) == 1
    assert len(jax.live_arrays()) <= live


START = """
import json, sys
from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import SkyrlError
from skyrl_jax.train.pretrained import check_pretrained

said = {}
model, folders = json.loads(sys.argv[1])
for name, folder in folders.items():
    try:
        check_pretrained(ModelConfig(**(model | {"checkpoint": folder})))
    except SkyrlError as error:
        said[name] = str(error)
assert not {"jax", "jaxlib"} & set(sys.modules), "no device was even looked for"
print(json.dumps(said))
"""


def test_a_run_refuses_each_before_jax_is_there(folders, child_env):
    """A backend of JAX takes most of a GPU's memory when it starts: this is before."""
    given = [dataclasses.asdict(CFG), {name: str(folder) for name, folder in folders.items()}]
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(given)],
        env=child_env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert set(said) == set(folders)
    for name, (_, _, text) in CASES.items():
        with pytest.raises(WeightsError, match=text):
            raise WeightsError(said[name])
    # what is wrong with the sound one is what comes after its weights
    assert "tokenizer.json is missing" in said["sound"]


def test_a_mesh_that_does_not_divide_the_heads_is_named_before_a_device_holds_anything():
    cfg = tiny.config("qwen3", num_heads=6, num_kv_heads=2)
    mesh = AbstractMesh((1, 1, 4, 1, 1), sharding.AXES)
    live = len(jax.live_arrays())
    with pytest.raises(
        ConfigError, match=r"mesh\.tensor = 4.*num_heads = 6.*layers\.q.*divisor of 2"
    ):
        decoder.init_params(cfg, None, sharding.param_shardings(cfg, mesh))
    assert len(jax.live_arrays()) <= live
