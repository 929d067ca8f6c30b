"""One train step on eight devices, full or LoRA, gives the numbers of one device."""

import json
import subprocess
import sys

SCRIPT = """
import dataclasses, json
import jax
import numpy as np
from skyrl_jax.core.config import LearnerConfig, MeshConfig, ModelConfig, ObjectiveConfig
from skyrl_jax.core.types import Batch
from skyrl_jax.learner import lora as lora_lib
from skyrl_jax.learner import state as state_lib
from skyrl_jax.learner.reference import make_reference_channel, reference_params
from skyrl_jax.learner.step import make_logprob_step, make_train_step
from skyrl_jax.models.decoder import abstract_params, init_params
from skyrl_jax.models.sharding import make_mesh, param_shardings, row_sharding

assert jax.device_count() == 8
model = ModelConfig(family="qwen3", vocab_size=48, hidden_size=16, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=4, intermediate_size=24, rope_theta=1e4, rms_norm_eps=1e-6,
    tie_embeddings=False, max_position=64, checkpoint="")
learner = LearnerConfig(lr=1e-2, schedule="constant", warmup_steps=0, decay_steps=0,
    min_lr_fraction=0.1, weight_decay=0.0, beta1=0.9, beta2=0.95, moment_dtype="float32",
    max_grad_norm=0.0, compute_dtype="float32", row_length=16, micro_rows=4, updates_per_batch=1,
    epochs_per_batch=1, logprob_chunk=16, remat="full")
objective = ObjectiveConfig(advantage="grpo", normalize_std=True, clip_low=0.2, clip_high=0.28,
    dual_clip=0.0, kl_coef=0.0, kl_kind="k3", entropy_coef=0.0, reduction="token_mean",
    reduction_norm=1.0, permute_rewards=False, masked_reasons=(), zeroed_reasons=())
rng = np.random.default_rng(0)
shape = (8, 16)
weights = rng.uniform(0, 0.02, shape).astype(np.float32)
weights[:, [0, 7]] = 0
batch = Batch(
    tokens=rng.integers(0, 48, shape).astype(np.int32),
    segment_ids=np.tile(np.repeat([1, 2], [7, 9]), (8, 1)).astype(np.int32),
    positions=np.tile(np.r_[np.arange(7), np.arange(9)], (8, 1)).astype(np.int32),
    behavior_logprobs=-rng.uniform(3, 5, shape).astype(np.float32),
    advantages=rng.normal(size=shape).astype(np.float32),
    loss_weights=weights,
    temperature=np.full(shape, 0.8, np.float32),
)

def run(mesh):
    state = state_lib.init_state(model, learner, jax.random.key(0), mesh)
    given = batch
    if mesh is not None:
        given = jax.tree.map(lambda x: jax.device_put(x, row_sharding(mesh, x.shape)), batch)
    scored = make_logprob_step(model, learner, mesh)(state.params, given)
    where = jax.tree.map(lambda x: str(x.sharding.spec) if mesh else "", state.params)
    state, metrics = make_train_step(model, learner, objective, mesh)(state, given)
    after = jax.tree.map(lambda x: str(x.sharding.spec) if mesh else "", state.params)
    assert where == after, (where, after)
    mu = jax.tree.map(np.asarray, state.opt_state.inner[-1][0].mu)
    return where, float(metrics["loss"]), mu, np.asarray(scored.logprobs)

def run_lora(mesh):
    lora = lora_lib.lora_init(model, abstract_params(model), 2, ("q", "down"), jax.random.key(1))
    lora = jax.tree.map(lambda x: x + 0.1, lora)  # B too, so that both sides have a gradient
    shardings = None if mesh is None else param_shardings(model, mesh)
    base = reference_params(model, init_params(model, jax.random.key(0), shardings), mesh=mesh)
    step = lora_lib.make_lora_step(
        model, learner, objective, alpha=4.0, lora_shapes=lora, mesh=mesh)
    state, metrics = step(lora_lib.lora_state(learner, lora, mesh), batch, base)
    where = jax.tree.map(lambda x: str(x.sharding.spec) if mesh else "", state.params["layers"])
    mu = jax.tree.map(np.asarray, state.opt_state.inner[-1][0].mu)
    scored = make_reference_channel(model, learner, mesh)(batch, base)
    return where, float(metrics["loss"]), mu, np.asarray(scored.channels["ref_logprobs"])

def compare(one, eight):
    _, loss, grads, logprobs = one
    where, loss8, grads8, logprobs8 = eight
    errors = [
        float(np.abs(x - y).max() / np.abs(x).max())
        for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(grads8), strict=True)
    ]
    return {"loss": abs(loss - loss8) / abs(loss), "grads": max(errors),
        "logprobs": float(np.abs(logprobs - logprobs8).max()), "where": where}

mesh = make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2, context=1))
print(json.dumps([compare(run(None), run(mesh)), compare(run_lora(None), run_lora(mesh))]))
"""


def test_eight_devices_equal_one(child_env):
    env = child_env | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    full, lora = json.loads(done.stdout.splitlines()[-1])
    for out in (full, lora):
        assert out["loss"] < 1e-5
        assert out["grads"] < 1e-5
        assert out["logprobs"] < 1e-5
    # The parameters really are spread, and adapters lie like the sides of their weights.
    assert "(None, 'fsdp', 'tensor')" in full["where"]["layers"]["q"]
    assert "('fsdp', 'tensor')" in full["where"]["lm_head"]["kernel"]
    assert "'fsdp'" in lora["where"]["q"]["a"] and "'tensor'" in lora["where"]["q"]["b"]
    assert "'tensor'" in lora["where"]["down"]["a"] and "'fsdp'" in lora["where"]["down"]["b"]
