"""Every form of attention against one plain reference, forward and backward; its memory; meshes."""

import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.models import attention as lib
from skyrl_jax.models import decoder, layout
from skyrl_jax.models.blockwise import Tokens, blockwise_attention
from skyrl_jax.models.sharding import AXES

# Segments that cross blocks, one of a single token, padding behind, a row without padding.
PARTS = [[110, 1, 90, 60], [301]]


def case(parts, t, heads=4, kv_heads=2, dim=8, seed=0):
    """Return q, k, v, positions, segment_ids of rows whose segments have these lengths."""
    rng = np.random.default_rng(seed)
    b = len(parts)
    q, k, v = (rng.normal(size=(b, t, n, dim)) for n in (heads, kv_heads, kv_heads))
    positions, segments = np.zeros((b, t), np.int32), np.zeros((b, t), np.int32)
    for row, lengths in enumerate(parts):
        at = 0
        for number, n in enumerate(lengths):
            positions[row, at : at + n] = np.arange(n)
            segments[row, at : at + n] = number + 1
            at += n
    floats = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    return [*floats, jnp.asarray(positions), jnp.asarray(segments)]


def reference(q, k, v, positions, segments):
    """Return float64 outputs where tokens are real, and the loss's gradients, by the definition.

    Full scores, kv heads repeated, the mask by place in the row (``positions`` is not read). The
    loss is the sum of sin(3 out) over real tokens; its gradients are worked out by hand.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    segments, scale, groups = np.asarray(segments), math.sqrt(q.shape[-1]), k.shape[2]
    k, v = (np.repeat(x, q.shape[2] // groups, axis=2) for x in (k, v))
    place, real = np.arange(q.shape[1]), (segments != 0)[:, :, None, None]
    mask = (segments[:, :, None] == segments[:, None]) & (place[:, None] >= place)
    s = np.where(mask[:, None], np.einsum("bthk,bshk->bhts", q, k) / scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.where(real, np.einsum("bhts,bshk->bthk", p, v), 0.0)
    do = np.where(real, 3 * np.cos(3 * out), 0.0)
    dp = np.einsum("bthk,bshk->bhts", do, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / scale
    dq, dk = np.einsum("bhts,bshk->bthk", ds, k), np.einsum("bhts,bthk->bshk", ds, q)
    dv = np.einsum("bhts,bthk->bshk", p, do)
    # the gradients of a key are those of all query heads that read it
    dk, dv = (x.reshape(*x.shape[:2], groups, -1, x.shape[-1]).sum(3) for x in (dk, dv))
    return out, dq, dk, dv


def outputs_and_gradients(f, given):
    """Return what ``reference`` returns, of attention ``f``."""
    *floats, positions, segments = given
    real = (segments != 0)[:, :, None, None]

    def loss(q, k, v):
        out = f(q, k, v, positions, segments)
        assert out.dtype == q.dtype
        return jnp.sum(jnp.where(real, jnp.sin(3 * out.astype(jnp.float32)), 0.0)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*floats)
    assert np.isfinite(np.asarray(out, np.float32)).all()  # of padding too
    return np.where(real, out, 0.0), *grads


def assert_equal_to_reference(f, given, tolerance=2e-6):
    want, got = reference(*given), outputs_and_gradients(f, given)
    for name, x, y in zip(("out", "q", "k", "v"), got, want, strict=True):
        x = np.asarray(x, np.float64)
        assert x.shape == y.shape and np.isfinite(x).all(), name
        assert np.abs(x - y).max() <= tolerance * np.abs(y).max(), name


def blockwise(block):
    def f(q, k, v, positions, segments):
        tokens = Tokens(positions, segments, jnp.arange(q.shape[1], dtype=jnp.int32))
        return blockwise_attention(q, k, v, tokens, tokens, block=block)

    return f


def test_packed_form():
    assert_equal_to_reference(lib.packed_attention, case(PARTS, 301))


@pytest.mark.parametrize(
    "parts, t, heads, kv_heads, block",
    [
        (PARTS, 301, 4, 2, 64),  # neither length is a multiple of the block
        ([[37], []], 37, 4, 1, 512),  # one block; a row of padding alone
        ([[5] * 12], 61, 2, 2, 16),  # many segments: blocks before their first are left out
    ],
)
def test_blockwise_form(parts, t, heads, kv_heads, block):
    assert_equal_to_reference(blockwise(block), case(parts, t, heads, kv_heads))


def test_blockwise_takes_queries_in_any_order():
    """As on a device of a context-parallel mesh: some queries, shuffled, over whole rows."""
    q, k, v, positions, segments = case(PARTS, 301)
    want = reference(q, k, v, positions, segments)[0]
    some = np.random.default_rng(3).permutation(301)[:150].astype(np.int32)
    ours = Tokens(positions[:, some], segments[:, some], jnp.asarray(some))
    theirs = Tokens(positions, segments, jnp.arange(301, dtype=jnp.int32))
    run = jax.jit(blockwise_attention, static_argnames="block")
    got = np.asarray(run(q[:, some], k, v, ours, theirs, block=32))
    real = np.asarray(segments[:, some] != 0)
    np.testing.assert_allclose(got[real], want[:, some][real], atol=2e-6)


def test_splash_form_interpreted(monkeypatch):
    monkeypatch.setattr(lib, "SPLASH_BLOCK", 128)  # three blocks of queries and of keys
    given = case([[100, 200, 84], [150, 1, 149]], 384, dim=16)
    assert_equal_to_reference(lambda *x: lib.attention(*x, form="splash"), given)


def test_one_segment_form_is_causal_attention_alone():
    """cuDNN itself needs a GPU; its call's mathematics in XLA, and where it is chosen."""
    given = case([[90], [57]], 90)

    def f(q, k, v, positions, segments):
        return lib.one_segment_attention(q, k, v, implementation="xla")

    assert_equal_to_reference(f, given)


