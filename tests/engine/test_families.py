"""The engine serves every family: the learner's numbers, and bits that ignore the neighbours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.errors import WeightsError
from skyrl_jax.engine.engine import Engine, EngineShape
from skyrl_jax.models import decoder, hf
from skyrl_jax.serve.weights import read_weights
from tests.engine import tiny
from tests.models import tiny as models

SHAPE = EngineShape(
    slots=8, max_context=128, prefill_rows=2, prefill_chunk=16, decode_steps=2, block=8
)


def config(family, **changes):
    return models.config(family, vocab_size=tiny.CFG.vocab_size, max_position=128, **changes)


@pytest.mark.parametrize(
    "cfg",
    [
        config("llama", tie_embeddings=True, **models.SCALING),
        config("qwen2"),
        config("qwen3_moe"),
    ],
    ids=lambda cfg: cfg.family,
)
def test_log_probs_are_the_learners_and_neighbours_do_not_matter(cfg):
    params = models.params(cfg)
    engine = Engine(cfg, SHAPE, params)
    wanted = [tiny.request(str(n), length, seed=n, new=6) for n, length in enumerate((5, 23))]
    alone = [tiny.run(engine, [request])[request.rid] for request in wanted]
    # experts are chosen by token: other rows change how many rows each expert gets
    others = [tiny.request(f"x{n}", 4 + 3 * n, seed=50 + n, new=9) for n in range(6)]
    together = tiny.run(engine, [*others[:3], *wanted, *others[3:]], every=1)
    for request, single in zip(wanted, alone, strict=True):
        assert tiny.same_bits(together[request.rid], single)
        ids = np.concatenate([request.prompt, single.token_ids])[None]
        positions = np.arange(ids.shape[1])[None]
        hidden = models.hidden(
            cfg, params, *(jnp.asarray(x, jnp.int32) for x in (ids, positions, ids * 0 + 1))
        )
        logits = jnp.matmul(hidden, decoder.head(cfg, params), precision="highest")
        logprobs = np.asarray(jax.nn.log_softmax(logits))[0]
        first = len(request.prompt) - 1
        for at, (token, got) in enumerate(
            zip(single.token_ids, single.logprobs, strict=True), first
        ):
            assert abs(logprobs[at, token] - got) < 1e-4


def test_weights_of_another_family_are_refused_before_anything_changes(tmp_path):
    cfg = config("qwen2")
    folder = hf.save_hf(tmp_path / "m", cfg, models.params(cfg))
    params = read_weights(folder, cfg)
    assert params["layers"]["q_bias"].shape == (2, 32)
    with pytest.raises(WeightsError, match="has family 'qwen2', the served model has 'llama'"):
        read_weights(folder, dataclasses.replace(cfg, family="llama"))
