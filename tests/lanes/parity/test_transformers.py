"""Every family against transformers: logits, gradients, files in both directions.

Run by `make lane-parity`, in a virtual environment of its own that has torch and transformers
beside this project. The default test run does not collect tests/lanes (pyproject.toml), so nothing
here is skipped: where it runs, torch is there or the run fails.

Each model goes through its files: we write a folder, transformers reads it (its own config class,
its own names), and both compute in float32 on the CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from skyrl_jax.models import hf
from tests.lanes.parity.sides import compiled_logits, load_theirs, our_logits, their_logits
from tests.models import tiny

# family, changes (rope_theta is 3e4 where nothing is said: neither 1e6 nor a default of theirs)
CASES = {
    "llama": ("llama", {"rope_theta": 1e5}),
    "llama-all-kv-heads-tied": ("llama", {"num_kv_heads": 4, "tie_embeddings": True}),
    "llama-scaled-tied": ("llama", {"tie_embeddings": True, "rope_theta": 5e5, **tiny.SCALING}),
    "qwen2": ("qwen2", {"rope_theta": 3e5, "head_dim": 10, "hidden_size": 40}),
    "qwen2-tied": ("qwen2", {"tie_embeddings": True, "head_dim": 10, "hidden_size": 40}),
    "qwen3": ("qwen3", {"rope_theta": 5e6}),
    "qwen3-one-kv-head": ("qwen3", {"num_kv_heads": 1, "tie_embeddings": True}),
    "qwen3-all-kv-heads": ("qwen3", {"num_kv_heads": 4, "rms_norm_eps": 1e-5}),
    "qwen3_moe": ("qwen3_moe", {"rope_theta": 5e6}),
    "qwen3_moe-plain-weights": (
        "qwen3_moe",
        {"norm_topk_prob": False, "experts_per_token": 3, "tie_embeddings": True},
    ),
}
T = 24
LIMIT = 1e-4


@pytest.fixture(params=sorted(CASES), scope="module")
def both(request, tmp_path_factory):
    """(cfg, our params, transformers' model) of one case."""
    family, changes = CASES[request.param]
    cfg = tiny.config(family, **({"max_position": 8192, "rope_theta": 3e4} | changes))
    params = tiny.params(cfg)
    folder = hf.save_hf(tmp_path_factory.mktemp(request.param) / "m", cfg, params)
    model = load_theirs(folder)
    assert type(model).__name__ == hf.config_to_hf(cfg)["architectures"][0]
    return cfg, params, model


def draw(cfg, shape, seed=0):
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, shape)


@pytest.mark.parametrize("first", [0, 8000])
def test_logits(both, close, first):
    """Also at positions far from 0, where a wrong theta or scaling is wrong by whole turns."""
    cfg, params, model = both
    tokens = draw(cfg, (2, T))
    positions = np.tile(first + np.arange(T), (2, 1))
    ours = compiled_logits(cfg, params, tokens, positions, np.ones_like(tokens))
    with torch.no_grad():
        theirs = their_logits(model, tokens, positions).numpy()
    assert np.abs(theirs).max() > 1
    close(f"{cfg.family} logits from position {first} on", ours, theirs, LIMIT)


def test_packed_rows_are_the_separate_sequences(both, close):
    cfg, params, model = both
    lengths = (9, 6, 5)
    tokens, positions, segments = tiny.rows(cfg, [lengths], T)
    ours = np.asarray(compiled_logits(cfg, params, tokens, positions, segments))
    at = 0
    for n in lengths:
        with torch.no_grad():
            theirs = their_logits(model, tokens[:, at : at + n], np.arange(n)[None]).numpy()
        close(f"{cfg.family} logits of packed rows", ours[:, at : at + n], theirs, LIMIT)
        at += n


def test_gradients_of_the_mean_log_prob(both, figure):
    cfg, params, model = both
    tokens = draw(cfg, (2, T), seed=1)
    positions = np.tile(np.arange(T), (2, 1))

    def loss(params):
        logits = our_logits(cfg, params, tokens, positions, np.ones_like(tokens))
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logprobs, jnp.asarray(tokens)[:, 1:, None], axis=-1).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    model.zero_grad()
    theirs = torch.nn.functional.cross_entropy(
        their_logits(model, tokens, positions)[:, :-1].flatten(0, 1),
        torch.from_numpy(tokens)[:, 1:].flatten(),
    )
    theirs.backward()
    np.testing.assert_allclose(float(value), theirs.item(), rtol=1e-5)
    wanted = dict(torch_gradients(cfg, model))
    ours = dict(hf.hf_tensors(cfg, gradient))
    assert set(ours) == set(wanted)
    for name, array in ours.items():
        scale = np.abs(wanted[name]).max()
        assert scale > 0, name  # every tensor takes part
        relative = np.abs(array - wanted[name]).max() / scale
        assert figure(f"{cfg.family} gradients, relative", relative) <= LIMIT, name


def torch_gradients(cfg, model):
    """Yield (name in the file, gradient); newer releases hold the experts of a layer fused."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        stem, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":  # [E, 2 F, D]: gate, then up
            for e in range(cfg.num_experts):
                gate, up = np.split(gradient[e], 2)
                yield f"{stem}.experts.{e}.gate_proj.weight", gate
                yield f"{stem}.experts.{e}.up_proj.weight", up
        elif last == "down_proj":
            for e in range(cfg.num_experts):
                yield f"{stem}.experts.{e}.down_proj.weight", gradient[e]
        else:
            yield name, gradient


def test_a_folder_that_transformers_wrote_comes_back_bit_for_bit(both, tmp_path):
    cfg, params, model = both
    model.save_pretrained(tmp_path / "theirs")
    found, loaded = hf.load_hf(tmp_path / "theirs")
    assert found == cfg
    tiny.bit_equal(jax.tree.map(np.asarray, params), loaded)
    hf.save_hf(tmp_path / "ours", found, loaded)
    theirs, ours = (
        load_file(str(tmp_path / side / "model.safetensors")) for side in ("theirs", "ours")
    )
    if cfg.tie_embeddings:
        theirs.pop("lm_head.weight", None)
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert array.dtype == ours[name].dtype and array.tobytes() == ours[name].tobytes(), name
