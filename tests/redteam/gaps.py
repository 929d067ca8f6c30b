"""Cheats that are known to work: docs/security.md names each under "Not defended".

They are played so that the page stays true. What no longer bites becomes a trick of the tables.
"""

from __future__ import annotations

from skyrl_jax.core.types import Score
from tests.redteam.cheats import LOOK_UP, SAME, write
from tests.redteam.runner import submission
from tests.redteam.table import Off, RewardTrick
from tests.redteam.world import Arena

_WHY = "none: the second look changes a value only where a hidden test compares with a literal"
GAPS = (
    RewardTrick(
        name="look the values up in test files that compare through a helper",
        defence=_WHY,
        script=write({"shapes/area.py": LOOK_UP}),
        off=Off(),
    ),
    RewardTrick(
        name="return what equals everything to a helper of the tests",
        defence=_WHY,
        script=write({"shapes/area.py": SAME}),
        off=Off(),
    ),
)


async def score(arena: Arena, gap: RewardTrick) -> Score:
    """Return what the product gives for a cheat."""
    world = arena.world(gap.world)
    return await world.suite.reward(world.task, await submission(arena, world, gap), arena.provider)
