"""The job's own step, compiled for a TPU that is not here: its real memory and transfers."""

import json
import subprocess
import sys

import pytest

from skyrl_jax.plan.child import child_env, compile_job
from skyrl_jax.plan.chips import parse_topology

MODEL = dict(
    vocab_size=1024, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=128,
    intermediate_size=512, tie_embeddings=False,
)  # fmt: skip
PARAMS_OF_LAYER = 256 * (4 + 2 + 2 + 4) * 128 + 3 * 256 * 512 + 2 * 256 + 2 * 128
PARAMS_BESIDE = 2 * 1024 * 256 + 256


def test_state_and_transfers_of_two_and_four_layers(make_plan, tpu_compiler):
    """One test, for it compiles both steps once (15 s each).

    The head works in eight chunks, so that no other loop has as many trips as there are layers.
    """
    mesh = {"fsdp": 4}
    compiled = {
        layers: compile_job(
            make_plan("v5e:2x2", rows=32, seq_len=128, mesh=mesh, num_layers=layers, **MODEL)
        )
        for layers in (2, 4)
    }
    for layers, answer in compiled.items():
        check_memory(layers, answer)
    check_transfers(compiled)


def check_memory(layers, answer):
    assert answer.fits and answer.devices_per_chip == 1
    assert answer.mesh["fsdp"] == 4 and answer.reference == 0
    state = 12 * (layers * PARAMS_OF_LAYER + PARAMS_BESIDE) / 4
    # Norm scales lie whole on every device.
    assert answer.params + answer.optimizer == pytest.approx(state, rel=0.01)
    assert answer.optimizer == pytest.approx(2 * answer.params, rel=0.001)
    batch = 8 * 32 * 128 * 4 / 4  # eight arrays of 32 x 128 words over four devices
    assert answer.arguments == pytest.approx(state + batch, rel=0.02)
    assert 0 < answer.temporaries < answer.peak
    assert answer.peak > answer.arguments


def check_transfers(compiled):
    inside = {n: [c for c in a.collectives if n in c.loops] for n, a in compiled.items()}
    outside = {n: [c for c in a.collectives if n not in c.loops] for n, a in compiled.items()}
    # Twice the layers send twice the bytes inside the layers, and what is outside stays.
    assert sent(inside[2]) > 0
    assert sent(inside[4]) == 2 * sent(inside[2])
    assert sent(outside[4]) == pytest.approx(sent(outside[2]), rel=0.05)
    # Every loop but that over micro-batches has a number of trips.
    assert all(c.loops.count(None) <= 1 for c in inside[4] + outside[4])
    # Forward and backward each gather the weights in bf16: three of four parts come in. The
    # gradients are scattered once, in bf16 too.
    once = 4 * PARAMS_OF_LAYER * 2 * 3 / 4
    gathered = sent([c for c in inside[4] if c.kind == "all-gather"])
    assert 1.9 * once < gathered < 3.1 * once
    scattered = sent([c for c in inside[4] if c.kind == "reduce-scatter"])
    assert scattered == pytest.approx(once, rel=0.01)


def sent(collectives):
    return sum(c.sent * c.runs for c in collectives)


DEVICES = """
import json, os, sys
from skyrl_jax.core.config import MeshConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models.sharding import make_mesh
from skyrl_jax.plan.chips import parse_topology
from skyrl_jax.plan.topology import devices_per_chip, open_devices

found = {}
for text in sys.argv[1:]:
    try:
        devices = open_devices(parse_topology(text))
        found[text] = [len(devices), devices_per_chip(devices)]
    except ConfigError as error:
        found[text] = str(error)
found["meshes"] = {}
for text, axes in (
    ("v5p:4x4x4", {"fsdp": 32, "tensor": 2}),
    ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}),
    ("v6e:4x4", {"fsdp": 8, "tensor": 2}),
    ("v6e:4x4", {"fsdp": 3}),
    ("tpu7x:2x2x1", {"fsdp": 8}),
    ("v5e:4x4", {"fsdp": 8, "tensor": 2}),
):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1} | axes
    name = " ".join([text, *map(str, axes.values())])
    try:
        make_mesh(MeshConfig(**sizes), open_devices(parse_topology(text)))
        found["meshes"][name] = ""
    except ConfigError as error:
        found["meshes"][name] = str(error)
print(json.dumps(found), flush=True)
os._exit(0)
"""


def test_devices_of_every_kind_of_chip(tpu_compiler):
    """As many JAX devices per chip as the table says; a slice that libtpu cannot make is told."""
    texts = ["v4:2x2x2", "v5e:1x1", "v5e:2x4", "v5p:2x2x1", "v6e:4x4", "tpu7x:2x2x1"]
    env = child_env(parse_topology("v5e:2x4"))
    argv = [sys.executable, "-c", DEVICES, *texts, "v5e:3x5"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for text in texts:
        topology = parse_topology(text)
        assert found[text] == [topology.num_devices, topology.chip.devices], text
    assert "libtpu makes no topology 'v5e:3x5'" in found["v5e:3x5"]
    # What the job itself builds: a mesh of each kind is there, or is told with what would map.
    refused = {name: told for name, told in found["meshes"].items() if told}
    assert set(refused) == {"v5p:4x4x4 32 2", "v6e:4x4 8 2", "v6e:4x4 3"}, refused
    assert "the mesh fsdp = 32, tensor = 2 does not map" in refused["v5p:4x4x4 32 2"]
    assert "wired as 4x4x4" in refused["v5p:4x4x4 32 2"]
    assert "may be 64; 16 x 4; 4 x 4 x 4, in any order" in refused["v5p:4x4x4 32 2"]
    assert "may be 16; 4 x 4, in any order" in refused["v6e:4x4 8 2"]
    assert "no whole block of chips" in refused["v6e:4x4 3"]
