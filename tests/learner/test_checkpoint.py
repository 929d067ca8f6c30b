"""Checkpoints: bit-equal, atomic, and honest about what they had to pass over."""

import json
import os
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from skyrl_jax.core.errors import CheckpointError
from skyrl_jax.learner.checkpoint import Checkpoints
from skyrl_jax.learner.state import abstract_state, init_state


@pytest.fixture
def template(model_cfg, learner_cfg):
    return abstract_state(model_cfg, learner_cfg)


@pytest.fixture
def make_state(model_cfg, learner_cfg):
    def make(seed):
        state = init_state(model_cfg, learner_cfg, jax.random.key(seed))
        # Non-zero moments, and values that only a bitwise copy keeps.
        moments = jax.tree.map(lambda x: x + seed if x.ndim else x, state.opt_state)
        scale = state.params["final_norm"]["scale"].at[:3].set(np.array([-0.0, 1e-42, 3e38]))
        params = state.params | {"final_norm": {"scale": scale}}
        return state._replace(step=state.step + seed, params=params, opt_state=moments)

    return make


def assert_bit_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def big_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_array_byte(folder):
    """Change one byte in the middle of the array data."""
    path = big_file(folder / "state")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def truncate_arrays(folder):
    path = big_file(folder / "state")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def remove_state(folder):
    for path in sorted((folder / "state").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


def change_host(folder):
    path = folder / "host" / "metadata"
    path.write_text(path.read_text().replace('"cursor": 2', '"cursor": 3'))


def cut_host(folder):
    path = folder / "host" / "metadata"
    path.write_text(path.read_text()[:40])


def test_round_trip_is_bit_equal_and_keeps_n(tmp_path, make_state, template):
    host = {"cursor": 7, "rng": [1, 2**40], "ledger": {"sampled": 3.5}, "config": {"a.b": [1]}}
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.restore(template) is None
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), host | {"cursor": step})
        assert checkpoints.steps() == [2, 3]
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        found = checkpoints.restore(template)
    assert (found.step, found.skipped) == (3, ())
    assert found.host == host | {"cursor": 3}
    assert_bit_equal(found.state, make_state(3))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_array_byte, "bits|cannot be read"),
        (truncate_arrays, "cannot be read"),
        (remove_state, "cannot be read"),
        (change_host, "host state is not what was saved"),
        (cut_host, "host state cannot be read"),
    ],
)
def test_damaged_newest_falls_back_and_says_so(tmp_path, make_state, template, damage, reason):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {"cursor": step})
    damage(tmp_path / "000002")
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        found = checkpoints.restore(template)
        assert found.step == 1 and found.host == {"cursor": 1}
        assert_bit_equal(found.state, make_state(1))
        (skipped,) = found.skipped
        assert skipped.step == 2
        assert re.search(reason, skipped.reason), skipped.reason
        assert os.path.isdir(skipped.moved_to)
        # The step can be written again.
        checkpoints.save(2, make_state(2), {"cursor": 2})
        assert checkpoints.restore(template).step == 2


def test_a_flipped_bit_in_memory_order_is_found_by_the_sums(tmp_path, make_state, template):
    """Even a file that reads without an error: the recorded sums disagree."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        checkpoints.save(2, make_state(2), {})
    from skyrl_jax.learner import checkpoint as lib

    path = tmp_path / "000002" / "host" / "metadata"
    document = json.loads(path.read_text())
    document["leaves"]["params.layers.q"][2] ^= 1
    document["crc32"] = lib._crc({k: document[k] for k in ("host", "leaves")})
    path.write_text(json.dumps(document))
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        found = checkpoints.restore(template)
    assert found.step == 1
    assert "bits of params.layers.q" in found.skipped[0].reason


def test_nothing_usable_is_an_error_not_a_fresh_start(tmp_path, make_state, template):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(1, make_state(1), {})
    cut_host(tmp_path / "000001")
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used .*step 1"):
            checkpoints.restore(template)


def test_another_model_is_refused_not_skipped(
    tmp_path, make_state, model_cfg, learner_cfg, replace
):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        other = abstract_state(replace(model_cfg, intermediate_size=28), learner_cfg)
        with pytest.raises(CheckpointError, match=r"another model.*layers\.down.*24.*28"):
            checkpoints.restore(other)
        assert checkpoints.steps() == [1]


def test_replaying_a_step_replaces_it(tmp_path, make_state, template):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(1, make_state(1), {"try": 1})
        checkpoints.save(1, make_state(1), {"try": 2})
        assert checkpoints.restore(template).host == {"try": 2}
        assert checkpoints.steps() == [1]


SETUP = """
import sys
import jax
from skyrl_jax.core.config import LearnerConfig, ModelConfig
from skyrl_jax.core.errors import CheckpointError
from skyrl_jax.learner.checkpoint import Checkpoints
from skyrl_jax.learner.state import abstract_state, init_state

