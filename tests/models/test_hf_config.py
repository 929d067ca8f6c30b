"""config.json of every family, in the spellings of several releases of transformers."""

import pytest

from skyrl_jax.core.errors import ConfigError, WeightsError
from skyrl_jax.models import hf
from tests.models import tiny

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1500,
}


def values(family="qwen3", **changes):
    return hf.config_to_hf(tiny.config(family, **changes))


def without(mapping, *keys):
    return {k: v for k, v in mapping.items() if k not in keys}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_both_ways_give_the_same_model(family):
    for changes in ({}, tiny.SCALING, {"tie_embeddings": True, "rope_theta": 5e5}):
        cfg = tiny.config(family, **changes)
        assert hf.config_from_hf(hf.config_to_hf(cfg)) == cfg
    architecture = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }[family]
    assert values(family)["architectures"] == [architecture]
    # the biases of qwen2 are no choice; the other classes would make some if this were true
    assert values(family).get("attention_bias") == (None if family == "qwen2" else False)


def test_both_spellings_of_rope():
    """Releases before 5 write rope_theta and rope_scaling, those since write rope_parameters."""
    cfg = tiny.config("llama", **tiny.SCALING)
    old = hf.config_to_hf(cfg)
    assert old["rope_scaling"] == SCALED and old["rope_theta"] == 1e4
    bare = without(old, "rope_theta", "rope_scaling")
    new = bare | {"rope_parameters": SCALED | {"rope_theta": 1e4}}
    assert hf.config_from_hf(new) == cfg
    oldest = without(SCALED, "rope_type") | {"type": "llama3"}
    assert hf.config_from_hf(old | {"rope_scaling": oldest}) == cfg
    # whole numbers in either type
    floats = SCALED | {"factor": 8, "original_max_position_embeddings": 1500.0}
    assert hf.config_from_hf(old | {"rope_scaling": floats}) == cfg

    plain = tiny.config("llama")
    for given in (
        {"rope_theta": 1e4, "rope_scaling": None},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_theta": 1e4}},
        {"rope_theta": 1e4, "rope_scaling": SCALED | {"factor": 1.0}},  # scales nothing
    ):
        assert hf.config_from_hf(bare | given) == plain


def test_keys_that_may_be_missing():
    wide = tiny.config("llama", head_dim=5 * 2, hidden_size=40)
    assert hf.config_from_hf(without(hf.config_to_hf(wide), "head_dim")) == wide
    assert hf.config_from_hf(hf.config_to_hf(wide) | {"head_dim": None}) == wide
    untied = without(values("llama"), "tie_word_embeddings", "attention_bias", "hidden_act")
    assert hf.config_from_hf(untied) == tiny.config("llama")
    moe = values("qwen3_moe", norm_topk_prob=False)
    assert hf.config_from_hf(without(moe, "norm_topk_prob")) == tiny.config(
        "qwen3_moe", norm_topk_prob=False
    )
    # a name that newer releases share among expert models
    shared = without(moe, "num_experts") | {"num_local_experts": 5}
    assert hf.config_from_hf(shared) == hf.config_from_hf(moe)
    assert hf.config_from_hf(values("qwen2") | {"attention_bias": True}) == tiny.config("qwen2")
    full = {"layer_types": ["full_attention"] * 2, "architectures": None}
    assert hf.config_from_hf(values() | full) == tiny.config("qwen3")


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("qwen3", {"model_type": "mamba"}, "'mamba'.*families: llama, qwen2, qwen3, qwen3_moe"),
        ("qwen3", {"model_type": None}, "known families: llama"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForCausalLM"),
        ("qwen3", {"head_dim": None}, "lacks 'head_dim'"),
        ("llama", {"head_dim": None, "hidden_size": 21}, "21 is no multiple.*4"),
        ("llama", {"rope_theta": None}, "lacks 'rope_theta'"),
        ("llama", {"hidden_size": None}, "lacks 'hidden_size'"),
        ("llama", {"hidden_size": "20"}, "'hidden_size' must be int, got '20'"),
        ("llama", {"num_hidden_layers": True}, "'num_hidden_layers' must be int"),
        ("llama", {"tie_word_embeddings": 1}, "'tie_word_embeddings' must be bool"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act to 'gelu'.*'silu' alone"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "rope_scaling of type None"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "'yarn'.*known: default, llama3"),
        ("llama", {"rope_scaling": "llama3"}, "'rope_scaling' must be an object"),
        ("llama", {"rope_scaling": without(SCALED, "factor")}, r"lacks 'rope_scaling\.factor'"),
        ("llama", {"rope_scaling": SCALED | {"low_freq_factor": 9.0}}, "rope_low_freq_factor"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step to 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"num_experts": None}, "lacks 'num_experts'"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "experts_per_token"),
    ],
)
def test_what_is_not_computed_is_named(family, changes, text):
    with pytest.raises(ConfigError, match=text):
        hf.config_from_hf(values(family) | changes)


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_a_config_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json must hold a JSON object"):
        hf.load_config(tmp_path)


def test_a_config_that_is_no_text_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(WeightsError, match="cannot read"):
        hf.load_config(tmp_path)
