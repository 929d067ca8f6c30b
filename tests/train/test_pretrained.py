"""Starting from a Hugging Face folder: what does not fit is named before anything is opened."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from skyrl_jax.core.errors import ConfigError, DataError, WeightsError
from skyrl_jax.generation.tokenizer import MARKUP, PAD, START
from skyrl_jax.models import hf
from skyrl_jax.train.policy import Policy
from skyrl_jax.train.pretrained import check_pretrained, load_pretrained, pretrained_tokenizer
from tests.actor.fakes import make_tokenizer
from tests.models import tiny as models
from tests.train import tiny

CFG = models.config("llama", vocab_size=400, tie_embeddings=True)


@pytest.fixture
def start(tmp_path):
    """The config of a model that starts from a folder as runs write it."""
    make_tokenizer().save(tmp_path / "tokenizer.json")
    text = (tmp_path / "tokenizer.json").read_bytes()
    folder = hf.save_hf(tmp_path / "m", CFG, models.params(CFG), files={"tokenizer.json": text})
    return dataclasses.replace(CFG, checkpoint=str(folder))


def test_a_folder_of_a_run_gives_its_params_and_its_tokenizer(start, tmp_path):
    check_pretrained(start)
    text = "return a < b" + MARKUP[1]
    assert pretrained_tokenizer(start).encode_markup(text) == make_tokenizer().encode_markup(text)
    models.bit_equal(load_pretrained(start), models.params(CFG))
    config = dataclasses.replace(tiny.config(), model=start)
    with Policy(config, tmp_path / "c") as policy:
        policy.start_rl()
        models.bit_equal(policy.params, models.params(CFG))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), models.params(CFG))
    folder = hf.save_hf(tmp_path / "half", CFG, half)
    loaded = load_pretrained(dataclasses.replace(CFG, checkpoint=str(folder)))
    models.bit_equal(loaded, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path, value):
    params = models.params(CFG)
    params["layers"]["up"] = params["layers"]["up"].at[1, 3, 2].set(value)
    folder = hf.save_hf(tmp_path / "m", CFG, params)
    with pytest.raises(WeightsError, match=r"leaf layers\.up holds values that are not finite"):
        load_pretrained(dataclasses.replace(CFG, checkpoint=str(folder)))


def test_another_model_is_named_by_the_field_that_differs(start):
    with pytest.raises(ConfigError, match=r"model\.checkpoint = 'none': there is no such folder"):
        check_pretrained(dataclasses.replace(start, checkpoint="none"))
    for changes, text in (
        ({"num_layers": 3}, "num_layers 2, config section 'model' has 3"),
        ({"rope_theta": 1e6}, "rope_theta 10000.0, config section 'model' has 1000000.0"),
        ({"family": "qwen2"}, "family 'llama', config section 'model' has 'qwen2'"),
    ):
        with pytest.raises(WeightsError, match=text):
            check_pretrained(dataclasses.replace(start, **changes))


def test_cut_weights_and_a_missing_or_foreign_tokenizer_are_named(start, tmp_path):
    path = tmp_path / "m" / "tokenizer.json"
    whole = path.read_bytes()
    with pytest.raises(DataError, match=r"has \d+ tokens, model\.vocab_size is 256"):
        pretrained_tokenizer(dataclasses.replace(start, vocab_size=256))
    path.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json is missing.*copy the tokenizer\.json"):
        check_pretrained(start)
    path.write_text(_foreign())
    with pytest.raises(
        DataError, match=r"no special token '<function=str_replace_editor>"
    ) as error:
        check_pretrained(start)
    assert START not in str(error.value), "what it has is not missed"
    path.write_bytes(whole)
    check_pretrained(start)
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(WeightsError, match=r"cannot read .*model\.safetensors"):
        check_pretrained(start)


def _foreign() -> str:
    """Return a byte-level tokenizer with the chat tokens of the field and no markup of ours."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[PAD, START, "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(["return a"], trainer)
    return made.to_str()


def test_params_land_on_the_device_as_fp32(start):
    leaf = load_pretrained(start)["layers"]["q"]
    assert leaf.dtype == np.float32 and leaf.devices() == {jax.devices()[0]}
