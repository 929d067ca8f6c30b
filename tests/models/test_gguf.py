"""GGUF files, written by PyPI gguf's own writer: bits, dequantised values, tokenizer, refusals."""

import json

import gguf as gguf_package
import numpy as np
import pytest
import tokenizers
from gguf.quants import quantize
from safetensors.numpy import load_file

from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.models import gguf, hf
from tests.models import tiny

F32, F16, Q8_0 = (gguf_package.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))
# part of the HF name -> part of the GGUF name, how it is stored here
NAMES = {
    "model.embed_tokens": ("token_embd", Q8_0),
    "model.norm": ("output_norm", F32),
    "lm_head": ("output", F16),
    "input_layernorm": ("attn_norm", F32),
    "post_attention_layernorm": ("ffn_norm", F32),
    "self_attn.q_proj": ("attn_q", F32),
    "self_attn.k_proj": ("attn_k", F16),
    "self_attn.v_proj": ("attn_v", Q8_0),
    "self_attn.o_proj": ("attn_output", F32),
    "mlp.gate_proj": ("ffn_gate", Q8_0),
    "mlp.up_proj": ("ffn_up", F16),
    "mlp.down_proj": ("ffn_down", Q8_0),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *ALPHABET, "th", "the", "Ġthe", "12"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def model(**changes):
    values = dict(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
    )
    return tiny.config("llama", **(values | changes))


def stored(array, kind):
    """Return (what the file holds, the float32 that it means)."""
    if kind == F32:
        return array, array
    if kind == F16:
        half = array.astype(np.float16)
        return half, half.astype(np.float32)
    raw = quantize(array, kind)
    # By hand: a block of 32 values is a float16 scale and 32 int8.
    blocks = raw.reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return raw, (scales * blocks[:, 2:].copy().view(np.int8)).reshape(array.shape)


def interleaved(rows, head_dim):
    """Return q or k as llama.cpp stores it: of each head, rows 0, K/2, 1, K/2 + 1, ..."""
    order = []
    for head in range(0, len(rows), head_dim):
        for i in range(head_dim // 2):
            order += [head + i, head + i + head_dim // 2]
    return rows[order]


def gguf_name(name):
    """Return (GGUF name, how it is stored) of an HF tensor."""
    stem, prefix = name.removesuffix(".weight"), ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    theirs, kind = NAMES[stem]
    return f"{prefix}{theirs}.weight", kind


def make(cfg, seed=0):
    """Return ({GGUF name: (array, kind)}, {HF name: the float32 array it means})."""
    written, meant = {}, {}
    for name, array in hf.hf_tensors(cfg, tiny.params(cfg, seed)):
        theirs, kind = gguf_name(name)
        meant[name] = stored(array, kind)[1]
        if "q_proj" in name or "k_proj" in name:
            array = interleaved(array, cfg.head_dim)
        written[theirs] = (stored(array, kind)[0], kind)
    return written, meant


def keys_of(cfg):
    return {
        "llama.block_count": cfg.num_layers,
        "llama.context_length": cfg.max_position,
        "llama.embedding_length": cfg.hidden_size,
        "llama.feed_forward_length": cfg.intermediate_size,
        "llama.attention.head_count": cfg.num_heads,
        "llama.attention.head_count_kv": cfg.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": cfg.rms_norm_eps,
        "llama.rope.freq_base": cfg.rope_theta,
        "llama.rope.dimension_count": cfg.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(TOKENS) - 4),
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(path, tensors, keys, architecture="llama"):
    writer = gguf_package.GGUFWriter(path, architecture)
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        adders[type(value)](key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """(cfg, {HF name: array}, the GGUF file, the HF folder made of it)."""
    cfg, folder = model(), tmp_path_factory.mktemp("gguf")
    tensors, meant = make(cfg)
    path = write(folder / "m.gguf", tensors, keys_of(cfg))
    assert gguf.main([str(path), str(folder / "hf")]) == 0
    return cfg, meant, path, folder / "hf"


def assert_same(found, meant):
    assert set(found) == set(meant)
    for name, array in meant.items():
        assert found[name].dtype == np.float32 and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def test_the_folder_holds_the_bits_that_the_file_means(tied):
    """F32 as it is, F16 widened, Q8_0 as scale times integer; q and k in HF's order of rows."""
    cfg, meant, path, folder = tied
    assert_same(load_file(str(folder / "model.safetensors")), meant)
    found, params = gguf.read_gguf(path)
    again, loaded = hf.load_hf(folder)
    assert found == again == cfg  # rms_norm_eps is 1e-5, not its nearest float32
    tiny.bit_equal(params, loaded)
    config = json.loads((folder / "config.json").read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [config[name] for name in ids] == [1, 2, 2] and "unk_token_id" not in config


def test_an_untied_model_and_one_whose_heads_are_not_hidden_over_heads(tmp_path):
    cfg = model(tie_embeddings=False, head_dim=16)
    tensors, meant = make(cfg, seed=1)
    sizes = {"llama.attention.key_length": 16, "llama.attention.value_length": 16}
    path = write(tmp_path / "m.gguf", tensors, keys_of(cfg) | sizes)
    found, params = gguf.read_gguf(path)
    assert found == cfg
    assert_same(dict(hf.hf_tensors(cfg, params)), meant)


def test_tokenizer_cuts_digits_merges_and_knows_its_special_tokens(tied):
    tokenizer = tokenizers.Tokenizer.from_file(str(tied[3] / "tokenizer.json"))
    number = {token: i for i, token in enumerate(TOKENS)}
    text = "<|im_start|>the the 12<tool>é<|im_end|>"
    want = ["<|im_start|>", "the", "Ġthe", "Ġ", "1", "2", "<tool>", "Ã", "©", "<|im_end|>"]
    ids = tokenizer.encode(text).ids
    assert ids == [number[token] for token in want]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "the the 12<tool>é"
    assert tokenizer.get_vocab_size() == len(TOKENS)
    config = json.loads((tied[3] / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["model_max_length"] == tied[0].max_position


def test_gpt2_words_keep_their_digits_together(tied, tmp_path):
    cfg, _, _, _ = tied
    path = write(tmp_path / "m.gguf", make(cfg)[0], keys_of(cfg) | {"tokenizer.ggml.pre": "gpt-2"})
    folder = gguf.convert(path, tmp_path / "hf")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("12").ids == [TOKENS.index("12")]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"llama.block_count": None}, WeightsError, r"lacks key 'llama\.block_count'"),
        ({"llama.block_count": "two"}, WeightsError, r"'llama\.block_count' must be int.*two"),
        ({"llama.attention.head_count": 0}, WeightsError, "num_heads must be at least 1"),
        ({"llama.attention.head_count_kv": 3}, ConfigError, "num_heads.*multiple of"),
        ({"llama.rope.scaling.type": "yarn"}, ConfigError, r"rope\.scaling\.type to 'yarn'.*none"),
        ({"llama.rope.dimension_count": 4}, ConfigError, r"rope\.dimension_count to 4.*8"),
        ({"llama.expert_count": 8}, ConfigError, r"llama\.expert_count to 8"),
        ({"llama.attention.clamp_kqv": 1.0}, ConfigError, r"llama\.attention\.clamp_kqv"),
        (
            {"llama.embedding_length": 40, "llama.rope.dimension_count": None},
            WeightsError,
            r"'token_embd\.weight' has shape",
        ),
        ({"tokenizer.ggml.model": "llama"}, ConfigError, r"ggml\.model 'llama'; known: gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, ConfigError, r"'tekken'.*known: gpt-2, smollm"),
        ({"tokenizer.ggml.add_bos_token": True}, ConfigError, "add_bos_token"),
        ({"tokenizer.ggml.merges": ["t zz"]}, WeightsError, r"ggml\.merges do not fit"),
        ({"tokenizer.ggml.token_type": [1, 1]}, WeightsError, "token_type 2"),
        ({"tokenizer.ggml.eos_token_id": 9999}, WeightsError, "eos_token_id is 9999"),
    ],
)
def test_keys_that_cannot_be_are_named(tied, tmp_path, changes, error, text):
    cfg = tied[0]
    keys = {key: value for key, value in (keys_of(cfg) | changes).items() if value is not None}
    path = write(tmp_path / "m.gguf", make(cfg)[0], keys)
    with pytest.raises(error, match=text):
        gguf.convert(path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "error", "text"),
    [
        (
            "blk.1.ffn_up.weight",
            None,
            WeightsError,
            r"lacks tensor 'blk\.1\.ffn_up\.weight'.*64, 32",
        ),
        ("blk.0.ffn_gate.weight", np.zeros((64, 32), np.int8), WeightsError, "stored as I8.*F16"),
        (
            "blk.0.attn_v.weight",
            np.zeros((8, 32), np.float32),
            WeightsError,
            r"\[8, 32\].*\[16, 32",
        ),
        ("blk.0.attn_q.bias", np.zeros(32, np.float32), WeightsError, r"'blk\.0\.attn_q\.bias'"),
        ("rope_freqs.weight", np.ones(4, np.float32), ConfigError, "scaled rope frequencies"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tied, tmp_path, name, tensor, error, text):
    cfg = tied[0]
    tensors = make(cfg)[0] | {name: (tensor, None)}
    if tensor is None:
        del tensors[name]
    with pytest.raises(error, match=text):
        gguf.read_gguf(write(tmp_path / "m.gguf", tensors, keys_of(cfg)))


def test_other_architectures_and_other_files_are_refused(tied, tmp_path, capsys):
    cfg, _, path, _ = tied
    other = write(tmp_path / "other.gguf", {}, keys_of(cfg), architecture="gemma")
    with pytest.raises(ConfigError, match="architecture 'gemma'; known: llama"):
        gguf.read_gguf(other)
    whole = path.read_bytes()
    for name, content in (("short", whole[:-100]), ("head", whole[:300]), ("text", b"not a model")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=f"cannot read .*{name} as GGUF"):
            gguf.read_gguf(tmp_path / name)
    assert gguf.main([str(tmp_path / "absent"), str(tmp_path / "hf")]) == 1
    assert "absent" in capsys.readouterr().err and not (tmp_path / "hf").exists()
