"""Chunked token log-probs against the naive form and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.rl.logprobs import shift_right, token_logprobs

N, D, V = 23, 6, 17


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(N, D)), jnp.float32),
        jnp.asarray(rng.normal(size=(D, V)), jnp.float32),
        jnp.asarray(rng.integers(0, V, N), jnp.int32),
        jnp.asarray(rng.choice([0.6, 1.0, 1.7], N), jnp.float32),
    )


def naive(hidden, head, targets, temperature):
    logp = jax.nn.log_softmax(hidden @ head / temperature[:, None])
    return logp[jnp.arange(len(targets)), targets], -jnp.sum(jnp.exp(logp) * logp, -1)


@pytest.mark.parametrize("chunk", [1, 5, 23, 4096])
def test_equals_naive_values_and_gradients(inputs, chunk):
    hidden, head, targets, temperature = inputs

    def total(f, hidden, head):
        logprobs, entropy = f(hidden, head, targets, temperature)
        return jnp.sum(jnp.sin(logprobs) + 0.3 * jnp.cos(entropy)), (logprobs, entropy)

    def chunked(*args):
        return token_logprobs(*args, chunk=chunk, entropy_gradient=True)

    (_, got), got_grads = jax.value_and_grad(total, (1, 2), has_aux=True)(chunked, hidden, head)
    (_, want), want_grads = jax.value_and_grad(total, (1, 2), has_aux=True)(naive, hidden, head)
    for x, y in zip(
        jax.tree.leaves((got, got_grads)), jax.tree.leaves((want, want_grads)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
        assert x.dtype == jnp.float32


@pytest.mark.parametrize("degree", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_logits_that_share_an_offset_lose_no_more_than_a_plain_softmax(degree, offset):
    """Against float64: large logits that are nearly equal are where digits get lost."""
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(N, D)).astype(np.float32)
    hidden[:, 0] = 1.0
    head = rng.normal(size=(D, V)).astype(np.float32)
    head[0] += offset
    targets, degrees = rng.integers(0, V, N), np.full(N, degree, np.float32)
    pull = [jnp.asarray(rng.normal(size=N), jnp.float32) for _ in range(2)]

    def truth():
        h, w, t = (x.astype(np.float64) for x in (hidden, head, degrees))
        logits = h @ w / t[:, None]
        below = logits - logits.max(-1, keepdims=True)
        logp = below - np.log(np.exp(below).sum(-1, keepdims=True))
        entropy = -(np.exp(logp) * logp).sum(-1)
        (of_logp, of_entropy), p = (np.asarray(x, np.float64) for x in pull), np.exp(logp)
        grad = -p * of_logp[:, None] - of_entropy[:, None] * p * (logp + entropy[:, None])
        grad[np.arange(N), targets] += of_logp
        grad /= t[:, None]
        return logp[np.arange(N), targets], entropy, grad @ w.T, h.T @ grad

    def errors(score):
        both, vjp = jax.vjp(lambda h, w: score(h, w, targets, degrees), hidden, head)
        found = (*both, *vjp(tuple(pull)))
        return [
            np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max()
            for x, y in zip(found, truth(), strict=True)
        ]

    def ours(*args):
        return token_logprobs(*map(jnp.asarray, args), chunk=5, entropy_gradient=True)

    def plain(h, w, t, d):
        return naive(jnp.asarray(h), jnp.asarray(w), t, jnp.asarray(d))

    for name, mine, theirs in zip(
        ("log-prob", "entropy", "hidden", "head"), errors(ours), errors(plain), strict=True
    ):
        assert mine <= 4 * theirs + 1e-6, name


def test_gradient_by_finite_differences(inputs):
    hidden, head, targets, temperature = inputs
    weights = jnp.asarray(np.random.default_rng(1).normal(size=N), jnp.float32)

    def loss64(hidden, head):
        logits = hidden @ head / np.asarray(temperature, np.float64)[:, None]
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float((np.asarray(weights, np.float64) * logp[np.arange(N), targets]).sum())

    def loss(hidden, head):
        logprobs, _ = token_logprobs(hidden, head, targets, temperature, chunk=5)
        return jnp.sum(weights * logprobs)

    grads = jax.grad(loss, (0, 1))(hidden, head)
    h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    for index in ((0, 0), (11, 3), (22, 5)):
        step = np.zeros_like(h)
        step[index] = 1e-5
        want = (loss64(h + step, w) - loss64(h - step, w)) / 2e-5
        assert float(grads[0][index]) == pytest.approx(want, abs=1e-5)
    for index in ((0, 0), (3, 16), (5, 8)):
        step = np.zeros_like(w)
        step[index] = 1e-5
        want = (loss64(h, w + step) - loss64(h, w - step)) / 2e-5
        assert float(grads[1][index]) == pytest.approx(want, abs=1e-5)


def test_entropy_has_no_gradient_unless_asked(inputs):
    hidden, head, targets, temperature = inputs

    def total(hidden, flag):
        return jnp.sum(
            token_logprobs(hidden, head, targets, temperature, chunk=5, entropy_gradient=flag)[1]
        )

    assert (jax.grad(total)(hidden, False) == 0).all()
    assert (jax.grad(total)(hidden, True) != 0).any()


def test_the_whole_logits_never_exist(inputs):
    """No array of N x V elements in the compiled forward and backward program."""
    n, v, chunk = 512, 1024, 64
    hidden, head = jnp.zeros((n, 8)), jnp.zeros((8, v))
    targets, temperature = jnp.zeros(n, jnp.int32), jnp.ones(n)

    def total(hidden, head):
        return jnp.sum(token_logprobs(hidden, head, targets, temperature, chunk=chunk)[0])

    compiled = jax.jit(jax.grad(total, (0, 1))).lower(hidden, head).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * v * 4 / 2


def test_bfloat16_hidden_gives_fp32_out_and_fp32_head_gradient(inputs):
    hidden, head, targets, temperature = inputs
    half = hidden.astype(jnp.bfloat16)
    got, entropy = token_logprobs(half, head, targets, temperature, chunk=5)
    assert got.dtype == entropy.dtype == jnp.float32
    want, _ = naive(hidden, head, targets, temperature)
    np.testing.assert_allclose(got, want, atol=0.1)
    grad = jax.grad(lambda w: token_logprobs(half, w, targets, temperature, chunk=5)[0].sum())(head)
    assert grad.dtype == jnp.float32


def test_shift_right():
    x = jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(shift_right(x), [[0, 0, 1], [3, 3, 4]])


def test_a_large_vocabulary_needs_under_an_eighth_of_the_naive_temporaries():
    """Qwen3's 151,936 tokens, 8,192 positions, D 1024: compiled forward and backward, not run."""
    n, d, v = 8192, 1024, 151_936
    shapes = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (((n, d), jnp.float32), ((d, v), jnp.float32), ((n,), jnp.int32))
    ]

    def temporaries(score):
        def total(hidden, head, targets):
            return jnp.sum(score(hidden, head, targets, jnp.ones(n))[0])

        compiled = jax.jit(jax.grad(total, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours = temporaries(lambda *args: token_logprobs(*args, chunk=512))
    plain = temporaries(naive)
    assert plain > 2 * n * v * 4 * 0.9  # logits and their gradient
    assert ours < plain / 8, (ours, plain)
