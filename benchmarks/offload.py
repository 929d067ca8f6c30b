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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.swe import get_config
from skyrl_jax.core.config import RunConfig, parse_config
from skyrl_jax.plan.child import compile_job
from skyrl_jax.plan.chips import parse_topology
from skyrl_jax.plan.job import make_job


def main(argv: Sequence[str]) -> int:
    """Compile the step with and without, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args(argv)
    topology = parse_topology(options.topology)
    result: dict[str, Any] = {"topology": options.topology}
    for name, offload in (("plain", False), ("offloaded", True)):
        job = make_job(_config(options.layers, options.hidden, offload), topology, rows=4)
        found = compile_job(job)
        result[name] = {
            "argument_bytes": found.arguments,
            "optimizer_bytes": found.optimizer,
            "temp_bytes": found.temporaries,
            "peak_bytes": found.peak,
        }
        result["params_per_device"] = found.params // 4
    result["expected"] = 8 * result["params_per_device"]
    result["saved"] = result["plain"]["argument_bytes"] - result["offloaded"]["argument_bytes"]
    print(json.dumps(result))
    return 0


def _config(layers: int, hidden: int, offload: bool) -> RunConfig:
    base = parse_config(get_config("quickstart").to_dict())
    model = dataclasses.replace(
        base.model,
        vocab_size=4096,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 128,
        num_kv_heads=hidden // 128,
        head_dim=128,
        intermediate_size=3 * hidden,
        tie_embeddings=False,
    )
    learner = dataclasses.replace(
        base.learner,
        compute_dtype="bfloat16",
        row_length=256,
        logprob_chunk=256,
        remat="full",
        offload_optimizer=offload,
    )
    return dataclasses.replace(base, model=model, learner=learner)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
