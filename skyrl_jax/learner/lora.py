"""Low-rank adaptation (LoRA): train A and B of W + alpha / rank A B and keep W frozen.

Pure functions over the params pytree. The adapters are a small tree of their own, stacked over
layers like the params, {"layers": {"q": {"a": [L, in, rank], "b": [L, rank, out]}, ...}};
optimizer, gradient and checkpoint know only it. In the forward pass an adapted weight is
``models.decoder.LowRank``, so that a frozen W costs neither gradient nor moments.

Why not qwix: its LoraProvider adds adapters by intercepting the matmuls of a live Flax module,
and ours is gone after ``nnx.split`` (a pytree of stacked layers in a scan), where the whole
technique is one more matmul.

Source: arXiv 2106.09685 (section 4.1; B starts at zero, so training starts at the base policy).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from skyrl_jax.core.config import LearnerConfig, ModelConfig, ObjectiveConfig
from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.state import Params, TrainState, fresh_state, placed, shardings_like
from skyrl_jax.learner.step import (
    Metrics,
    apply_update,
    make_score_fn,
    policy_loss,
    supervised_loss,
)
from skyrl_jax.models.decoder import LowRank
from skyrl_jax.models.folder import whole_folder
from skyrl_jax.models.sharding import LOGICAL, spec
from skyrl_jax.rl.diagnostics import Tally

LoraStep = Callable[[TrainState, Batch, Params], tuple[TrainState, Metrics]]

# Leaves of params["layers"] that can be adapted -> their module within a Hugging Face layer.
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def lora_init(
    cfg: ModelConfig, params_shapes: Params, rank: int, targets: Sequence[str], key: Array
) -> Params:
    """Return fresh adapters: A normal with deviation 1/sqrt(in), B zero; fp32, traceable.

    Args:
        cfg: the model's shape.
        params_shapes: the params pytree, as arrays or as shapes (``abstract_params``).
        rank: columns of A.
        targets: leaves of ``params["layers"]`` to adapt, e.g. ("q", "v"); a target's numbers do
            not depend on which others there are.
        key: a jax PRNG key.

    Raises:
        ConfigError: no target, an unknown one, one that is no plain matmul of every layer, or a
            rank that is not low.
    """
    if not targets:
        raise ConfigError(f"learner.lora_targets: LoRA needs a target; known: {', '.join(MODULES)}")
    shapes = {n: leaf.shape for n, leaf in params_shapes["layers"].items() if n in MODULES}
    # Experts have one more axis, and families may lack a leaf.
    known = {n: shapes[n] for n in MODULES if len(shapes.get(n, ())) == 3}
    if {shape[0] for shape in known.values()} != {cfg.num_layers}:
        raise ConfigError(f"these params have not the {cfg.num_layers} layers of the config")
    layers = {}
    for name in targets:
        if name not in known:
            raise ConfigError(
                f"learner.lora_targets: LoRA target {name!r}: known of this model: "
                + ", ".join(known)
            )
        num_layers, fan_in, fan_out = known[name]
        if not 0 < rank <= min(fan_in, fan_out):
            raise ConfigError(
                f"learner.lora_rank: LoRA rank {rank} must be at least 1 and at most "
                f"{min(fan_in, fan_out)}, the smaller side of {name!r}"
            )
        own = jax.random.fold_in(key, list(MODULES).index(name))
        a = jax.random.normal(own, (num_layers, fan_in, rank), jnp.float32) / np.sqrt(fan_in)
        layers[name] = {"a": a, "b": jnp.zeros((num_layers, rank, fan_out), jnp.float32)}
    return {"layers": layers}


def adapt(params: Params, lora: Params, alpha: float) -> Params:
    """Return params whose adapted weights are ``LowRank``: for any forward pass of decoder.py."""
    layers = dict(params["layers"])
    for name, pair in lora["layers"].items():
        scale = alpha / pair["a"].shape[-1]
        layers[name] = LowRank(layers[name], pair["a"], scale * pair["b"])
    return {**params, "layers": layers}


def merge(params: Params, lora: Params, alpha: float) -> Params:
    """Return plain params with W + alpha / rank A B, summed in fp32, in the dtype of W."""
    layers = dict(params["layers"])
    for name, pair in lora["layers"].items():
        product = jnp.matmul(pair["a"], pair["b"], precision=jax.lax.Precision.HIGHEST)
        base = jnp.asarray(layers[name])
        layers[name] = (base + alpha / pair["a"].shape[-1] * product).astype(base.dtype)
    return {**params, "layers": layers}


def lora_shardings(lora: Params, mesh: jax.sharding.Mesh) -> Params:
    """Return a NamedSharding per adapter: A lies like W's input axis, B like its output axis."""

    def one(path: Any, leaf: Any) -> jax.sharding.NamedSharding:
        name, side = path[-2].key, path[-1].key
        stack, fan_in, fan_out = LOGICAL["layers"][name]
        axes = (stack, fan_in, None) if side == "a" else (stack, None, fan_out)
        return jax.sharding.NamedSharding(mesh, spec(mesh, axes, leaf.shape))

    return jax.tree_util.tree_map_with_path(one, lora)


def lora_state(
    learner_cfg: LearnerConfig, lora: Params, mesh: jax.sharding.Mesh | None = None
) -> TrainState:
    """Return a train state that holds the adapters alone."""
    out = None if mesh is None else _state_shardings(learner_cfg, lora, mesh)
    made = jax.jit(fresh_state, static_argnums=0, out_shardings=out)(learner_cfg, lora)
    state: TrainState = made
    return state


