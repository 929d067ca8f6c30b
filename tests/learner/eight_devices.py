"""The work of test_sharded.py, in a process with eight CPU devices; prints one JSON line.

Command: ``python -m tests.learner.eight_devices FOLDER`` (checkpoints go to FOLDER).
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from skyrl_jax.core.config import MeshConfig
from skyrl_jax.core.errors import CheckpointError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner import lora as lora_lib
from skyrl_jax.learner import state as state_lib
from skyrl_jax.learner.checkpoint import Checkpoints, check_placed
from skyrl_jax.learner.reference import make_reference_channel, reference_params
from skyrl_jax.learner.step import (
    loss_and_gradients,
    make_score_fn,
    make_train_step,
    policy_loss,
)
from skyrl_jax.models import moe
from skyrl_jax.models.decoder import abstract_params, init_params
from skyrl_jax.models.sharding import make_mesh, param_shardings, row_sharding
from skyrl_jax.rl.diagnostics import finish
from tests.learner import configs

ROWS, TOKENS, VOCAB = 16, 16, 48
DENSE = dataclasses.replace(
    configs.MODEL,
    vocab_size=VOCAB,
    hidden_size=32,
    head_dim=8,
    intermediate_size=48,
    tie_embeddings=False,
)
ROUTED = dataclasses.replace(
    DENSE,
    family="qwen3_moe",
    num_experts=8,
    experts_per_token=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
)
LEARNER = dataclasses.replace(
    configs.LEARNER, weight_decay=0.0, row_length=TOKENS, micro_rows=8, remat="full"
)


def objective(**changes):
    return dataclasses.replace(configs.OBJECTIVE, **{"entropy_coef": 0.01} | changes)


# Every axis above 1 in some; the dense model has no experts to spread.
MESHES = [
    (DENSE, dict(data=2, fsdp=2, tensor=2)),
    (DENSE, dict(fsdp=4, context=2)),
    (ROUTED, dict(data=2, expert=4)),
    (ROUTED, dict(fsdp=2, tensor=2, expert=2)),
    (ROUTED, dict(fsdp=2, context=2, expert=2)),
    (ROUTED, dict(data=4, tensor=2)),
]


def open_mesh(**axes):
    return make_mesh(MeshConfig(**(dict(data=1, fsdp=1, tensor=1, context=1, expert=1) | axes)))


def make_batch():
    rng = np.random.default_rng(0)
    shape = (ROWS, TOKENS)
    weights = rng.uniform(0, 0.01, shape).astype(np.float32)
    weights[:, [0, 7]] = 0
    return Batch(
        tokens=rng.integers(0, VOCAB, shape).astype(np.int32),
        segment_ids=np.tile(np.repeat([1, 2], [7, 9]), (ROWS, 1)).astype(np.int32),
        positions=np.tile(np.r_[np.arange(7), np.arange(9)], (ROWS, 1)).astype(np.int32),
        behavior_logprobs=-rng.uniform(3, 5, shape).astype(np.float32),
        advantages=rng.normal(size=shape).astype(np.float32),
        loss_weights=weights,
        temperature=np.full(shape, 0.8, np.float32),
    )


def spread(batch, mesh):
    if mesh is None:
        return batch
    return jax.tree.map(lambda x: jax.device_put(x, row_sharding(mesh, x.shape)), batch)


def host(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


def relative(want, got):
    """Return the largest difference of any leaf, over the largest value of that leaf."""
    pairs = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
    return max(float(np.abs(x - y).max() / np.abs(x).max()) for x, y in pairs)


def descend(model, batch, mesh):
    """Take 3 SGD steps at lr 0.1; return what the first saw, the last params, bytes of a device."""
    balance = 0.05 if model.num_experts else 0.0
    score = make_score_fn(model, LEARNER, mesh, entropy_gradient=True)
    loss_fn = policy_loss(objective(balance_coef=balance))

    def step(params, batch):
        def total(p, micro):
            return loss_fn(score(p, micro), micro)

        micro_rows = LEARNER.micro_rows
        loss, tally, grads = loss_and_gradients(total, params, batch, micro_rows, mesh)
        after = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return after, grads, (loss, optax.tree.norm(grads), finish(tally))

    params, out = init_params(model, jax.random.key(0)), None
    if mesh is not None:
        shardings = param_shardings(model, mesh)
        params, out = jax.device_put(params, shardings), (shardings, shardings, None)
    given = spread(batch, mesh)
    compiled = jax.jit(step, out_shardings=out).lower(params, given).compile()
    params, grads, (loss, norm, metrics) = compiled(params, given)
    for _ in range(2):
        params, _, _ = compiled(params, given)
    return {
        "loss": float(loss),
        "norm": float(norm),
        "metrics": {name: float(x) for name, x in metrics.items()},
        "grads": host(grads),
        "params": host(params),
        "bytes": compiled.memory_analysis().argument_size_in_bytes,
    }


def compare_meshes(batch):
    alone = {model: descend(model, batch, None) for model in (DENSE, ROUTED)}
    cases = []
    for model, axes in MESHES:
        want, got = alone[model], descend(model, batch, open_mesh(**axes))
        cases.append(
            {
                "family": model.family,
                "axes": axes,
                "loss": abs(got["loss"] / want["loss"] - 1),
                "norm": abs(got["norm"] / want["norm"] - 1),
                "grads": relative(want["grads"], got["grads"]),
                "params": relative(want["params"], got["params"]),
                "bytes": got["bytes"],
                "metrics": got["metrics"],
                "alone": want["metrics"],
            }
        )
    shapes = {model.family: abstract_params(model) for model in (DENSE, ROUTED)}
    sizes = {
        family: {
            f"{group}.{name}": leaf.size for group, leaves in tree.items()
            for name, leaf in leaves.items()
        }
        for family, tree in shapes.items()
    }  # fmt: skip
    return {"cases": cases, "sizes": sizes}


def skewed():
    """Send every token to the same experts, on one device or two of four; return the errors."""
    layers = init_params(ROUTED, jax.random.key(0))["layers"]
    names = ("router", "expert_gate", "expert_up", "expert_down")
    p = {name: layers[name][0] for name in names}
    x = jax.random.normal(jax.random.key(1), (64, ROUTED.hidden_size))

    def total(p, x, experts, mesh):
        y, stats = moe.moe_mlp(ROUTED, p, x, experts=experts, mesh=mesh)
        return jnp.sum(jnp.sin(y)), (y, stats.dropped)

    run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), static_argnums=3)
    errors = {}
    for ids in ((0, 1), (7, 0)):
        experts = np.tile(np.asarray(ids, np.int32), (64, 1))
        (_, (want, _)), want_grads = run(p, x, experts, None)
        (_, (got, dropped)), grads = run(p, x, experts, open_mesh(expert=4, tensor=2))
        unused = [e for e in range(ROUTED.num_experts) if e not in ids]
        assert (np.asarray(grads[0]["expert_up"])[unused] == 0).all()
        errors[str(ids)] = {
            "value": relative(host(want), host(got)),
            "grads": relative(host(want_grads), host(grads)),
            "dropped": float(dropped),
        }
    return errors


def by_kernel():
    """Run the TPU's form of the experts, interpreted, on devices that share tokens, E and F."""
    layers = init_params(ROUTED, jax.random.key(0))["layers"]
    p = {n: layers[n][0] for n in ("router", "expert_gate", "expert_up", "expert_down")}
    x = jax.random.normal(jax.random.key(1), (64, ROUTED.hidden_size))

    def total(p, x, mesh):
        y, stats = moe.moe_mlp(ROUTED, p, x, mesh=mesh)
        return jnp.sum(jnp.sin(y)) + stats.balance_loss

    run = jax.jit(jax.value_and_grad(total, (0, 1)), static_argnums=2)
    want = host(run(p, x, None))
    chosen_by_platform = moe._kernel
    moe._kernel = lambda mesh: "interpret"
    got = host(run(p, x, open_mesh(fsdp=2, tensor=2, expert=2)))
    moe._kernel = chosen_by_platform
    return relative(want, got)


