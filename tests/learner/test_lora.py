"""LoRA: starts at the base, trains only the adapters, merges and exports without loss."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.learner import lora as lora_lib
from skyrl_jax.learner.step import make_logprob_step, make_score_fn
from skyrl_jax.models import decoder

PACKED = [[0, 1], [4, 2], [3], []]
TARGETS = ("q", "v", "o", "gate", "down")
RANK, ALPHA = 3, 6.0


@pytest.fixture
def base(model_cfg):
    return decoder.init_params(model_cfg, jax.random.key(1))


@pytest.fixture
def fresh(model_cfg):
    shapes = decoder.abstract_params(model_cfg)
    return lora_lib.lora_init(model_cfg, shapes, RANK, TARGETS, jax.random.key(2))


@pytest.fixture
def trained(fresh):
    """Adapters whose B is not zero."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 4, jnp.float32), fresh)


def test_shapes_scale_and_zero_start(model_cfg, fresh):
    d, f = model_cfg.hidden_size, model_cfg.intermediate_size
    shapes = {n: (p["a"].shape, p["b"].shape) for n, p in fresh["layers"].items()}
    assert set(shapes) == set(TARGETS)
    assert shapes["v"] == ((2, d, RANK), (2, RANK, 8))
    assert shapes["down"] == ((2, f, RANK), (2, RANK, d))
    assert all((p["b"] == 0).all() for p in fresh["layers"].values())
    wide = decoder.abstract_params(model_cfg)
    wide["layers"]["q"] = jax.ShapeDtypeStruct((2, 400, 100), jnp.float32)
    a = lora_lib.lora_init(model_cfg, wide, 50, ("q",), jax.random.key(0))["layers"]["q"]["a"]
    assert float(jnp.std(a)) == pytest.approx(1 / np.sqrt(400), rel=0.02)
    # A target's numbers do not depend on the others.
    shapes = decoder.abstract_params(model_cfg)
    alone = lora_lib.lora_init(model_cfg, shapes, RANK, ("o",), jax.random.key(2))
    assert (alone["layers"]["o"]["a"] == fresh["layers"]["o"]["a"]).all()
    assert not (fresh["layers"]["q"]["a"] == fresh["layers"]["o"]["a"]).all()


def test_zero_b_is_the_base_and_merge_is_the_adapted_forward(
    model_cfg, learner_cfg, sequences, pack, base, fresh, trained
):
    batch = pack(sequences, PACKED, 24)
    score = make_logprob_step(model_cfg, learner_cfg)
    plain = np.asarray(score(base, batch).logprobs)
    start = np.asarray(score(lora_lib.adapt(base, fresh, ALPHA), batch).logprobs)
    # W x + 0: equal up to how the two programs are fused
    np.testing.assert_allclose(start, plain, rtol=1e-6, atol=1e-6 * np.abs(plain).max())
    same = lora_lib.merge(base, fresh, ALPHA)
    assert all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(base), strict=True)
    )
    adapted = np.asarray(score(lora_lib.adapt(base, trained, ALPHA), batch).logprobs)
    merged = np.asarray(score(lora_lib.merge(base, trained, ALPHA), batch).logprobs)
    np.testing.assert_allclose(adapted, merged, rtol=1e-6, atol=1e-6 * np.abs(merged).max())
    assert np.abs(adapted - plain).max() > 0.1


def test_merge_by_hand(model_cfg):
    params = {"layers": {"q": jnp.asarray([[[1.0, 2.0], [3.0, 4.0]]]), "q_norm": jnp.ones((1, 2))}}
    pair = {"a": jnp.asarray([[[1.0], [2.0]]]), "b": jnp.asarray([[[10.0, 20.0]]])}
    merged = lora_lib.merge(params, {"layers": {"q": pair}}, alpha=0.5)
    # rank 1: W + 0.5 [[10, 20], [20, 40]]
    np.testing.assert_array_equal(merged["layers"]["q"], [[[6.0, 12.0], [13.0, 24.0]]])
    assert merged["layers"]["q_norm"] is params["layers"]["q_norm"]