def test_bfloat16():
    *floats, positions, segments = case(PARTS, 301)
    given = [*(x.astype(jnp.bfloat16) for x in floats), positions, segments]
    assert_equal_to_reference(blockwise(64), given, tolerance=2e-2)


def test_the_choice():
    f32, b16 = jnp.float32, jnp.bfloat16
    for given, form in (
        (("cpu", 1024, f32), "packed"),
        (("cpu", 1025, f32), "blockwise"),
        (("cpu", 32768, b16, True, 4), "blockwise"),
        (("tpu", 512, b16, True), "splash"),
        (("tpu", 32768, b16, True, 4), "splash"),
        (("tpu", 4096, b16), "splash"),
        (("tpu", 24, b16), "packed"),  # no mesh: XLA may have to shard it
        (("gpu", 32768, b16, True), "blockwise"),  # packed rows
        (("gpu", 32768, b16, True, 1, True), "cudnn"),
        (("gpu", 32768, f32, True, 1, True), "blockwise"),  # cuDNN takes half precision only
        (("gpu", 32768, b16, True, 2, True), "blockwise"),  # it has no zigzag rows
    ):
        assert lib.choose_form(*given) == form, given


def test_short_rows_on_one_cpu_device_keep_their_bits():
    """Engine and learner agree bit for bit (tests/engine): the form is part of that."""
    given = case(PARTS, 301)
    want = np.asarray(jax.jit(lib.packed_attention)(*given))
    assert np.asarray(jax.jit(lib.attention)(*given)).tobytes() == want.tobytes()


def test_long_rows_never_hold_all_scores():
    """Compiled temporaries of forward and backward at T = 8192: a small part of H T T fp32."""
    t, heads = 8192, 4
    floats = [jax.ShapeDtypeStruct((1, t, n, 16), jnp.float32) for n in (heads, 2, 2)]
    ints = [jax.ShapeDtypeStruct((1, t), jnp.int32)] * 2

    def temporaries(f):
        gradient = jax.grad(lambda *given: jnp.sum(jnp.sin(f(*given))), (0, 1, 2))
        compiled = jax.jit(gradient).lower(*floats, *ints).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def whole(q, k, v, positions, segments):
        mask = (segments[:, :, None] == segments[:, None]) & (
            positions[:, :, None] >= positions[:, None]
        )
        return lib.masked_attention(q, k, v, mask)

    scores = heads * t * t * 4
    assert temporaries(whole) > scores  # the measure sees them where they are
    assert temporaries(lib.attention) < scores / 20


def test_remat_attn_out_keeps_output_and_logsumexp_of_long_rows():
    """With both the backward pass needs no second forward one."""
    q, k, v, positions, segments = case([[40, 24]], 64)

    def f(q, k, v):
        return blockwise(32)(q, k, v, positions, segments)

    kept = {}
    for remat in ("full", "attn_out"):
        policy = decoder.REMAT[remat]
        backward = jax.eval_shape(
            lambda *x, p=policy: jax.vjp(jax.checkpoint(f, policy=p), *x)[1], q, k, v
        )
        floats = [x for x in jax.tree.leaves(backward) if x.dtype == jnp.float32]
        kept[remat] = sum(x.size for x in floats)
    assert kept["full"] == q.size + k.size + v.size
    assert kept["attn_out"] == kept["full"] + q.size + q.size // q.shape[-1]


def abstract_mesh(**sizes):
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"mesh\.tensor = 4.*num_kv_heads = 2.*divisor of 2$",
    ):
        lib.check_rows_and_heads(4, 2, 64, abstract_mesh(tensor=4))
    with pytest.raises(ConfigError, match=r"learner\.row_length.*30 tokens.*multiple of 4 .*2 x"):
        lib.check_rows_and_heads(4, 2, 30, abstract_mesh(context=2))
    with pytest.raises(ConfigError, match=r"learner\.row_length.*200 tokens.*multiple of 128"):
        lib.attention(*case([[200]], 200), form="splash")
    with pytest.raises(ConfigError, match=r"multiple of 512"):
        layout.check_row_length(1280, 2, lib.LANES)
    for sizes in ({"tensor": 2}, {"context": 2}, {"data": 3, "tensor": 1}):
        lib.check_rows_and_heads(4, 2, 64, abstract_mesh(**sizes))


