"""--profile_steps: what the learner does in chosen steps, as traces of jax.profiler.

WORKDIR/profile/step_000003/     TensorBoard's profile plugin and xprof read it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from skyrl_jax.core.errors import ConfigError


def parse_steps(values: Sequence[str]) -> frozenset[int]:
    """Return the steps that ``--profile_steps`` names, e.g. {3, 7} for ["3", "7"].

    Raises:
        ConfigError: one is no step number.
    """
    if not all(value.isascii() and value.isdigit() and int(value) > 0 for value in values):
        raise ConfigError(
            f"--profile_steps={','.join(values)}: numbers of steps, the first is 1, with commas "
            "between them, e.g. --profile_steps=3,7"
        )
    return frozenset(int(value) for value in values)


@contextmanager
def traced(folder: Path | None) -> Iterator[None]:
    """Write a trace of all that jax does inside the block; ``None``: of nothing."""
    if folder is None:
        yield
        return
    import jax

    with jax.profiler.trace(str(folder)):
        yield
