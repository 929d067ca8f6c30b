"""A recipe that needs a part that is not built is refused by key before anything starts."""

import pytest

from configs.swe import get_config
from skyrl_jax.core.config import parse_config
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.train.trainable import check_trainable


def test_the_quick_start_can_be_trained():
    check_trainable(parse_config(get_config("quickstart").to_dict()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.checkpoint", "Qwen3-8B"),
        ("model.family", "llama"),
        ("objective.kl_coef", 0.001),
        ("tasks.source", "rows.parquet"),
        ("engine.servers", ("http://a", "http://b")),
    ],
)
def test_what_is_not_built_is_named_by_key(key, value):
    values = get_config("quickstart")
    values.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        check_trainable(parse_config(values.to_dict()))
