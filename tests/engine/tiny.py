"""A small model and engine for the tests of this folder."""

import jax
import numpy as np

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.engine.engine import Engine, EngineShape, Request
from skyrl_jax.models import decoder

CFG = ModelConfig(
    family="qwen3",
    vocab_size=96,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    max_position=512,
    checkpoint="",
)
SHAPE = EngineShape(
    slots=32, max_context=256, prefill_rows=4, prefill_chunk=16, decode_steps=4, block=16
)


def params(seed=0, cfg=CFG):
    """Weights large enough that the policy is far from uniform."""
    made = decoder.init_params(cfg, jax.random.key(seed))
    made["embed"]["embedding"] = made["embed"]["embedding"] * 2.0
    return made


def request(rid, length, *, seed=0, new=12, temperature=1.0, stop_ids=(), score_from=-1, salt=0):
    draw = np.random.default_rng([length, seed, salt])
    return Request(
        rid=rid,
        prompt=draw.integers(0, CFG.vocab_size, length).astype(np.int32),
        max_new_tokens=new,
        temperature=temperature,
        seed=seed,
        stop_ids=stop_ids,
        score_from=score_from,
    )


def run(engine: Engine, requests, *, every=0):
    """Run requests to their ends; with ``every`` one more is admitted each that many rounds."""
    waiting, results, rounds = list(requests), {}, 0
    while waiting or engine.active:
        take = len(waiting) if not every else int(rounds % every == 0)
        for _ in range(min(take, engine.free_slots, len(waiting))):
            engine.admit(waiting.pop(0))
        for result in engine.step():
            results[result.request.rid] = result
        rounds += 1
    return results


def same_bits(a, b):
    return a.token_ids == b.token_ids and [x.hex() for x in a.logprobs] == [
        x.hex() for x in b.logprobs
    ]
