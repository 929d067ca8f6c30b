"""Compare two TPU programs of the train step: layers on tokens in one axis, and on rows of tokens.

Command: ``python benchmarks/flattened.py [--topology=v5e:2x4] [--rows=8] [--seq_len=2048]
[--layers=4] [--mesh=fsdp=8 --mesh=...]``

models/decoder.py runs its layers on [N, D], N = tokens of all rows, since a CPU computes weight
gradients over one axis of tokens several times faster than over two. Here the step of a preset
(qwen3_8b with fewer layers) is compiled for TPUs in that form and with the layers on [B, T, D], all
else equal, and one JSON line tells the figures of both on each mesh: bytes of temporaries and of
the peak, bytes that a device sends in a step, FLOPs (loop bodies once). ``ratio`` = flattened over
rows: at most 1 where the form costs the TPU nothing. Needs libtpu; a minute a program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from topology import CHILD, leave, run_child

MESHES = ("fsdp=8", "fsdp=4,tensor=2")
FIGURES = ("temp_bytes", "peak_bytes", "sent_bytes", "flops")
PATIENCE_S = 1800.0


def main(argv: Sequence[str]) -> int:
    """Compile each mesh in a child process and print all figures."""
    if CHILD in argv:
        _measure(_options([a for a in argv if a != CHILD]))
    options = _options(argv)
    about = {name: value for name, value in vars(options).items() if name != "mesh"}
    given = [f"--{name}={value}" for name, value in about.items()]
    meshes = options.mesh or MESHES
    found = {mesh: run_child(__file__, [*given, f"--mesh={mesh}"], PATIENCE_S) for mesh in meshes}
    print(json.dumps(about | {"meshes": found}))
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--preset", default="qwen3_8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--rows", type=int, default=8, help="of all devices")
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--mesh", action="append", help="axis=size,...; may be given again")
    return parser.parse_args(argv)


def _measure(options: argparse.Namespace) -> None:
    from configs.swe import get_config
    from skyrl_jax.core.config import parse_config
    from skyrl_jax.learner.step import make_train_step
    from skyrl_jax.models.sharding import make_mesh
    from skyrl_jax.plan.chips import parse_topology
    from skyrl_jax.plan.compile import abstract_arguments
    from skyrl_jax.plan.job import make_job, parse_mesh
    from skyrl_jax.plan.topology import open_devices

    config = parse_config(get_config(options.preset).to_dict())
    model = dataclasses.replace(config.model, num_layers=options.layers)
    config = dataclasses.replace(config, model=model)
    sizes = {"tensor": 1} | parse_mesh(options.mesh[0])
    topology = parse_topology(options.topology)
    shape = {"rows": options.rows, "seq_len": options.seq_len}
    job = make_job(config, topology, **shape, remat="full", mesh=sizes)
    mesh = make_mesh(job.mesh, open_devices(topology))
    scores = {"flattened": None, "rows": rows_score(job.model, job.learner, mesh)}
    result: dict[str, Any] = {}
    for name, score in scores.items():
        step: Any = make_train_step(job.model, job.learner, job.objective, mesh, score_fn=score)
        result[name] = figures(step.lower(*abstract_arguments(job, mesh)).compile())
    pairs = {name: (result["flattened"][name], result["rows"][name]) for name in FIGURES}
    result["ratio"] = {name: round(ours / theirs, 4) for name, (ours, theirs) in pairs.items()}
    leave(result)


def figures(compiled: Any) -> dict[str, float]:
    """Return what a compiled program needs of one device, bytes and FLOPs."""
    from skyrl_jax.plan.hlo import bytes_by_kind, read_collectives

    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    sent = bytes_by_kind(read_collectives(compiled.as_text()))
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "sent_bytes": sum(number for _, number in sent.values()),
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "sent": {kind: number for kind, (_, number) in sent.items()},
    }


def rows_score(model: Any, learner: Any, mesh: Any) -> Callable[[Any, Any], Any]:
    """Return the language model's score function (learner/step.py) with layers on [B, T, D]."""
    import jax.numpy as jnp

    from skyrl_jax.models.decoder import head
    from skyrl_jax.models.sharding import spec
    from skyrl_jax.rl.logprobs import TokenStats, shift_right, vocab_parallel_logprobs

    dtype = jnp.dtype(learner.compute_dtype)

    def score(params: Any, batch: Any) -> Any:
        rows = (batch.tokens, batch.positions, batch.segment_ids)
        hidden = rows_hidden(model, params, *rows, dtype=dtype, remat=learner.remat, mesh=mesh)
        kernel = head(model, params)
        logprobs, entropy = vocab_parallel_logprobs(
            shift_right(hidden),
            kernel,
            batch.tokens,
            batch.temperature,
            mesh=mesh,
            rows=spec(mesh, ("rows", "tokens"), batch.tokens.shape),
            vocab=spec(mesh, ("embed", "vocab"), kernel.shape),
            chunk=learner.logprob_chunk,
        )
        first = batch.positions == 0
        return TokenStats(*(jnp.where(first, 0.0, x) for x in (logprobs, entropy)))

    return score


