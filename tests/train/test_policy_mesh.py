"""On a mesh: weights of a folder, reference and adapters lie like the policy, before and after."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from pathlib import Path
import jax
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models import hf
from skyrl_jax.models.decoder import init_params
from skyrl_jax.train.policy import Policy
from tests.train import tiny

assert jax.device_count() == 4
root = Path(sys.argv[1])

def where(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): str(leaf.sharding.spec) for path, leaf in flat}

def restart(config, folder, updates):
    with Policy(config, folder) as policy:
        policy.start_rl()
        started = tiny.bits(policy.frozen)
        same_place = where(policy.frozen) == where(policy.params)
        for _ in range(updates):
            policy.update([tiny.batch(1.0, micro_rows=4)])
        policy.save(0, {})
        before = tiny.bits(policy.state), where(policy.state), where(policy.frozen)
        moved = tiny.bits(policy.params) != started
    with Policy(config, folder) as policy:
        policy.restore()
        after = tiny.bits(policy.state), where(policy.state), where(policy.frozen)
        kept = tiny.bits(policy.frozen) == started
        spec = where(policy.state.params)
    return started, dict(same=before == after, kept=kept, same_place=same_place, moved=moved,
                         frozen=before[2], spec=spec)

try:  # two rows on four devices
    Policy(tiny.config(mesh__fsdp=-1), root / "none")
except ConfigError as error:
    refused = str(error)
assert not jax.live_arrays()

first = init_params(tiny.config().model, jax.random.key(5))
hf.save_hf(root / "hf", tiny.config().model, first)
start = dict(model__checkpoint=str(root / "hf"), mesh__fsdp=-1, learner__lr=1e-2,
             learner__micro_rows=4)

bits, full = restart(tiny.config(objective__kl_coef=0.1, **start), root / "full", 1)
full["loaded"] = bits == tiny.bits(first)
_, lora = restart(tiny.config(learner__lora_rank=2, **start), root / "lora", 0)
print(json.dumps([full, lora, refused]))
"""


def test_a_run_on_four_devices_restarts_with_the_same_bits_in_the_same_places(child_env, tmp_path):
    env = child_env | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    full, lora, refused = json.loads(done.stdout.splitlines()[-1])
    assert "learner.micro_rows = 2:" in refused and "1 x 4 x 1 = 4 devices" in refused
    assert "set learner.micro_rows to 4" in refused
    for found in (full, lora):
        assert found["same"] and found["kept"] and found["same_place"], found
        assert "'fsdp'" in found["frozen"]["['layers']['q']"]
    assert full["moved"] and full["loaded"]
    assert not lora["moved"]
    assert "'fsdp'" in lora["spec"]["['layers']['q']['a']"]
