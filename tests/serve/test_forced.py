"""Forced ids over HTTP: what /generate admits, what the client sends, and what it checks."""

import pytest

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.core.types import Completion, SamplingParams
from skyrl_jax.generation import contract
from skyrl_jax.serve import schema
from skyrl_jax.serve.requests import BadRequest, Limits, parse

LIMITS = Limits(vocab_size=96, max_context=256, eos_ids=(1,))


def body(custom):
    return {"input_ids": [5, 6], "sampling_params": {"custom_params": custom}}


def test_the_client_sends_what_the_server_reads():
    sampling = SamplingParams(forced_ids=(7, 8), max_new_tokens=4)
    fields = contract.sampling_fields(sampling)
    sent = {"input_ids": [5, 6], "sampling_params": fields}
    assert schema.violation(sent) is None
    assert parse(sent, LIMITS).requests[0].forced == (7, 8)
    assert "custom_params" not in contract.sampling_fields(SamplingParams())
    assert parse(body(None), LIMITS).requests[0].forced == ()


@pytest.mark.parametrize(
    ("custom", "text"),
    [
        ({"other": 1}, "nothing else"),
        ({"forced_ids": [1], "other": 1}, "nothing else"),
        ([1], "nothing else"),
        ({"forced_ids": "12"}, "token ids"),
        ({"forced_ids": [1.5]}, "token ids"),
        ({"forced_ids": [True]}, "token ids"),
        ({"forced_ids": [96]}, "vocabulary"),
        ({"forced_ids": [-1]}, "vocabulary"),
    ],
)
def test_other_custom_params_are_refused(custom, text):
    with pytest.raises(BadRequest, match=text):
        parse(body(custom), LIMITS)


def test_a_server_that_does_not_follow_is_found_out():
    done = Completion(
        token_ids=(7, 9), logprobs=(-1.0, -1.0), weight_versions=(0, 0), finish_reason="length"
    )
    for forced in ((), (7,), (7, 9), (7, 9, 11)):
        contract.check_forced(done, forced, "there")
    for forced in ((8,), (7, 8)):
        with pytest.raises(GenerationError, match="there: .*forced_ids"):
            contract.check_forced(done, forced, "there")
