"""Our schema refuses and accepts exactly what SGLang's own does, with the same text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyrl_jax.core.types import SamplingParams
from skyrl_jax.generation import contract
from skyrl_jax.serve import schema
from tests.serve import running


@pytest.fixture(scope="module")
def oracle(downloads):
    return running.oracle(downloads)


def verdict(oracle, body):
    try:
        oracle.GenerateRequest.from_json_value(body)
    except oracle.JsonContractError as error:
        return str(error)
    return None


SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([0.0, 0.5, -1.5, 1e300]),
    st.sampled_from(["", "x", "5"]),
)
ANY = st.one_of(
    SCALAR,
    st.lists(SCALAR, max_size=3),
    st.lists(st.lists(SCALAR, max_size=2), max_size=2),
    st.dictionaries(st.sampled_from(["a", "enabled", "key"]), SCALAR, max_size=2),
)
SAMPLING_FIELDS = [
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k",
    "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n",
    "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias",
    "sampling_seed", "custom_params", "beam_width", "watermark", "choice", "zz", "seed",
]  # fmt: skip
BODY_FIELDS = [
    "rid", "text", "input_ids", "stream", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "token_ids_logprob", "return_hidden_states", "return_text_in_logprobs",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
    "routed_dp_rank", "disagg_prefill_dp_rank", "mm_hashes", "extra_key", "priority", "cache_salt",
    "require_reasoning", "lora_path", "session_params", "routing_key", "max_thinking_tokens",
    "session_id", "custom_logit_processor", "custom_labels", "return_prompt_token_ids",
    "routed_experts_start_len", "return_sampling_mask", "modalities", "unheard_of",
]  # fmt: skip
SAMPLING = st.dictionaries(st.sampled_from(SAMPLING_FIELDS), ANY, max_size=4)


@settings(max_examples=600)
@given(
    st.dictionaries(st.sampled_from(BODY_FIELDS), ANY, max_size=4),
    st.one_of(SAMPLING, ANY, st.lists(SAMPLING, max_size=2)),
)
@example({"input_ids": [1.5]}, {})
@example({"input_ids": "x"}, {})
@example({"input_ids": [1]}, {"temperature": "hot"})
@example({"input_ids": [1]}, {"zz": 1})
@example({"input_ids": [True]}, {})
@example({"return_prompt_token_ids": None}, {})
def test_same_verdict_as_the_oracle(oracle, body, sampling):
    body = {**body, "sampling_params": sampling}
    assert schema.violation(body) == verdict(oracle, body)


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
@pytest.mark.parametrize(
    "value", [None, True, 3, -3, 0.5, "x", [], [1], ["x"], [None], {}, {"a": 1}]
)
def test_each_sampling_field(oracle, name, value):
    body = {"input_ids": [1], "sampling_params": {name: value}}
    assert schema.violation(body) == verdict(oracle, body)


@pytest.mark.parametrize("name", BODY_FIELDS)
@pytest.mark.parametrize(
    "value", [None, True, 3, -3, 0.5, "x", [], [1], ["x"], [None], [[1], ["x"]], {}, {"a": 1}]
)
def test_each_field(oracle, name, value):
    assert schema.violation({name: value}) == verdict(oracle, {name: value})


@pytest.mark.parametrize("body", [None, 3, "x", [], [{}]])
def test_a_body_that_is_no_object(oracle, body):
    assert schema.violation(body) == verdict(oracle, body)


@given(
    st.floats(0, 2),
    st.integers(0, 4096),
    st.lists(st.integers(0, 1 << 20), max_size=4),
    st.one_of(st.none(), st.integers(0, (1 << 63) - 1)),
)
def test_the_clients_bodies_pass_the_oracle(oracle, temperature, new, stops, seed):
    sampling = SamplingParams(
        temperature=temperature, max_new_tokens=new, stop_token_ids=tuple(stops), seed=seed
    )
    body = {
        "input_ids": [1, 2],
        "rid": "0" * 32,
        "sampling_params": contract.sampling_fields(sampling),
        "return_logprob": True,
        "stream": False,
    }
    assert verdict(oracle, body) is None
    decoded = oracle.GenerateRequest.from_json_value(body).sampling_params
    assert decoded.temperature == temperature
    assert decoded.max_new_tokens == new
    assert decoded.sampling_seed == seed
