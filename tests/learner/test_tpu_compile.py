"""The train step compiled for a TPU that is not here (libtpu compiles without one): the program.

Splash attention inside; heads spread over ``tensor`` once, tokens over ``context`` once. What the
numbers are worth is tested on CPU devices (tests/models/test_attention.py); this reads the text.
"""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from skyrl_jax.plan.child import libtpu_env
from tests.models import hlo

SCRIPT = r"""
import dataclasses, json, os, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from skyrl_jax.core.config import LearnerConfig, ModelConfig, ObjectiveConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.types import Batch
from skyrl_jax.learner.state import abstract_state, placed, state_shardings
from skyrl_jax.learner.step import make_train_step
from skyrl_jax.models.sharding import AXES, row_sharding

job = json.loads(sys.argv[1])
listed = lambda values: {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
model, learner = ModelConfig(**job["model"]), LearnerConfig(**job["learner"])
objective = ObjectiveConfig(**listed(job["objective"]))
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices

def mesh_of(sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))

refused = []
for row_length, sizes in job["refused"]:
    try:
        make_train_step(model, dataclasses.replace(learner, row_length=row_length), objective,
            mesh_of(sizes))
    except ConfigError as error:
        refused.append(str(error))
with open(os.path.join(job["folder"], "refused.json"), "w") as f:
    json.dump(refused, f)

for number, sizes in enumerate(job["meshes"]):
    mesh = mesh_of(sizes)
    state = placed(abstract_state(model, learner), state_shardings(model, learner, mesh))
    rows = (2 * learner.micro_rows, learner.row_length)
    array = lambda dtype: jax.ShapeDtypeStruct(rows, dtype, sharding=row_sharding(mesh, rows))
    ints, floats = ("tokens", "segment_ids", "positions"), (
        "behavior_logprobs", "advantages", "loss_weights", "temperature")
    batch = Batch(**{n: array(jnp.int32) for n in ints}, **{n: array(jnp.float32) for n in floats})
    step = make_train_step(model, learner, objective, mesh)
    compiled = step.lower(state, batch).compile()
    with open(os.path.join(job["folder"], f"{number}.hlo"), "w") as f:
        f.write(compiled.as_text())
    memory = compiled.memory_analysis()
    with open(os.path.join(job["folder"], f"{number}.json"), "w") as f:
        json.dump(memory.peak_memory_in_bytes - memory.argument_size_in_bytes, f)
sys.stdout.flush()
os._exit(0)  # libtpu hangs at exit
"""

MESHES = ({"fsdp": 4, "tensor": 2}, {"fsdp": 4, "context": 2})
# Row lengths and meshes that a job on TPUs cannot have, and what it is told.
REFUSED = (
    (512, {"fsdp": 2, "tensor": 4}, "mesh.tensor = 4 does not divide model.num_kv_heads"),
    (
        640,
        {"fsdp": 4, "context": 2},
        "rows of 640 tokens do not split evenly; make it a multiple of 512",
    ),
    (200, {"fsdp": 8}, "make it a multiple of 128 (blocks of 128 tokens of the TPU kernel)"),
)


@pytest.fixture
def tpu_cfgs(model_cfg, learner_cfg, objective, replace):
    """Sizes at which no two kinds of arrays are alike: the head's part is the largest of all."""
    model = replace(
        model_cfg,
        vocab_size=8192,
        hidden_size=256,
        head_dim=128,
        intermediate_size=384,
        tie_embeddings=False,
        max_position=512,
    )
    learner = replace(
        learner_cfg,
        compute_dtype="bfloat16",
        row_length=512,
        micro_rows=4,
        logprob_chunk=256,
        remat="attn_out",
    )
    return model, learner, objective


def test_the_train_step_of_a_tpu(tpu_cfgs, tmp_path):
    model = tpu_cfgs[0]
    names = ("model", "learner", "objective")
    job = {n: dataclasses.asdict(c) for n, c in zip(names, tpu_cfgs, strict=True)}
    job |= {"meshes": MESHES, "folder": str(tmp_path), "refused": [x[:2] for x in REFUSED]}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(job)],
        env=libtpu_env(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Said while the step is made: these devices could not hold a byte.
    told = json.loads((tmp_path / "refused.json").read_text())
    assert len(told) == len(REFUSED)
    assert all(wanted[2] in message for wanted, message in zip(REFUSED, told, strict=True)), told
    head_part = model.hidden_size * model.vocab_size // 8
    k_or_v = model.hidden_size * model.num_kv_heads * model.head_dim // 2  # with tensor = 2
    for number, sizes in enumerate(MESHES):
        text = (tmp_path / f"{number}.hlo").read_text()
        program = hlo.parse(text)
        # Outside the loops no layers' weights in bf16: the masters are cast layer by layer.
        stacked = rf"bf16\[{model.num_layers},\d+,\d+\]"
        assert re.search(stacked, text) and not re.search(stacked, text.split("\nENTRY ")[1]), sizes
        # Forward, dq and dkv; "attn_out" is kept: the backward pass runs no second forward.
        assert program.mosaic_calls == 3, sizes
        moved = program.collectives()
        inner = [c for c in moved if c.depth > 1]  # the loops over layers and over chunks of tokens
        assert len(inner) > 10, sizes  # the program was really read
        # No head travels: inside these loops nothing as large as a device's part of it, and around
        # them (once a micro-batch) nothing as large as the head.
        assert max(c.size for c in inner) < head_part, (sizes, inner)
        assert max(c.size for c in moved) < 4 * head_part, (sizes, moved)
        # Weights of a layer are gathered in the compute dtype: half the bytes.
        gathered = [c for c in inner if c.kind == "all-gather" and c.size >= k_or_v]
        assert len(gathered) >= 7 and {c.dtype for c in gathered} == {"bf16"}, (sizes, gathered)
        # Gradients are added up over the micro-batches in fp32: those of embedding, head, q, k, v,
        # o, gate, up and down (norms are small).
        sums = [c.dtype for c in program.carries() if c.size >= 1000]
        assert sums == ["f32"] * 9, (sizes, program.carries())
        # The sums are where gradients are added, not beside them: 13.2 and 19.6 MB, else 13.5 and
        # 23.1 (a sum of all gradients is 2.7 MB a device).
        beside = json.loads((tmp_path / f"{number}.json").read_text())
        assert beside < (13.4e6, 21e6)[number], (sizes, beside)