def test_step_trains_the_adapters_alone(
    model_cfg, learner_cfg, objective, sequences, pack, base, fresh, host
):
    batch, before = pack(sequences, PACKED, 24), host(base)
    step = lora_lib.make_lora_step(model_cfg, learner_cfg, objective, alpha=ALPHA)
    state = lora_lib.lora_state(learner_cfg, fresh)
    # Nothing but adapters, two moments of each, and counters.
    sizes = [x.size for x in jax.tree.leaves(state) if x.ndim]
    assert sum(sizes) == 3 * sum(x.size for x in jax.tree.leaves(fresh))
    state, metrics = step(state, batch, base)
    first = host(state)
    moments = first.opt_state.inner[-1][0].mu["layers"]
    for name in TARGETS:  # with B = 0 the gradient of A is zero, that of B is not
        assert (moments[name]["a"] == 0).all() and (moments[name]["b"] != 0).any()
    assert metrics["grad_norm"] > 0 and int(metrics["num_tokens"]) == 44
    state, _ = step(state, batch, base)
    assert all((host(state).params["layers"][n]["a"] != first.params["layers"][n]["a"]).any()
               for n in TARGETS)  # fmt: skip
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(base), strict=True):
        assert x.tobytes() == np.asarray(y).tobytes()


def test_gradient_is_that_of_the_merged_weights(
    model_cfg, learner_cfg, sequences, pack, base, trained
):
    """dL/dA = s dL/dW B^T and dL/dB = s A^T dL/dW, s = alpha / rank (chain rule by hand)."""
    batch = pack(sequences, PACKED[:2], 24)
    score = make_score_fn(model_cfg, learner_cfg)

    def loss(params):
        return jnp.sum(jnp.where(batch.loss_weights != 0, score(params, batch).logprobs, 0.0))

    adapted = jax.jit(jax.grad(lambda lora: loss(lora_lib.adapt(base, lora, ALPHA))))
    got = adapted(trained)["layers"]["o"]
    whole = jax.jit(jax.grad(loss))(lora_lib.merge(base, trained, ALPHA))["layers"]["o"]
    a, b = (np.asarray(trained["layers"]["o"][k], np.float64) for k in "ab")
    want_a = ALPHA / RANK * np.asarray(whole, np.float64) @ b.transpose(0, 2, 1)
    want_b = ALPHA / RANK * a.transpose(0, 2, 1) @ np.asarray(whole, np.float64)
    np.testing.assert_allclose(got["a"], want_a, rtol=1e-4, atol=1e-5 * np.abs(want_a).max())
    np.testing.assert_allclose(got["b"], want_b, rtol=1e-4, atol=1e-5 * np.abs(want_b).max())


def test_peft_folder(tmp_path, trained):
    folder = lora_lib.export_peft(tmp_path / "v1", trained, alpha=ALPHA, base_model="models/tiny")
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    assert len(tensors) == 2 * len(TARGETS) * 2
    prefix = "base_model.model.model.layers"
    # PEFT holds both as weights of nn.Linear, [out, in].
    down = tensors[f"{prefix}.1.mlp.down_proj.lora_B.weight"]
    np.testing.assert_array_equal(down, np.asarray(trained["layers"]["down"]["b"][1]).T)
    q = tensors[f"{prefix}.0.self_attn.q_proj.lora_A.weight"]
    np.testing.assert_array_equal(q, np.asarray(trained["layers"]["q"]["a"][0]).T)
    assert q.shape == (RANK, 16) and down.shape == (16, RANK)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert config["task_type"] == "CAUSAL_LM" and config["bias"] == "none"
    assert config["base_model_name_or_path"] == "models/tiny"
    names = ["down_proj", "gate_proj", "o_proj", "q_proj", "v_proj"]
    assert config["target_modules"] == names
    lora_lib.export_peft(folder, trained, alpha=ALPHA, base_model="again")  # replaces
    back, alpha = lora_lib.load_peft(folder)
    assert alpha == ALPHA and sorted(p.name for p in tmp_path.iterdir()) == ["v1"]
    assert jax.tree.structure(back) == jax.tree.structure(trained)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(trained), strict=True):
        assert x.tobytes() == np.asarray(y).tobytes() and x.shape == y.shape


def test_what_cannot_be_is_named(model_cfg, tmp_path):
    shapes, key = decoder.abstract_params(model_cfg), jax.random.key(0)
    for targets, rank, text in (
        ((), 2, "needs a target; known: q, k, v"),
        (("q_norm",), 2, r"'q_norm': known of this model: q, k, v, o, gate, up, down"),
        (("v",), 9, "rank 9 must be at least 1 and at most 8"),
        (("v",), 0, "rank 0 must"),
    ):
        with pytest.raises(ConfigError, match=text):
            lora_lib.lora_init(model_cfg, shapes, rank, targets, key)
    with pytest.raises(WeightsError, match="cannot read the PEFT adapter"):
        lora_lib.load_peft(tmp_path)
