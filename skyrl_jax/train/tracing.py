"""--profile_steps: what the learner does in chosen steps, as traces of jax.profiler.

WORKDIR/profile/step_000003/     TensorBoard's profile plugin and xprof read it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from skyrl_jax.core.errors import ConfigError


def parse_steps(values: Sequence[str], last: int) -> frozenset[int]:
    """Return the steps that ``--profile_steps`` names, e.g. {3, 7} for ["3", "7"].

    Args:
        values: the numbers as they were written.
        last: the last step of the run (``train.steps``).

    Raises:
        ConfigError: one is no step number, or of a step that the run does not make.
    """
    given = f"--profile_steps={','.join(values)}"
    if not all(value.isascii() and value.isdigit() and int(value) > 0 for value in values):
        raise ConfigError(
            f"{given}: numbers of steps, the first is 1, with commas between them, e.g. "
            "--profile_steps=3,7"
        )
    steps = frozenset(int(value) for value in values)
    if steps and max(steps) > last:
        raise ConfigError(
            f"{given}: there is no step {max(steps)}, since train.steps = {last} is the last one; "
            "name earlier steps, or set --config.train.steps higher"
        )
    return steps


def tell_untraced(steps: Sequence[int], why: str, say: Callable[[str], None]) -> None:
    """Say that these steps of ``--profile_steps`` leave no trace; nothing where there are none."""
    if steps:
        named = ", ".join(map(str, sorted(steps)))
        say(f"--profile_steps: no trace of step {named}: {why}")


@contextmanager
def traced(folder: Path | None) -> Iterator[None]:
    """Write a trace of all that jax does inside the block; ``None``: of nothing."""
    if folder is None:
        yield
        return
    import jax

    with jax.profiler.trace(str(folder)):
        yield
