"""Two functions have one shape exactly when they differ in chosen names alone."""

from skyrl_jax.tasks.swe.shape import body_shape

ONE = "def take(items, n):\n    return items[:n - 1] + [len(items)]\n"


def test_names_do_not_count():
    assert body_shape(ONE) == body_shape(ONE.replace("items", "rows").replace("take", "first"))


def test_literals_operators_builtins_and_the_pattern_of_names_count():
    for other in (
        ONE.replace("1", "2"),
        ONE.replace("-", "+"),
        ONE.replace("len", "max"),
        ONE.replace("[len(items)]", "[len(n)]"),
    ):
        assert body_shape(ONE) != body_shape(other)
