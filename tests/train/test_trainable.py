"""A recipe that needs a part that is not built is refused by key before anything starts."""

import pytest

from configs.swe import get_config
from skyrl_jax.core.config import parse_config
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.train.trainable import check_trainable

EXPERTS = {
    "model.family": "qwen3_moe",
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "model.moe_intermediate_size": 32,
}


def _config(changes):
    values = get_config("quickstart")
    values.update_from_flattened_dict(changes)
    return parse_config(values.to_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.family": "llama"},
        {"model.family": "qwen2"},
        EXPERTS,
        {"model.checkpoint": "runs/one/weights/hf/v000010"},
        {"objective.kl_coef": 0.001},
        {"learner.lora_rank": 8},
    ],
)
def test_what_is_built_is_let_through(changes):
    check_trainable(_config(changes))


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("tasks.source", {"tasks.source": "rows.parquet"}),
        ("engine.servers", {"engine.servers": ("http://a", "http://b")}),
        ("model.num_experts", {"model.num_experts": 4}),
        ("model.experts_per_token", EXPERTS | {"model.experts_per_token": 5}),
    ],
)
def test_what_is_not_is_named_by_key(key, changes):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        check_trainable(_config(changes))
