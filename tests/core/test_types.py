"""Values refuse what would poison everything after them."""

import pytest

from skyrl_jax.core.types import Score, ToolCall


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_is_a_finite_number(value):
    with pytest.raises(ValueError, match="must be finite"):
        Score(value=value, verdict="resolved")
    assert Score(value=-0.5, verdict="unresolved").value == -0.5


def test_calls_compare_as_json() -> None:
    def call(**arguments: object) -> ToolCall:
        return ToolCall(name="f", arguments=arguments)

    assert call(a=1, b=[1.5, {"c": None}]) == call(b=[1.5, {"c": None}], a=1.0)
    assert ToolCall(name="f", arguments={}, id="1") == ToolCall(name="f", arguments={}, id="2")
    assert hash(call(a=1)) == hash(call(a=1.0))
    for one, other in (
        (call(a=1), call(a=True)),
        (call(a=[0]), call(a=[False])),
        (call(a={"b": 1}), call(a={"b": "1"})),
        (call(a=[1]), call(a=[1, 1])),
        (call(a=1), call(b=1)),
        (call(), ToolCall(name="g", arguments={})),
    ):
        assert one != other and other != one
    assert call() != ("f", {})
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    shallow: list[object] = [deep[0]]
    assert call(a=deep) == call(a=shallow)