def rows_hidden(
    cfg: Any,
    params: Any,
    tokens: Any,
    positions: Any,
    segment_ids: Any,
    *,
    dtype: Any,
    remat: str,
    mesh: Any,
) -> Any:
    """Return what ``decoder.hidden_fn`` returns, by layers on [B, T, D]; dense, no context axis."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from skyrl_jax.models import decoder
    from skyrl_jax.models.embedding import embed_rows
    from skyrl_jax.models.layout import make_layout

    b, t = tokens.shape
    layout = make_layout(mesh, (b, t))

    def pin(x: Any) -> Any:
        if layout.mesh is None:
            return x
        where = NamedSharding(mesh, PartitionSpec(layout.row_axes or None))
        return jax.lax.with_sharding_constraint(x, where)

    one = decoder.unknown_one(segment_ids)

    def body(x: Any, p: Any) -> tuple[Any, None]:
        p = decoder.kept_in_layer(p, dtype, one)
        return rows_layer(cfg, p, pin(x), positions, segment_ids, mesh), None

    if remat != "none":
        body = jax.checkpoint(body, prevent_cse=False, policy=decoder.REMAT[remat])
    x = embed_rows(params["embed"]["embedding"], tokens.reshape(b * t), layout, dtype)
    x, _ = jax.lax.scan(body, x.reshape(b, t, -1), params["layers"])
    return decoder.final_norm(cfg, params, x)


def rows_layer(cfg: Any, p: Any, x: Any, positions: Any, segment_ids: Any, mesh: Any) -> Any:
    """Return what ``decoder.layer`` returns, of x [B, T, D]."""
    import jax

    from skyrl_jax.models.attention import attention
    from skyrl_jax.models.decoder import matmul, rms_norm
    from skyrl_jax.models.families import family_of
    from skyrl_jax.models.rope import rope, rope_frequencies

    eps, family, frequency = cfg.rms_norm_eps, family_of(cfg), rope_frequencies(cfg)
    turn = jax.vmap(lambda heads, where: rope(heads, where, frequency))
    y = rms_norm(x, p["attn_norm"], eps)
    q, k, v = (matmul(y, p[name]) for name in ("q", "k", "v"))
    if family.qkv_bias:
        q, k, v = (
            z + p[f"{n}_bias"].astype(z.dtype) for z, n in zip((q, k, v), "qkv", strict=True)
        )
    q, k, v = (z.reshape(*z.shape[:2], -1, cfg.head_dim) for z in (q, k, v))
    if family.qk_norm:
        q, k = rms_norm(q, p["q_norm"], eps), rms_norm(k, p["k_norm"], eps)
    mixed = attention(turn(q, positions), turn(k, positions), v, positions, segment_ids, mesh=mesh)
    x = x + matmul(mixed.reshape(*x.shape[:2], -1), p["o"])
    y = rms_norm(x, p["mlp_norm"], eps)
    return x + matmul(jax.nn.silu(matmul(y, p["gate"])) * matmul(y, p["up"]), p["down"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
