"""No network, and the figures that the tests measured, printed at the end."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import numpy as np
import pytest

FIGURES = pytest.StashKey[dict]()


@pytest.fixture(scope="session")
def figure(pytestconfig):
    """``figure(name, value)`` keeps the largest value of a name and returns ``value``."""
    kept = pytestconfig.stash.setdefault(FIGURES, {})

    def keep(name, value):
        kept[name] = max(float(value), kept.get(name, 0.0))
        return value

    return keep


@pytest.fixture(scope="session")
def close(figure):
    """``close(name, ours, theirs, limit)``: max |ours - theirs| is kept and at most ``limit``."""

    def check(name, ours, theirs, limit):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        assert ours.shape == theirs.shape, name
        assert figure(name, np.abs(ours - theirs).max()) <= limit, name

    return check


def pytest_terminal_summary(terminalreporter, config):
    kept = config.stash.get(FIGURES, {})
    if kept:
        terminalreporter.section("largest differences")
        for name, value in sorted(kept.items()):
            terminalreporter.line(f"{name}: {value:.3g}")