def run(batch, mesh):
    """Take the real train step; return (placements, loss, first moment) and the state."""
    state = state_lib.init_state(DENSE, LEARNER, jax.random.key(0), mesh)
    given = spread(batch, mesh)
    where = jax.tree.map(lambda x: str(x.sharding.spec) if mesh else "", state.params)
    old = jax.tree.leaves(state)
    state, metrics = make_train_step(DENSE, LEARNER, objective(), mesh)(state, given)
    after = jax.tree.map(lambda x: str(x.sharding.spec) if mesh else "", state.params)
    assert where == after, (where, after)
    taken = {x.is_deleted() for x in old}
    assert taken == {mesh is not None}, "devices take over the state's memory, a single CPU not"
    mu = host(state.opt_state.inner[-1][0].mu)
    return (where, float(metrics["loss"]), mu), state


def run_lora(batch, mesh):
    lora = lora_lib.lora_init(DENSE, abstract_params(DENSE), 2, ("q", "down"), jax.random.key(1))
    lora = jax.tree.map(lambda x: x + 0.1, lora)  # B too, so that both sides have a gradient
    shardings = None if mesh is None else param_shardings(DENSE, mesh)
    base = reference_params(DENSE, init_params(DENSE, jax.random.key(0), shardings), mesh=mesh)
    step = lora_lib.make_lora_step(
        DENSE, LEARNER, objective(), alpha=4.0, lora_shapes=lora, mesh=mesh
    )
    state, metrics = step(lora_lib.lora_state(LEARNER, lora, mesh), batch, base)
    where = jax.tree.map(lambda x: str(x.sharding.spec) if mesh else "", state.params["layers"])
    mu = host(state.opt_state.inner[-1][0].mu)
    scored = make_reference_channel(DENSE, LEARNER, mesh)(batch, base)
    return where, float(metrics["loss"]), mu, np.asarray(scored.channels["ref_logprobs"])


