"""What loading a model from its Hugging Face folder costs the host beside its devices' shards.

Command: ``python benchmarks/load_memory.py [--layers=9] [--folder=.cache/load_memory]``

Writes a random qwen3 model (9 layers: 2 GB in fp32), loads it in a process of its own onto eight
CPU devices (fsdp 4, tensor 2) and prints one JSON line: ``weights_bytes``; ``shards_bytes``, what
the devices hold; ``extra_bytes``, the process's peak of resident memory above what it had before
and the shards; ``seconds`` of the load. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LOAD = "--load"
DEVICES = 8


def main(argv: Sequence[str]) -> int:
    """Write, load in a child process, print."""
    if argv[:1] == [LOAD]:
        print(json.dumps(load(Path(argv[1]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "load_memory")
    options = parser.parse_args(argv)
    try:
        weights = write(options.folder, options.layers)
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        done = subprocess.run(
            [sys.executable, __file__, LOAD, str(options.folder)],
            env=dict(os.environ) | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    print(json.dumps({"weights_bytes": weights} | json.loads(done.stdout.splitlines()[-1])))
    return 0


def write(folder: Path, layers: int) -> int:
    """Write a random model in files of at most 1 GB; return the bytes of its weights."""
    import dataclasses

    import numpy as np

    from configs.swe import get_config
    from skyrl_jax.core.config import parse_config
    from skyrl_jax.models import hf
    from skyrl_jax.models.families import param_shapes

    cfg = dataclasses.replace(
        parse_config(get_config("quickstart").to_dict()).model,
        vocab_size=32_768,
        hidden_size=2048,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
    )
    rng = np.random.default_rng(0)
    params = {
        group: {name: rng.standard_normal(shape, np.float32) for name, shape in leaves.items()}
        for group, leaves in param_shapes(cfg).items()
    }
    hf.save_hf(folder, cfg, params, max_shard_bytes=10**9)
    return sum(leaf.nbytes for leaves in params.values() for leaf in leaves.values())


def load(folder: Path) -> dict[str, Any]:
    """Load a folder onto this process's devices; return what it took."""
    import jax
    import numpy as np

    from skyrl_jax.core.config import MeshConfig
    from skyrl_jax.models import hf, sharding

    sizes = {"data": 1, "fsdp": DEVICES // 2, "tensor": 2, "context": 1, "expert": 1}
    mesh = sharding.make_mesh(MeshConfig(**sizes))
    jax.block_until_ready(jax.device_put(np.zeros(8)))  # what a first array costs is not the load's
    cfg = hf.load_config(folder)
    shardings = sharding.param_shardings(cfg, mesh)
    before, began = _memory("VmRSS"), time.monotonic()
    params = hf.load_sharded(folder, cfg, shardings)
    seconds = time.monotonic() - began
    leaves = jax.tree.leaves(params)
    shards = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    extra = _memory("VmHWM") - before - shards
    return {"shards_bytes": shards, "extra_bytes": extra, "seconds": round(seconds, 1)}


def _memory(name: str) -> int:
    """Return a line of this process's status, bytes (getrusage's peak is also its parent's)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
