"""Count what one routed layer of Qwen3-30B-A3B costs in the program compiled for a TPU.

Command: ``python benchmarks/moe_flops.py [--topology=v5e:2x2] [--tokens=8192] [--mesh=expert=4]``

Prints one JSON line. ``ratio`` = FLOPs of the layer's experts, router and sort in the compiled
forward (and forward + backward) program of all devices over 2 (6) FLOPs for each parameter of the k
experts that a token is sent to; 1.0 is the least that can be. ``how`` counts the instructions that
make the grouped matmuls. Where experts are spread (``--mesh=expert=4``) a device runs what comes to
it piece by piece, ``pieces`` where all are evenly loaded; ``worst_ratio`` is that of any load.
No assignment is ever dropped (the tests of the learner count them). Needs libtpu (pip install
libtpu==0.0.42.1 beside jax 0.10.2).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from topology import CHILD, leave, open_mesh, run_child

# Qwen3-30B-A3B (config.json): one layer's feed-forward.
HIDDEN, FFN, EXPERTS, PER_TOKEN = 2048, 768, 128, 8


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
    parser.add_argument("--tokens", type=int, default=8192, help="of all devices")
    parser.add_argument("--mesh", default="", help="axis=size,...; empty = one device")
    return parser.parse_args(argv)


def _measure(options: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from skyrl_jax.core.config import ModelConfig
    from skyrl_jax.models.families import layer_shapes
    from skyrl_jax.models.moe import moe_mlp
    from skyrl_jax.models.sharding import LOGICAL, spec

    cfg = ModelConfig(
        family="qwen3_moe",
        vocab_size=151_936,
        hidden_size=HIDDEN,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        max_position=40_960,
        checkpoint="",
        num_experts=EXPERTS,
        experts_per_token=PER_TOKEN,
        moe_intermediate_size=FFN,
        norm_topk_prob=True,
    )
    sizes = dict(pair.split("=") for pair in options.mesh.split(",") if pair)
    mesh = open_mesh(options.topology, **{axis: int(n) for axis, n in sizes.items()})
    shapes = layer_shapes(cfg)
    params = {
        name: jax.ShapeDtypeStruct(
            shapes[name],
            jnp.float32,
            sharding=NamedSharding(mesh, spec(mesh, LOGICAL["layers"][name][1:], shapes[name])),
        )
        for name in ("router", "expert_gate", "expert_up", "expert_down")
    }
    shape = (options.tokens, HIDDEN)
    place = NamedSharding(mesh, spec(mesh, ("flat", None), shape))
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    def forward(p: Any, x: Any) -> Any:
        return moe_mlp(cfg, p, x, mesh=mesh)[0]

    def both(p: Any, x: Any) -> Any:
        y, pull = jax.vjp(forward, p, x)
        return pull(y)

    active = 2 * 3 * PER_TOKEN * HIDDEN * FFN * options.tokens
    result: dict[str, Any] = {"topology": options.topology, "mesh": sizes, "tokens": shape[0]}
    pieces, piece = _pieces(cfg, mesh, options)
    result["pieces"] = pieces
    for name, function, least in (("forward", forward, active), ("backward", both, 3 * active)):
        compiled = jax.jit(function).lower(params, x).compile()
        once = compiled.cost_analysis()["flops"] * mesh.size
        # cost_analysis counts the body of the loop over pieces once
        even = once + mesh.size * (pieces - 1) * piece[name]
        uneven = once + (mesh.size * pieces - 1) * piece[name]
        result[name] = {
            "flops": even,
            "active_flops": least,
            "ratio": round(even / least, 4),
            "worst_ratio": round(uneven / least, 4),
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "how": _kinds(compiled.as_text()),
        }
    leave(result)


def _pieces(cfg: Any, mesh: Any, options: argparse.Namespace) -> tuple[int, dict[str, float]]:
    """Return how many pieces an evenly loaded device runs, and one device's FLOPs for each.

    Where experts are not spread there are none: one, of no further FLOPs. Each device runs what
    came to it in whole pieces, so all of them together run at most one piece each too much.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from skyrl_jax.models import moe

    spread = mesh.shape["expert"]
    if spread == 1:
        return 1, {"forward": 0.0, "backward": 0.0}
    tokens = options.tokens * spread // (mesh.size // mesh.shape["tensor"])
    share = tokens * cfg.experts_per_token // spread  # assignments of a device
    size, num = share // moe.PIECES, cfg.num_experts // spread
    ffn = cfg.moe_intermediate_size // mesh.shape["tensor"]
    alone = NamedSharding(open_mesh(options.topology), PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=alone)

    matrices = {
        "expert_gate": (num, cfg.hidden_size, ffn),
        "expert_up": (num, cfg.hidden_size, ffn),
        "expert_down": (num, ffn, cfg.hidden_size),
    }
    p = {name: array(shape, jnp.bfloat16) for name, shape in matrices.items()}
    sums = {name: array(shape, jnp.float32) for name, shape in matrices.items()}
    rows = array((size, cfg.hidden_size), jnp.bfloat16)
    ct = array((size, cfg.hidden_size), jnp.float32)
    scales, sizes = array((size,), jnp.float32), array((num,), jnp.int32)

    def forward(p: Any, rows: Any, scales: Any, sizes: Any) -> Any:
        return moe.run_piece(p, rows, scales, jnp.zeros((), jnp.int32), sizes, "tpu")

    def backward(p: Any, rows: Any, scales: Any, sizes: Any, ct: Any, sums: Any) -> Any:
        _, pull = jax.vjp(lambda *args: forward(*args, sizes), p, rows, scales)
        new, *rest = pull(ct)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, new), rest

    def flops(function: Any, *args: Any) -> float:
        return float(jax.jit(function).lower(*args).compile().cost_analysis()["flops"])

    first = flops(forward, p, rows, scales, sizes)
    again = flops(backward, p, rows, scales, sizes, ct, sums)
    # the loop of the backward pass comes after that of the forward one, and has its own
    return moe.PIECES, {"forward": first, "backward": first + again}


def _kinds(text: str) -> dict[str, int]:
    """Count the instructions of a compiled program that multiply matrices or move them."""
    found = Counter(re.findall(r"\s(dot|convolution|ragged-dot|while|conditional|sort)\(", text))
    found.update(re.findall(r"\s(all-gather|all-reduce|reduce-scatter|all-to-all)[-\w]*\(", text))
    found.update(re.findall(r'custom_call_target="([^"]+)"', text))
    return dict(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