def compare(one, eight):
    _, loss, grads, *logprobs = one
    where, loss8, grads8, *logprobs8 = eight
    return {
        "loss": abs(loss8 / loss - 1),
        "grads": relative(grads, grads8),
        "logprobs": [float(np.abs(x - y).max()) for x, y in zip(logprobs, logprobs8, strict=True)],
        "where": where,
    }


def refused(state, wanted):
    """Return what is said of arrays that lie elsewhere than ``wanted``."""
    try:
        check_placed(3, state, wanted)
    except CheckpointError as error:
        return str(error)
    return ""


def move(state, folder):
    """Save from eight devices, restore on two, save those, restore on one; say what came back."""

    def template(mesh):
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            state_lib.abstract_state(DENSE, LEARNER),
            state_lib.state_shardings(DENSE, LEARNER, mesh),
        )

    want, devices, equal, misplaced = host(state), [], [], ""
    for number, axes in enumerate((dict(fsdp=2), {})):
        with Checkpoints(folder / f"from-{number}", keep=1) as checkpoints:
            checkpoints.save(3, state, {})
            wanted = template(open_mesh(**axes))
            state = checkpoints.restore(wanted).state
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True)
        assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs)
        devices.append(max(len(x.sharding.device_set) for x in jax.tree.leaves(state)))
        if not misplaced:
            misplaced = refused(state, template(open_mesh(tensor=2)))
        pairs = zip(jax.tree.leaves(want), jax.tree.leaves(host(state)), strict=True)
        equal.append(all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs))
    sums = {jax.tree_util.keystr(p): float(np.abs(x).sum(dtype=np.float64))
            for p, x in jax.tree_util.tree_leaves_with_path(want)}  # fmt: skip
    return {"devices": devices, "equal": equal, "sums": sums, "misplaced": misplaced}


def main(folder):
    assert jax.device_count() == 8
    batch, mesh = make_batch(), open_mesh(data=2, fsdp=2, tensor=2)
    one, _ = run(batch, None)
    eight, state = run(batch, mesh)
    lora = compare(run_lora(batch, None), run_lora(batch, mesh))
    result = {"full": compare(one, eight), "lora": lora, **compare_meshes(batch)}
    result |= {"skewed": skewed(), "kernel": by_kernel(), "moved": move(state, folder)}
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
