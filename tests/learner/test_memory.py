"""What the step keeps and what it compiles: one program, little memory, offloaded moments."""

import functools
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from skyrl_jax.core.config import MeshConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.learner import state as state_lib
from skyrl_jax.learner import step as step_lib
from skyrl_jax.models.sharding import AXES, make_mesh

train_step = functools.cache(step_lib.make_train_step)
logprob_step = functools.cache(step_lib.make_logprob_step)


@pytest.fixture
def compiles():
    """Return how often XLA was called in a block: compiles(lambda: ...)."""

    def count(run):
        seen = []

        def listen(event, duration, **_):
            if event == "/jax/core/compile/backend_compile_duration":
                seen.append(duration)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            run()
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        return len(seen)

    return count


def test_no_micro_batch_count_compiles_again(
    model_cfg, learner_cfg, objective, sequences, pack, replace, compiles
):
    """One to six micro-batches of one row, in any order, in the program of the first."""
    cfg = replace(learner_cfg, micro_rows=1)
    rows = [[0], [1], [2], [3], [4], [0]]
    batches = [pack(sequences, rows[:n] + [[]] * (6 - n), 24) for n in (6, 1, 4, 2, 5)]
    step, score = train_step(model_cfg, cfg, objective), logprob_step(model_cfg, cfg)
    state = state_lib.init_state(model_cfg, cfg, jax.random.key(1))

    def run(given):
        nonlocal state
        score(state.params, given).logprobs.block_until_ready()
        state, metrics = step(state, given)
        return {name: float(x) for name, x in metrics.items()}

    assert compiles(lambda: jax.jit(lambda x: x * 3.25)(np.float32(1))) == 1  # it does count
    run(batches[0])
    programs = step._cache_size(), score._cache_size()
    tokens = []
    assert compiles(lambda: tokens.extend(run(b)["num_tokens"] for b in batches[1:])) == 0
    assert tokens == [float((b.segment_ids != 0).sum()) for b in batches[1:]]
    assert (step._cache_size(), score._cache_size()) == programs


def test_a_single_cpu_would_copy_a_donated_state(
    model_cfg, learner_cfg, objective, sequences, pack
):
    """So it gets none, and holds no more. Eight devices take it over: eight_devices.py."""
    batch = pack(sequences, [[0, 1], [4, 2]], 24)
    step = step_lib.make_train_step(model_cfg, learner_cfg, objective)
    state = state_lib.init_state(model_cfg, learner_cfg, jax.random.key(1))

    def held(step):
        memory = step.lower(state, batch).compile().memory_analysis()
        beside = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + beside + memory.temp_size_in_bytes

    assert held(step) <= 1.1 * held(jax.jit(step.__wrapped__, donate_argnums=0))
    after, _ = step(state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, after)))


def test_offloaded_moments_lie_beside_their_params_in_host_memory(model_cfg, learner_cfg, replace):
    mesh = AbstractMesh((1, 4, 2, 1, 1), AXES)
    cfg = replace(learner_cfg, offload_optimizer=True)
    here, there = (state_lib.state_shardings(model_cfg, c, mesh) for c in (learner_cfg, cfg))
    assert jax.tree.map(lambda s: s.spec, here) == jax.tree.map(lambda s: s.spec, there)
    moments = there.opt_state.inner[0][0]
    for tree in (moments.mu, moments.nu):
        assert {s.memory_kind for s in jax.tree.leaves(tree)} == {"pinned_host"}
    near = [there.step, there.params, moments.count, there.opt_state.num_applied]
    assert "pinned_host" not in {s.memory_kind for s in jax.tree.leaves(near)}
    assert "pinned_host" not in {s.memory_kind for s in jax.tree.leaves(here)}


def test_offload_without_a_mesh_or_on_a_cpu_is_named(model_cfg, learner_cfg, objective, replace):
    cfg = replace(learner_cfg, offload_optimizer=True)
    live = len(jax.live_arrays())
    with pytest.raises(ConfigError, match=r"learner\.offload_optimizer.*needs a mesh.*make_mesh"):
        step_lib.make_train_step(model_cfg, cfg, objective)
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1))
    with pytest.raises(ConfigError, match=r"learner\.offload_optimizer.*are CPUs.*use False"):
        step_lib.make_train_step(model_cfg, cfg, objective, mesh)
    with pytest.raises(ConfigError, match=r"learner\.offload_optimizer"):
        state_lib.state_from_params(model_cfg, cfg, {}, mesh)
    assert len(jax.live_arrays()) <= live


def test_offload_takes_8_bytes_a_parameter_off_a_v5e_chip(repo_root, child_env):
    done = subprocess.run(
        [sys.executable, str(repo_root / "benchmarks" / "offload.py"), "--layers=2"],
        env=child_env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["expected"] == 8 * out["params_per_device"]
    assert out["saved"] == pytest.approx(out["expected"], rel=1e-3), out
