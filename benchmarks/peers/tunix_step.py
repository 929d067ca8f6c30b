"""The peer "tunix": its own Qwen3, its GRPO loss and the jitted step of its RL trainer.

Only public classes of the google-tunix wheel are used. Parameters are fp32, bfloat16 is the dtype
of the computation; nothing is recomputed.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import algo_core, rl_cluster
from tunix.rl import trainer as rl_trainer
from tunix.rl.grpo import grpo_learner
from turns import Prepared, serve


def prepare(job: Mapping[str, Any]) -> Prepared:
    """Make the model, the trainer and the batch of a shape."""
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    with jax.sharding.Mesh(devices, ("fsdp", "tp")):
        model = qwen3.Qwen3(model_config(job), rngs=nnx.Rngs(0))
        trainer = make_trainer(job, model)
        example = make_example(job)
        train_step, _ = trainer.jit_train_and_eval_step()

    def step() -> float:
        with jax.sharding.Mesh(devices, ("fsdp", "tp")):
            result = train_step(example)
            jax.block_until_ready(result)
            jax.block_until_ready(jax.tree.leaves(nnx.state(trainer.model, nnx.Param)))
        return float(jax.tree.leaves(result)[0])

    names = ("google-tunix", "jax", "jaxlib", "flax", "optax")
    about = {
        "versions": {name: importlib.metadata.version(name) for name in names},
        "params": sum(int(x.size) for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
    }
    return Prepared(step=step, about=about)


def model_config(job: Mapping[str, Any]) -> Any:
    """Return tunix's configuration of the shape."""
    return qwen3.ModelConfig(
        num_layers=job["layers"],
        vocab_size=job["vocab"],
        embed_dim=job["dim"],
        hidden_dim=job["ffn"],
        num_heads=job["heads"],
        num_kv_heads=job["kv_heads"],
        head_dim=job["head_dim"],
        norm_eps=1e-6,
        rope_theta=1_000_000,
        use_tied_embedding=True,
        dtype=jnp.dtype(job["dtype"]),
        param_dtype=jnp.float32,
        remat_config=qwen3.RematConfig.NONE,
    )


def make_trainer(job: Mapping[str, Any], model: Any) -> Any:
    """Return tunix's RL trainer with its GRPO loss and the optimizer of all sides."""
    algorithm = grpo_learner.GRPOConfig(num_generations=4, num_iterations=1, beta=0.0)
    algorithm.temperature = 1.0
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.01)
    )
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optimizer, eval_every_n_steps=10**9, max_steps=10**9
    )
    trainer = rl_trainer.Trainer(model, optimizer, training, custom_checkpoint_metadata_fn=dict)
    # No id means padding or end: every row has its full length.
    ids = {"pad_id": 0, "eos_id": job["vocab"] + 1}

    def loss(model: Any, train_example: Any) -> Any:
        return algo_core.grpo_loss_fn(model, train_example, algo_config=algorithm, **ids)

    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
    return trainer


def make_example(job: Mapping[str, Any]) -> Any:
    """Return one batch: random ids, a uniform behaviour policy, one advantage a row."""
    rng = np.random.default_rng(0)
    before, after = (job["rows"], job["prompt"]), (job["rows"], job["completion"])
    return grpo_learner.TrainExample(
        prompt_ids=jnp.asarray(rng.integers(2, job["vocab"], before), jnp.int32),
        prompt_mask=jnp.ones(before, bool),
        completion_ids=jnp.asarray(rng.integers(2, job["vocab"], after), jnp.int32),
        completion_mask=jnp.ones(after, bool),
        advantages=jnp.asarray(rng.normal(size=job["rows"]), jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.full(after, -math.log(job["vocab"]), jnp.float32),
    )


if __name__ == "__main__":
    serve(prepare)
