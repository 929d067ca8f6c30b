"""The shortest unique edit of a line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.tasks.swe.snippet import edit_snippet


@pytest.mark.parametrize(
    ("buggy", "fixed", "rest", "want"),
    [
        ("return i - 1", "return i + 1", "", ("- 1", "+ 1")),
        ("return i - 1", "return i + 1", "i - 1", ("return i - 1", "return i + 1")),
        ("if a < b:", "if a <= b:", "", ("< b", "<= b")),
        ("if not x:", "if x:", "", ("not x", "x")),
        ("k in d and k in e:", "k in d and k not in e:", "", ("in e", "not in e")),
        ("return x", "return y", "", ("x", "y")),
        ("n = 1", "n = 0", "n = 1", ("n = 1", "n = 0")),  # the whole line at most
    ],
)
def test_the_change_and_a_word_after_it(buggy, fixed, rest, want):
    assert edit_snippet(buggy, fixed, f"def f():\n    {buggy}\n{rest}\n") == want


@given(
    st.lists(st.sampled_from(["a", "b", "<", "1", "not", "("]), min_size=1, max_size=8), st.data()
)
def test_the_edit_always_turns_one_line_into_the_other(words, data):
    changed = list(words)
    at = data.draw(st.integers(0, len(words) - 1))
    changed[at] = data.draw(st.sampled_from(["zz", "==", "7"]))
    buggy, fixed = " ".join(words), " ".join(changed)
    old, new = edit_snippet(buggy, fixed, buggy)
    assert buggy.count(old) == 1
    assert buggy.replace(old, new) == fixed
