"""Values refuse what would poison everything after them."""

import pytest

from skyrl_jax.core.types import Score


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_is_a_finite_number(value):
    with pytest.raises(ValueError, match="must be finite"):
        Score(value=value, verdict="resolved")
    assert Score(value=-0.5, verdict="unresolved").value == -0.5