def abstract_lora_state(
    learner_cfg: LearnerConfig, lora: Params, mesh: jax.sharding.Mesh | None = None
) -> TrainState:
    """Return the state of adapters (given as arrays or shapes) as shapes, placed on a mesh."""
    shapes: TrainState = jax.eval_shape(lambda tree: fresh_state(learner_cfg, tree), lora)
    if mesh is None:
        return shapes
    state: TrainState = placed(shapes, _state_shardings(learner_cfg, lora, mesh))
    return state


def make_lora_step(
    model_cfg: ModelConfig,
    learner_cfg: LearnerConfig,
    objective: ObjectiveConfig | None,
    *,
    alpha: float,
    lora_shapes: Params | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> LoraStep:
    """Return the jitted ``step(state, batch, base) -> (state, metrics)``; the state is donated.

    ``base`` are the frozen params (fp32 or bf16, sharded like the policy); they get no gradient.

    Args:
        model_cfg: the model's shape.
        learner_cfg: optimizer, micro-batch and precision.
        objective: the RL objective, or ``None`` for supervised fine-tuning.
        alpha: adapters count alpha / rank times.
        lora_shapes: the adapters, as arrays or shapes; needed with ``mesh``.
        mesh: devices to shard over, or ``None`` for one device.

    Raises:
        ConfigError: a mesh without ``lora_shapes``.
    """
    if mesh is not None and lora_shapes is None:
        raise ConfigError("make_lora_step: with a mesh, pass lora_shapes (what lora_init returned)")
    entropy = objective is not None and objective.entropy_coef != 0
    score = make_score_fn(model_cfg, learner_cfg, mesh, entropy_gradient=entropy)
    loss_fn = policy_loss(objective) if objective is not None else supervised_loss()

    def step(state: TrainState, batch: Batch, base: Params) -> tuple[TrainState, Metrics]:
        def total_loss(lora: Params, micro: Batch) -> tuple[Array, Tally]:
            return loss_fn(score(adapt(base, lora, alpha), micro), micro)

        return apply_update(learner_cfg, total_loss, state, batch, mesh, in_place=False)

    out = None
    if mesh is not None:
        out = (_state_shardings(learner_cfg, lora_shapes, mesh), None)
    return jax.jit(step, donate_argnums=0, out_shardings=out)


def export_peft(
    folder: str | os.PathLike[str], lora: Params, *, alpha: float, base_model: str
) -> Path:
    """Write adapters as PEFT does; the folder appears under its name only when complete.

    adapter_config.json and adapter_model.safetensors with, per layer and module, lora_A.weight
    [rank, in] and lora_B.weight [out, rank]; what PEFT and servers load.

    Args:
        folder: the folder to make; one that exists is replaced.
        lora: the adapters, in the dtype to write.
        alpha: ``lora_alpha``.
        base_model: where the base model lies (``base_model_name_or_path``).

    Source: PEFT's developer guide "PEFT checkpoint format".
    """
    from safetensors.numpy import save_file

    config = json.dumps(_peft_config(lora, alpha, base_model), indent=2, sort_keys=True)
    with whole_folder(folder) as new:
        weights = str(new / "adapter_model.safetensors")
        save_file(_peft_tensors(lora), weights, metadata={"format": "pt"})
        (new / "adapter_config.json").write_text(config)
    return Path(folder)


def load_peft(folder: str | os.PathLike[str]) -> tuple[Params, float]:
    """Read (adapters as numpy, alpha) from a PEFT folder of the kind that ``export_peft`` writes.

    Raises:
        WeightsError: files are missing or unreadable, or hold something else than LoRA of ours.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        tensors = load_file(str(Path(folder) / "adapter_model.safetensors"))
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsError(f"cannot read the PEFT adapter {folder}: {error}") from error
    layers: dict[str, Any] = {}
    left = set(tensors)
    for name, module in MODULES.items():
        stacks: dict[str, list[Any]] = {"a": [], "b": []}
        for side, stack in stacks.items():
            # From layer 0 on without a gap: what lies behind one stays in ``left``.
            while (key := _tensor_name(len(stack), module, side)) in tensors:
                stack.append(tensors[key].T)
                left.discard(key)
        if stacks["a"] and len(stacks["a"]) == len(stacks["b"]):
            layers[name] = {side: np.stack(stack) for side, stack in stacks.items()}
        elif stacks["a"] or stacks["b"]:
            left.add(f"A without B in {module}")
    if left or not layers or config.get("use_rslora") or config.get("use_dora"):
        what = sorted(left)[0] if left else "a variant of LoRA" if layers else "no tensor"
        raise WeightsError(f"the PEFT adapter {folder} holds {what}, which is not read here")
    return {"layers": layers}, float(config["lora_alpha"])


def _state_shardings(
    learner_cfg: LearnerConfig, lora: Params, mesh: jax.sharding.Mesh
) -> TrainState:
    shapes = abstract_lora_state(learner_cfg, lora)
    return shardings_like(lora_shardings(lora, mesh), shapes, mesh)


def _peft_tensors(lora: Params) -> dict[str, Any]:
    tensors = {}
    for name, pair in lora["layers"].items():
        for side in ("a", "b"):
            for i, matrix in enumerate(np.asarray(pair[side])):
                tensors[_tensor_name(i, MODULES[name], side)] = np.ascontiguousarray(matrix.T)
    return tensors


def _tensor_name(layer: int, module: str, side: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{side.upper()}.weight"


def _peft_config(lora: Params, alpha: float, base_model: str) -> dict[str, Any]:
    ranks = {pair["a"].shape[-1] for pair in lora["layers"].values()}
    if len(ranks) != 1:
        raise WeightsError(f"adapters of one export share a rank; these have {sorted(ranks)}")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(MODULES[name].split(".")[-1] for name in lora["layers"]),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
