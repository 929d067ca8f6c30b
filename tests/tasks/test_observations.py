"""What the agent reads does not depend on time, place or process."""

import pytest

from skyrl_jax.tasks.swe.observations import failure_messages, normalise


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("<f at 0x7f3a2b1c4d50>", "<f at 0x0>"),
        ("1 failed in 0.03s", "1 failed in 0s"),
        ("2 passed, 1 warning in 61.20s (0:01:01)", "2 passed, 1 warning in 0s"),
        ("no tests ran in 0.01s", "no tests ran in 0s"),
        ("Ran 3 tests in 0.001s", "Ran 3 tests in 0s"),
        ("/tmp/tmpab12_x3q/y.py:3", "/tmp/TMP/y.py:3"),
        ("/tmp/pytest-of-agent/pytest-0/test_a0/x", "/tmp/TMP/test_a0/x"),
    ],
)
def test_normalised(text, same):
    assert normalise(text) == same
    assert normalise(same) == same


@pytest.mark.parametrize(
    "text",
    [
        'START = "12:30:00"',
        'DAY = "2024-05-01 12:13:14"',
        "MAGIC = 0xdeadbeef",
        "NEAR = at(0x7f3a2b1c4d50)",
        "look at 0x1f",
        "pid=12",
        "wait in 0.5s, took 12.5 seconds",
        'open("/tmp/tmpfile")',
        "\x1b[31mred\x1b[0m",
        "a\r\nb",
    ],
)
def test_text_of_the_repository_comes_through_unharmed(text):
    assert normalise(text) == text


def test_failure_messages_leave_test_names_out():
    log = "PASSED t::a\nFAILED t::b - f(1) = 2, want 3\nERROR t.py - SyntaxError: x\nFAILED t::c\n"
    assert failure_messages(log) == ["f(1) = 2, want 3", "SyntaxError: x", "t::c"]
