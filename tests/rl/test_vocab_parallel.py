"""The head spread over eight devices: same numbers, and it never travels (read in the program)."""

import json
import subprocess
import sys

import pytest

SCRIPT = r"""
import json, math, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from skyrl_jax.core.config import MeshConfig
from skyrl_jax.models.sharding import make_mesh, spec
from skyrl_jax.rl.logprobs import token_logprobs, vocab_parallel_logprobs

assert jax.device_count() == 8
B, T, D, V, CHUNK = 8, 24, 64, 1024, 32
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"

def weigh(logprobs, entropy):
    return jnp.sum(jnp.sin(logprobs)) + 0.3 * jnp.sum(jnp.cos(entropy))

def plain(hidden, head, targets, temperature, gradient):
    flat = (hidden.reshape(-1, D), head, targets.reshape(-1), temperature.reshape(-1))
    both = token_logprobs(*flat, chunk=CHUNK, entropy_gradient=gradient)
    both = tuple(x.reshape(targets.shape) for x in both)
    return weigh(*both), both

def spread(mesh, rows, vocab, gradient):
    def f(hidden, head, targets, temperature):
        both = vocab_parallel_logprobs(hidden, head, targets, temperature, mesh=mesh, rows=rows,
            vocab=vocab, chunk=CHUNK, entropy_gradient=gradient)
        return weigh(*both), both
    return f

def collectives(text):
    "Return [(in a loop, kind, largest element count of a result)] of a compiled program."
    found, bodies, calls, name = [], set(), {}, None
    for line in text.splitlines():
        start = re.match(r"^(?:ENTRY )?%?([\w.-]+) \(", line)
        if start:
            name = start.group(1)
            calls.setdefault(name, set())
        bodies |= set(re.findall(r"(?:body|condition)=%?([\w.-]+)", line))
        calls.get(name, set()).update(re.findall(r"(?:calls|to_apply|body)=%?([\w.-]+)", line))
        op = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
        if op:
            dims = re.findall(r"[a-z]\w*\[([\d,]*)\]", op.group(1))
            sizes = [math.prod(int(n) for n in d.split(",") if n) for d in dims]
            found.append((name, op.group(2), max(sizes)))
    looped, queue = set(), list(bodies)
    while queue:
        at = queue.pop()
        if at not in looped:
            looped.add(at)
            queue += calls.get(at, ())
    return [(name in looped, kind, size) for name, kind, size in found]

rng = np.random.default_rng(0)
temperature = rng.choice([0.6, 1.0, 1.7], (B, T)).astype(np.float32)
out = []
for axes, num_rows, dtype, gradient in (
    (dict(data=2, fsdp=2, tensor=2, context=1), 8, jnp.float32, True),
    (dict(data=1, fsdp=4, tensor=2, context=1), 8, jnp.float32, False),
    (dict(data=2, fsdp=1, tensor=2, context=2), 6, jnp.float32, True),
    (dict(data=1, fsdp=4, tensor=1, context=2), 3, jnp.float32, True),  # rows fit no axis
    (dict(data=2, fsdp=2, tensor=2, context=1), 8, jnp.bfloat16, False),
):
    mesh = make_mesh(MeshConfig(**axes))
    values = (
        rng.normal(size=(num_rows, T, D)).astype(np.float32),
        rng.normal(size=(D, V)).astype(np.float32) / 8,
        rng.integers(0, V, (num_rows, T)).astype(np.int32),
        temperature[:num_rows],
    )
    rows = spec(mesh, ("rows", "tokens"), (num_rows, T))
    whole = spec(mesh, ("embed", "vocab"), (D, V))
    places = [NamedSharding(mesh, s) for s in (rows, whole, rows, rows)]
    given = [jnp.asarray(values[0], dtype), *map(jnp.asarray, values[1:])]
    want = jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True), static_argnums=4)(
        *given, gradient)
    given = [jax.device_put(x, s) for x, s in zip(given, places)]
    step = jax.jit(
        jax.value_and_grad(spread(mesh, rows, whole, gradient), (0, 1), has_aux=True),
        out_shardings=(None, tuple(places[:2])),
    ).lower(*given).compile()
    got = step(*given)
    scale = [float(jnp.abs(x.astype(jnp.float32)).max()) for x in jax.tree.leaves(want)]
    errors = [
        float(np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)).max()) / s
        for x, y, s in zip(jax.tree.leaves(got), jax.tree.leaves(want), scale)
    ]
    part = D * V // math.prod(mesh.shape[a] for a in np.atleast_1d(whole[1]))
    seen = collectives(step.as_text())
    out.append(dict(
        axes=axes, dtype=dtype.__name__, errors=errors, part=part, num_tokens=num_rows * T,
        gathered=max([s for _, kind, s in seen if kind == "all-gather"], default=0),
        looped=max([s for loop, _, s in seen if loop], default=0),
        outside=sum(s >= part for loop, _, s in seen if not loop),
        in_loop=sum(loop for loop, _, _ in seen)))
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def results(child_env):
    env = child_env | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_numbers_are_those_of_one_device(results):
    """Loss, log-probs, entropies and both gradients, relative to the largest value of each.

    Sums over the vocabulary and over tokens run in another order, which fp32 gradients show first.
    In bfloat16 a hidden state's gradient is a sum of partial sums that were rounded.
    """
    assert len(results) == 5
    for case in results:
        loss, logprobs, entropy, *gradients = case["errors"]
        assert len(gradients) == 2
        assert max(loss, logprobs) < 1e-6 and entropy < 3e-6, case
        assert max(gradients) < (3e-6 if case["dtype"] == "float32" else 1e-2), case


def test_the_head_is_never_gathered_and_no_loop_moves_its_size(results):
    """In the compiled forward and backward program, on every mesh."""
    hidden, chunk, model = 64, 32, 64
    for case in results:
        assert case["in_loop"] >= 4, case  # the program was really read: pmax and psum, twice
        # The largest that travels in a loop is one chunk of hidden states, below the head's part.
        assert case["looped"] <= chunk * model < case["part"], case
        assert case["gathered"] <= chunk * model, case
        assert case["gathered"] < case["num_tokens"] * hidden, case
        # The head's gradient is summed over the other axes at most once, after the loop.
        assert case["outside"] <= 1, case
