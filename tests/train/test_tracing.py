"""--profile_steps: which steps, and a trace that is there."""

import jax.numpy as jnp
import pytest

from skyrl_jax.core.errors import ConfigError
from skyrl_jax.train.tracing import parse_steps, tell_untraced, traced


def test_steps_are_numbers_from_one_on():
    assert parse_steps(["3", "7"], 7) == {3, 7}
    assert parse_steps([], 0) == frozenset()
    for values in (["0"], ["-1"], ["3", "x"], ["²"], [""]):
        with pytest.raises(ConfigError, match=r"--profile_steps=.*e\.g\. --profile_steps=3,7"):
            parse_steps(values, 7)


def test_a_step_that_never_comes_is_refused():
    with pytest.raises(ConfigError, match=r"--profile_steps=3,8: there is no step 8.*steps = 7"):
        parse_steps(["3", "8"], 7)
    with pytest.raises(ConfigError, match=r"there is no step 1, since train\.steps = 0"):
        parse_steps(["1"], 0)


def test_steps_that_were_or_will_not_be_made_are_told():
    said = []
    tell_untraced([], "done before", said.append)
    tell_untraced([7, 3], "done before", said.append)
    assert said == ["--profile_steps: no trace of step 3, 7: done before"]


def test_a_trace_is_written_where_a_folder_is_given(tmp_path):
    with traced(None):
        pass
    with traced(tmp_path / "step"):
        (jnp.ones(8) + 1).block_until_ready()
    assert list((tmp_path / "step").rglob("*.xplane.pb"))
