"""What host offload of the optimizer's moments takes off a chip, in the compiled train step.

Command: ``python benchmarks/offload.py [--topology=v5e:2x2] [--layers=4] [--hidden=512]``

Prints one JSON line: ``saved`` = bytes of device arguments less with
``learner.offload_optimizer``, ``expected`` = 8 bytes per parameter and device (two fp32 moments);
peaks and temporaries with and without beside them. Needs libtpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from topology import CHILD, leave, open_mesh, run_child


def main(argv: Sequence[str]) -> int:
    """Measure in a child process and print what it found."""
    if CHILD in argv:
        _measure(_options([a for a in argv if a != CHILD]))
    _options(argv)
    print(json.dumps(run_child(__file__, list(argv))))
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    return parser.parse_args(argv)


def _measure(options: argparse.Namespace) -> None:
    from skyrl_jax.learner.state import HOST_MEMORY
    from skyrl_jax.learner.step import make_train_step

    mesh = open_mesh(options.topology, fsdp=-1)
    model, learner, objective = _job(options.layers, options.hidden)
    result: dict[str, Any] = {"topology": options.topology, "devices": mesh.size}
    for name, offload in (("plain", False), ("offloaded", True)):
        cfg = dataclasses.replace(learner, offload_optimizer=offload)
        state, batch = _arguments(model, cfg, mesh)
        compiled = make_train_step(model, cfg, objective, mesh).lower(state, batch).compile()
        stats = compiled.memory_analysis()
        result[name] = {
            "argument_bytes": stats.argument_size_in_bytes,
            "temp_bytes": stats.temp_size_in_bytes,
            "alias_bytes": stats.alias_size_in_bytes,
            "host_argument_bytes": stats.host_argument_size_in_bytes,
            "host_temp_bytes": stats.host_temp_size_in_bytes,
        }
        result["expected"] = sum(_shard_bytes(x) for x in _leaves_in(state.opt_state, HOST_MEMORY))
        result["params_per_device"] = sum(_shard_bytes(x) for x in _leaves_in(state.params)) // 4
    result["saved"] = result["plain"]["argument_bytes"] - result["offloaded"]["argument_bytes"]
    leave(result)


def _job(layers: int, hidden: int) -> tuple[Any, Any, Any]:
    from skyrl_jax.core.config import LearnerConfig, ModelConfig, ObjectiveConfig

    heads = hidden // 128
    model = ModelConfig(
        family="qwen3",
        vocab_size=4096,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        intermediate_size=3 * hidden,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        max_position=4096,
        checkpoint="",
    )
    learner = LearnerConfig(
        lr=1e-6,
        schedule="constant",
        warmup_steps=0,
        decay_steps=0,
        min_lr_fraction=0.1,
        weight_decay=0.01,
        beta1=0.9,
        beta2=0.999,
        moment_dtype="float32",
        max_grad_norm=1.0,
        compute_dtype="bfloat16",
        row_length=256,
        micro_rows=4,
        updates_per_batch=1,
        epochs_per_batch=1,
        logprob_chunk=256,
        remat="full",
    )
    objective = ObjectiveConfig(
        advantage="grpo",
        normalize_std=True,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        kl_coef=0.0,
        kl_kind="k3",
        entropy_coef=0.0,
        reduction="token_mean",
        reduction_norm=1.0,
        permute_rewards=False,
        masked_reasons=(),
        zeroed_reasons=(),
    )
    return model, learner, objective


def _arguments(model: Any, learner: Any, mesh: Any) -> tuple[Any, Any]:
    """Return the step's arguments as shapes with their places."""
    import jax
    import jax.numpy as jnp

    from skyrl_jax.core.types import Batch
    from skyrl_jax.learner.state import abstract_state, state_shardings
    from skyrl_jax.models.sharding import row_sharding

    def placed(leaf: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    shape = (learner.micro_rows, learner.row_length)

    def array(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding(mesh, shape))

    floats = ("behavior_logprobs", "advantages", "loss_weights", "temperature")
    batch = Batch(
        **{name: array(jnp.int32) for name in ("tokens", "segment_ids", "positions")},
        **{name: array(jnp.float32) for name in floats},
    )
    shardings = state_shardings(model, learner, mesh)
    return jax.tree.map(placed, abstract_state(model, learner), shardings), batch


def _leaves_in(tree: Any, memory: str | None = None) -> list[Any]:
    import jax

    return [x for x in jax.tree.leaves(tree) if memory in (None, x.sharding.memory_kind)]


def _shard_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
