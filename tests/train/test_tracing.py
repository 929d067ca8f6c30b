"""--profile_steps: which steps, and a trace that is there."""

import jax.numpy as jnp
import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.train.tracing import parse_steps, traced


def test_steps_are_numbers_from_one_on():
    assert parse_steps(["3", "7"]) == {3, 7}
    assert parse_steps([]) == frozenset()
    for values in (["0"], ["-1"], ["3", "x"], ["²"], [""]):
        with pytest.raises(ConfigError, match=r"--profile_steps=.*e\.g\. --profile_steps=3,7"):
            parse_steps(values)


def test_a_trace_is_written_where_a_folder_is_given(tmp_path):
    with traced(None):
        pass
    with traced(tmp_path / "step"):
        (jnp.ones(8) + 1).block_until_ready()
    assert list((tmp_path / "step").rglob("*.xplane.pb"))