def configs(hidden):
    model = ModelConfig(family="qwen3", vocab_size=40, hidden_size=hidden, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=24, rope_theta=1e4,
        rms_norm_eps=1e-6, tie_embeddings=True, max_position=64, checkpoint="")
    learner = LearnerConfig(lr=1e-2, schedule="constant", warmup_steps=0, decay_steps=0,
        min_lr_fraction=0.1, weight_decay=0.0, beta1=0.9, beta2=0.95, moment_dtype="float32",
        max_grad_norm=0.0, compute_dtype="float32", row_length=24, micro_rows=2,
        updates_per_batch=1, epochs_per_batch=1, logprob_chunk=16, remat="none")
    return model, learner

def state(hidden):
    return init_state(*configs(hidden), jax.random.key(0))
"""


def test_killed_while_writing_leaves_the_previous_one(tmp_path, child_env, template, make_state):
    """The process dies (SIGKILL) when its arrays are on disk and the rename is still to come."""
    script = SETUP + textwrap.dedent("""
    import os, pathlib, signal
    with Checkpoints(sys.argv[1], keep=3) as checkpoints:
        checkpoints.save(1, state(16), {"cursor": 1})
        def die(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)
        for name in ("rename", "replace"):
            setattr(os, name, die)
        pathlib.Path.rename = die
        checkpoints.save(2, state(16), {"cursor": 2})
    print("not killed")
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=child_env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -9, done.stdout + done.stderr
    left = {p.name for p in tmp_path.iterdir()}
    assert "000001" in left and len(left) == 2, left  # the half-written one is there
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        found = checkpoints.restore(template)
        assert (found.step, found.host, found.skipped) == (1, {"cursor": 1}, ())
        assert [p.name for p in tmp_path.iterdir()] == ["000001"]
        checkpoints.save(2, make_state(2), {"cursor": 2})
        assert checkpoints.restore(template).step == 2


def test_full_disk_is_said_and_the_last_good_one_stays(tmp_path, child_env):
    """A real full disk: a small tmpfs in a mount namespace of its own."""
    script = SETUP + textwrap.dedent("""
    import os
    root = sys.argv[1]
    small, large = state(16), state(4096)  # the large one: 3 MB that do not compress
    with Checkpoints(root, keep=3) as checkpoints:
        checkpoints.save(1, small, {"cursor": 1})
        try:
            checkpoints.save(2, large, {"cursor": 2})
        except CheckpointError as error:
            print("ERROR:", error)
        assert checkpoints.steps() == [1], checkpoints.steps()
        assert os.listdir(root) == ["000001"], os.listdir(root)
        checkpoints.save(2, small, {"cursor": 2})
    assert sorted(os.listdir(root)) == ["000001", "000002"], os.listdir(root)
    with Checkpoints(root, keep=3) as checkpoints:
        found = checkpoints.restore(abstract_state(*configs(16)))
        print("RESTORED", found.step, found.host, found.skipped)
    """)
    mount = tmp_path / "mount"
    mount.mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = f'mount -t tmpfs -o size=1M none {mount} && exec {sys.executable} -c "$0" {mount}'
    done = subprocess.run(
        ["unshare", *user, "--mount", "sh", "-c", command, script],
        env=child_env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"cannot write checkpoint 2: the disk under {mount} is full" in done.stdout
    assert "the last good one is step 1" in done.stdout
    assert "RESTORED 2 {'cursor': 2} ()" in done.stdout
