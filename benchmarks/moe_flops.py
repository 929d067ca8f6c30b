"""Count what one routed layer of Qwen3-30B-A3B costs in the program compiled for a TPU.

Command: ``python benchmarks/moe_flops.py [--topology=v5e:2x2] [--tokens=8192] [--mesh=fsdp=4]``

Prints one JSON line. ``ratio`` = FLOPs of the layer's experts, router and sort in the compiled
forward (and forward + backward) program over 2 (6) FLOPs for each parameter of the k experts that
a token is sent to; 1.0 is the least that can be. ``how`` counts the instructions that make the
grouped matmuls. With ``--mesh=expert=4`` the loop over pieces is counted once: a quarter of an even
load. Needs libtpu (pip install libtpu==0.0.42.1 beside jax 0.10.2).
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
    for name, function, least in (("forward", forward, active), ("backward", both, 3 * active)):
        compiled = jax.jit(function).lower(params, x).compile()
        flops = compiled.cost_analysis()["flops"] * mesh.size
        result[name] = {
            "flops": flops,
            "active_flops": least,
            "ratio": round(flops / least, 4),
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "how": _kinds(compiled.as_text()),
        }
    leave(result)


def _kinds(text: str) -> dict[str, int]:
    """Count the instructions of a compiled program that multiply matrices or move them."""
    found = Counter(re.findall(r"\s(dot|convolution|ragged-dot|while|conditional|sort)\(", text))
    found.update(re.findall(r"\s(all-gather|all-reduce|reduce-scatter|all-to-all)[-\w]*\(", text))
    found.update(re.findall(r'custom_call_target="([^"]+)"', text))
    return dict(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
