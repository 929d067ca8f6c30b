"""LoRA folders that we write: peft loads them, and the adapted models have the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from skyrl_jax.learner import lora as lora_lib
from skyrl_jax.models import hf
from tests.lanes.parity.sides import compiled_logits, load_theirs, their_logits
from tests.models import tiny

RANK, ALPHA, T = 3, 7.0, 24
ATTENTION = ("q", "k", "v", "o")
CASES = {
    "llama": ("q", "v"),
    "qwen2": (*ATTENTION, "gate", "up", "down"),
    "qwen3": ("o", "gate", "down"),
    "qwen3_moe": ATTENTION,
}


@pytest.mark.parametrize("family", sorted(CASES))
def test_adapted_logits(tmp_path, close, family):
    cfg = tiny.config(family, rope_theta=3e4)
    params = tiny.params(cfg)
    folder = hf.save_hf(tmp_path / "base", cfg, params)
    lora = lora_lib.lora_init(cfg, params, RANK, CASES[family], jax.random.key(0))
    rng = np.random.default_rng(1)
    lora = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 4, jnp.float32), lora)
    adapter = lora_lib.export_peft(tmp_path / "adapter", lora, alpha=ALPHA, base_model=str(folder))
    tokens = rng.integers(0, cfg.vocab_size, (2, T))
    positions = np.tile(np.arange(T), (2, 1))
    segments = np.ones_like(tokens)

    def ours(params):
        return np.asarray(compiled_logits(cfg, params, tokens, positions, segments))

    model = peft.PeftModel.from_pretrained(load_theirs(folder), str(adapter)).eval()
    with torch.no_grad():
        theirs = their_logits(model, tokens, positions).numpy()
    assert np.abs(theirs - ours(params)).max() > 0.1  # the adapters do something
    adapted = ours(lora_lib.adapt(params, lora, ALPHA))
    close(f"{family} logits with a PEFT adapter", adapted, theirs, 1e-4)
    merged = ours(lora_lib.merge(params, lora, ALPHA))
    close(f"{family} logits with a merged adapter", merged, theirs, 1e-4)
    model.save_pretrained(str(tmp_path / "again"))
    back, alpha = lora_lib.load_peft(tmp_path / "again")
    assert alpha == ALPHA
    tiny.bit_equal(back, lora)