@pytest.mark.parametrize("t, context", [(8, 2), (24, 3), (32, 4)])
def test_zigzag_order(t, context):
    order = layout.zigzag_order(t, context)
    if t == 8:
        assert order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    devices = order.reshape(context, -1)
    # a token's work is how many it may see: the same on every device
    assert len({int((device + 1).sum()) for device in devices}) == 1
    for index, device in enumerate(devices):
        assert np.asarray(layout.zigzag_rows(index, t, context)).tolist() == device.tolist()
    back = layout.natural_order(jnp.asarray(order)[None, :, None], context)
    assert np.asarray(back)[0, :, 0].tolist() == list(range(t))


SCRIPT = r"""
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from skyrl_jax.models import attention as lib, decoder, layout
from skyrl_jax.models.sharding import AXES, param_shardings
from tests.models import tiny
from tests.models.test_attention import case, outputs_and_gradients, reference

assert jax.device_count() == 8
lib.SPLASH_BLOCK = 128
out = {}

def mesh_of(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))

def largest(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(y).max())
        for x, y in pairs)

# Attention alone: rows in natural order go in and come out.
for form, t, sizes in (
    ("packed", 48, dict(fsdp=2, tensor=2, context=2)),
    ("blockwise", 1040, dict(fsdp=2, tensor=2, context=2)),
    ("packed", 48, dict(tensor=2, context=4)),
    ("splash", 512, dict(fsdp=2, tensor=2, context=2)),
    ("splash", 128, dict(data=2, fsdp=2, tensor=2)),
):
    mesh = mesh_of(**sizes)
    num = sizes.get("context", 1)
    order = layout.zigzag_order(t, num) if num > 1 else np.arange(t)

    def spread(*given):
        chosen = None if form != "splash" else form
        got = lib.attention(*(x[:, order] for x in given), mesh=mesh, form=chosen)
        return got[:, np.argsort(order)]

    parts = [[t // 2 + 3, t // 4], [t // 3, 1, t // 3]] * (1 if t > 1024 else 2)
    given = case(parts, t)
    assert form == "splash" or lib.choose_form("cpu", t, jnp.float32, True, num) == form
    out[f"{form} {sizes}"] = largest(outputs_and_gradients(spread, given), reference(*given))

# The whole decoder: loss and gradients of every leaf, and which experts were chosen.
mesh = mesh_of(fsdp=2, tensor=2, context=2)
rows = tiny.rows(tiny.config("qwen3"), [[9, 20], [32], [5, 6, 7], []], 32)
real = (rows[2] != 0)[:, :, None]

def loss(cfg, params, mesh):
    hidden = decoder.hidden_fn(cfg, params, *rows, remat="attn_out", mesh=mesh)
    return jnp.sum(jnp.where(real, jnp.sin(hidden), 0.0))

cfg = tiny.config("qwen3", vocab_size=40)
params = tiny.params(cfg)
want = jax.jit(jax.value_and_grad(loss, 1), static_argnums=(0, 2))(cfg, params, None)
placed = jax.device_put(params, param_shardings(cfg, mesh))
got = jax.jit(jax.value_and_grad(loss, 1), static_argnums=(0, 2))(cfg, placed, mesh)
out["decoder"] = largest(got, want)

cfg = tiny.config("qwen3_moe", vocab_size=40, num_experts=4)
params = tiny.params(cfg)
f = jax.jit(decoder.hidden_and_stats_fn, static_argnums=0, static_argnames="mesh")
want, stats = f(cfg, params, *rows)
placed = jax.device_put(params, param_shardings(cfg, mesh))
got, ours = f(cfg, placed, *rows, mesh=mesh)
kept = np.asarray(real).reshape(-1)
assert (np.asarray(ours.chosen)[kept] == np.asarray(stats.chosen)[kept]).all()
out["experts"] = largest(np.where(real, got, 0), np.where(real, want, 0))
# Replayed in natural order: other experts for every token, the same on both sides.
other = (stats.chosen + 1) % 4
want = f(cfg, params, *rows, experts=other)[0]
got, ours = f(cfg, placed, *rows, experts=other, mesh=mesh)
assert (np.asarray(ours.chosen) == np.asarray(other)).all()
out["replayed"] = largest(np.where(real, got, 0), np.where(real, want, 0))
print(json.dumps(out))
"""


def test_eight_devices_equal_one(child_env):
    """Heads, rows and tokens spread: numbers and gradients of one device, by every form."""
    env = child_env | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 8
    for name, error in errors.items():
        assert error < 1e-5, (name, errors)
