"""Measure the host memory that loading a Hugging Face folder takes beside its own shards.

Command: ``python benchmarks/load_memory.py [--gb=2] [--devices=1,8] [--dtype=stored|float32]``

Writes a random model of that many GB (bfloat16, the shape of a 1B Llama with as many layers as it
takes), loads it in a child process per number of CPU devices (spread over ``fsdp``) and prints one
JSON line each: ``shards_bytes`` of all local devices, which on a CPU are host memory too,
``peak_bytes`` that the process grew by while it loaded, and ``beside_bytes``, the difference. Of
2.0 GB as stored it was 29 MB on one device and 14 MB on eight.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CHILD = "--child"
# Llama-3.2-1B (config.json), its vocabulary rounded to a power of two.
WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 8192, 32, 8, 64, 131_072
_REPEAT = 32  # the embedding is a block of random rows, so often: randomness is what costs


def main(argv: Sequence[str]) -> int:
    """Write the model, measure each number of devices, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the files, 10^9 bytes")
    parser.add_argument("--devices", default="1,8", help="numbers of CPU devices, with commas")
    parser.add_argument("--dtype", choices=("stored", "float32"), default="float32")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        size = write_model(Path(folder) / "model", options.gb)
        seconds = round(time.monotonic() - began, 2)
        for devices in map(int, options.devices.split(",")):
            found = measure(Path(folder) / "model", devices, options.dtype)
            print(json.dumps({"files_bytes": size, "write_s": seconds} | found), flush=True)
    return 0


def write_model(folder: Path, gb: float) -> int:
    """Write a random model of about ``gb`` 10^9 bytes; return the bytes of its tensors.

    The layers share one random matrix of each kind and differ in their norms: what is measured
    does not depend on the values, and the norms tell whether each layer came to its place.
    """
    import ml_dtypes
    import numpy as np

    from skyrl_jax.core.config import ModelConfig
    from skyrl_jax.models import hf
    from skyrl_jax.models.families import layer_shapes, param_shapes

    shape: dict[str, Any] = dict(
        family="llama", vocab_size=VOCAB, hidden_size=WIDTH, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, intermediate_size=FFN, rope_theta=5e5,
        rms_norm_eps=1e-5, tie_embeddings=True, max_position=131_072, checkpoint="",
    )  # fmt: skip
    one = ModelConfig(**shape, num_layers=1)
    a_layer = sum(math.prod(size) for size in layer_shapes(one).values())
    layers = max(2, round((gb * 1e9 / 2 - VOCAB * WIDTH) / a_layer))
    cfg = ModelConfig(**shape, num_layers=layers)
    rng = np.random.default_rng(0)

    def leaf(name: str, size: tuple[int, ...]) -> Any:
        if name == "embedding":
            return np.tile(draw(size[0] // _REPEAT, size[1]), (_REPEAT, 1))
        if len(size) < 3:
            return draw(*size)
        return np.broadcast_to(draw(*size[:0:-1]).T, size)  # as it lies in the file: no copy there

    def draw(*size: int) -> Any:
        return rng.standard_normal(size, np.float32).astype(ml_dtypes.bfloat16)

    params = {
        group: {name: leaf(name, size) for name, size in leaves.items()}
        for group, leaves in param_shapes(cfg).items()
    }
    hf.save_hf(folder, cfg, params, max_shard_bytes=10**9)
    return sum(x.nbytes for leaves in params.values() for x in leaves.values())


def measure(folder: Path, devices: int, dtype: str) -> dict[str, Any]:
    """Load a folder in a child with so many CPU devices; return what it measured.

    Raises:
        RuntimeError: the child failed; says how.
    """
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [sys.executable, __file__, CHILD, str(folder), dtype],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"loading ended with {done.returncode}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure_here(folder: str, dtype: str) -> None:
    import jax
    import numpy as np

    from skyrl_jax.core.config import MeshConfig
    from skyrl_jax.models import hf
    from skyrl_jax.models.sharding import make_mesh, param_shardings

    cfg = hf.load_config(folder)
    mesh = make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1, context=1, expert=1))
    shardings = param_shardings(cfg, mesh)
    jax.block_until_ready(jax.device_put(np.zeros(8), mesh.devices.flat[0]))
    before, began = _memory("VmRSS"), time.monotonic()
    target = None if dtype == "stored" else np.float32
    params = hf.load_sharded(folder, cfg, shardings, dtype=target)
    seconds, peak = time.monotonic() - began, _memory("VmHWM") - before
    leaves = jax.tree.leaves(params)
    shards = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    result = {
        "devices": jax.device_count(),
        "dtype": dtype,
        "shards_bytes": shards,
        "peak_bytes": peak,
        "beside_bytes": peak - shards,
        "load_s": round(seconds, 2),
        "right": _right(folder, params),
    }
    print(json.dumps(result), flush=True)


def _memory(name: str) -> int:
    # Not getrusage: its peak begins with that of the process that started this one.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def _right(folder: str, params: Any) -> bool:
    """Compare every norm, a part of the embedding and of the last layer with the files."""
    import numpy as np
    from safetensors import safe_open

    stored = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(path), framework="numpy") as handle:
            for name in handle.keys():
                stored[name] = handle.get_slice(name)[:64]
    layers = params["layers"]
    last = f"model.layers.{layers['down'].shape[0] - 1}.mlp.down_proj.weight"
    pairs = [
        (params["embed"]["embedding"][:64], stored["model.embed_tokens.weight"]),
        (layers["down"][-1, :, :64].T, stored[last]),
    ]
    pairs += [
        (layers["mlp_norm"][at, :64], stored[f"model.layers.{at}.post_attention_layernorm.weight"])
        for at in range(layers["mlp_norm"].shape[0])
    ]
    return all(bool((np.asarray(x) == y.astype(x.dtype)).all()) for x, y in pairs)


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        _measure_here(*sys.argv[2:])
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
