"""The benchmark's other form of the layers computes what the decoder computes."""

from __future__ import annotations

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_jax.models import decoder
from tests.models import tiny


@pytest.fixture(scope="module")
def flattened(repo_root):
    sys.path.insert(0, str(repo_root / "benchmarks"))
    try:
        yield importlib.import_module("flattened")
    finally:
        sys.path.remove(str(repo_root / "benchmarks"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_both_forms_are_the_same_function(flattened, family):
    cfg = tiny.config(family)
    params = tiny.params(cfg)
    rows = tiny.rows(cfg, [[9, 6], [16]], 16)

    def loss(params, form):
        hidden = form(cfg, params, *rows, dtype=jnp.float32, remat="full", mesh=None)
        return jnp.sum(jnp.where((rows[2] != 0)[:, :, None], jnp.sin(hidden), 0.0))

    both = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (ours, grads), (theirs, other) = (
        both(params, form) for form in (decoder.hidden_fn, flattened.rows_hidden)
    )
    assert float(theirs) == pytest.approx(float(ours), rel=1e-5)
    for x, y in zip(jax.tree.leaves(other), jax.tree.leaves(grads), strict=True):
        scale = float(np.abs(y).max())
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= 1e-5 * scale


def test_the_other_form_contracts_over_two_axes(flattened):
    """What the flattened form avoids is really there: weight gradients over rows and tokens."""
    cfg = tiny.config("qwen3")
    params, rows = tiny.params(cfg), tiny.rows(cfg, [[16], [16]], 16)

    def contractions(form):
        def loss(params):
            hidden = form(cfg, params, *rows, dtype=jnp.float32, remat="none", mesh=None)
            return jnp.sum(jnp.sin(hidden))

        text = jax.jit(jax.grad(loss)).lower(params).as_text()
        return text.count("contracting_dims = [0, 1] x [0, 1]")

    assert contractions(flattened.rows_hidden) >= 7  # q, k, v, o, gate, up, down
    assert contractions(decoder.hidden_fn) == 0
