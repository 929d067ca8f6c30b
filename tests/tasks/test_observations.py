"""What the agent reads does not depend on time, place or process."""

import pytest

from skyrl_jax.tasks.swe.observations import failure_messages, normalise


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("<f at 0x7f3a2b1c4d50>", "<f at 0x0>"),
        ("1 failed in 0.03s", "1 failed in 0s"),
        ("took 12.5 seconds", "took 0s"),
        ("2024-05-01 12:13:14.123 x", "TIME x"),
        ("Mon Nov 30 13:47:46 UTC 2026", "TIME UTC 2026"),
        ("drwxr-xr-x 5 a a 4096 Nov 30 13:40 .git", "drwxr-xr-x 5 a a 4096 TIME .git"),
        ("/tmp/tmpab12_x/y.py:3", "/tmp/TMP:3"),
        ("real\t0m1.234s", "real\t0s"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\r\nb", "a\nb"),
        ("x = 0x1f, 12 of 30", "x = 0x1f, 12 of 30"),
    ],
)
def test_normalised(text, same):
    assert normalise(text) == same
    assert normalise(same) == same


def test_failure_messages_leave_test_names_out():
    log = "PASSED t::a\nFAILED t::b - f(1) = 2, want 3\nERROR t.py - SyntaxError: x\nFAILED t::c\n"
    assert failure_messages(log) == ["f(1) = 2, want 3", "SyntaxError: x", "t::c"]
