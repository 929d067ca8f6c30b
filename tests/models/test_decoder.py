"""The decoder against a plain numpy float64 reference, written from the Qwen3 equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.models import decoder
from skyrl_jax.models.attention import masked_attention, packed_attention


def model_config(**changes):
    values = dict(
        family="qwen3",
        vocab_size=31,
        hidden_size=20,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=28,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        max_position=64,
        checkpoint="",
    )
    return ModelConfig(**(values | changes))


def random_params(cfg, seed=0):
    """Return params whose norms are not one, so that a missing scale shows."""
    params = decoder.init_params(cfg, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def stir(path, x):
        name = path[-1].key
        if name.endswith("norm") or name == "scale":
            return jnp.asarray(rng.uniform(0.5, 1.5, x.shape), jnp.float32)
        return x * (20.0 if name == "embedding" else 1.0)

    return jax.tree_util.tree_map_with_path(stir, params)


def reference_hidden(cfg, params, tokens):
    """Return the normed hidden states [T, D] of one sequence, in float64, token by token."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    t, kdim = len(tokens), cfg.head_dim

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_norm_eps) * scale

    def rotate(x):  # [T, heads, K]
        out = np.empty_like(x)
        for pos in range(t):
            for i in range(kdim // 2):
                angle = pos * cfg.rope_theta ** (-2 * i / kdim)
                a, b = x[pos, :, i], x[pos, :, i + kdim // 2]
                out[pos, :, i] = a * np.cos(angle) - b * np.sin(angle)
                out[pos, :, i + kdim // 2] = b * np.cos(angle) + a * np.sin(angle)
        return out

    x = p["embed"]["embedding"][tokens]
    for n in range(cfg.num_layers):
        w = {name: leaf[n] for name, leaf in p["layers"].items()}
        y = norm(x, w["attn_norm"])
        q = rotate(norm((y @ w["q"]).reshape(t, cfg.num_heads, kdim), w["q_norm"]))
        k = rotate(norm((y @ w["k"]).reshape(t, cfg.num_kv_heads, kdim), w["k_norm"]))
        v = (y @ w["v"]).reshape(t, cfg.num_kv_heads, kdim)
        mixed = np.zeros((t, cfg.num_heads, kdim))
        for head in range(cfg.num_heads):
            kv = head // (cfg.num_heads // cfg.num_kv_heads)
            for i in range(t):
                s = q[i, head] @ k[: i + 1, kv].T / np.sqrt(kdim)
                weight = np.exp(s - s.max())
                mixed[i, head] = weight / weight.sum() @ v[: i + 1, kv]
        x = x + mixed.reshape(t, -1) @ w["o"]
        y = norm(x, w["mlp_norm"])
        gate = y @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
    return norm(x, p["final_norm"]["scale"])


@pytest.mark.parametrize("tied", [False, True])
def test_packed_rows_equal_the_reference(tied):
    cfg = model_config(tie_embeddings=tied)
    params = random_params(cfg)
    rng = np.random.default_rng(1)
    parts = [[9, 4], [6, 5, 3]]
    tokens = rng.integers(0, cfg.vocab_size, (2, 15)).astype(np.int32)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, lengths in enumerate(parts):
        at = 0
        for number, n in enumerate(lengths):
            positions[row, at : at + n] = np.arange(n)
            segments[row, at : at + n] = number + 1
            at += n
    got = np.asarray(
        decoder.hidden_fn(
            cfg, params, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments)
        )
    )
    assert np.isfinite(got).all()
    for row, lengths in enumerate(parts):
        at = 0
        for n in lengths:
            want = reference_hidden(cfg, params, tokens[row, at : at + n])
            np.testing.assert_allclose(got[row, at : at + n], want, atol=5e-6)
            at += n


def test_blocks_of_queries_change_nothing():
    """Rows longer than a block, segments that cross block borders."""
    rng = np.random.default_rng(2)
    b, t, h, g, k = 2, 300, 4, 2, 8
    q, key, v = (jnp.asarray(rng.normal(size=(b, t, n, k)), jnp.float32) for n in (h, g, g))
    lengths = [110, 90, 60]
    positions = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(40, int)])
    segments = np.repeat([1, 2, 3, 0], [*lengths, 40])
    positions, segments = (jnp.asarray(np.stack([x, x]), jnp.int32) for x in (positions, segments))
    mask = (segments[:, :, None] == segments[:, None]) & (
        positions[:, :, None] >= positions[:, None]
    )
    want = masked_attention(q, key, v, mask)
    got = packed_attention(q, key, v, positions, segments)
    np.testing.assert_allclose(got[:, :260], want[:, :260], atol=2e-6)
    assert np.isfinite(np.asarray(got)).all()


def test_remat_gives_the_same_gradient():
    cfg = model_config()
    params = random_params(cfg)
    tokens = jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    positions = jnp.tile(jnp.arange(7, dtype=jnp.int32), (2, 1))

    def loss(p, remat):
        h = decoder.hidden_fn(cfg, p, tokens, positions, jnp.ones_like(tokens), remat=remat)
        return jnp.sum(jnp.sin(h))

    full, none = (jax.jit(jax.grad(loss), static_argnums=1)(params, r) for r in ("full", "none"))
    for x, y in zip(jax.tree.leaves(full), jax.tree.leaves(none), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_bfloat16_compute_keeps_fp32_masters():
    cfg = model_config()
    params = random_params(cfg)
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    args = (tokens, jnp.arange(6, dtype=jnp.int32)[None], jnp.ones_like(tokens))
    half = decoder.hidden_fn(cfg, params, *args, dtype=jnp.bfloat16)
    exact = decoder.hidden_fn(cfg, params, *args)
    assert half.dtype == jnp.bfloat16 and exact.dtype == jnp.float32
    np.testing.assert_allclose(half.astype(jnp.float32), exact, atol=0.15)


def test_same_key_same_params_and_untied_head_is_its_own():
    cfg = model_config()
    a, b = (decoder.init_params(cfg, jax.random.key(7)) for _ in range(2))
    assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    assert decoder.head(cfg, a).shape == (cfg.hidden_size, cfg.vocab_size)
    tied = model_config(tie_embeddings=True)
    params = decoder.init_params(tied, jax.random.key(7))
    assert "lm_head" not in params
    assert (decoder.head(tied, params) == params["embed"]["embedding"].T).all()
    assert jax.tree.map(lambda x: x.shape, a) == jax.tree.map(
        lambda x: x.shape, decoder.abstract_params(cfg)
    )
