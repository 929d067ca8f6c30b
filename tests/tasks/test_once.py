"""Equal submissions share one grading; faults are everybody's, and nobody's for good."""

from __future__ import annotations

import asyncio

import pytest

from skyrl_jax.core.errors import InfraError
from skyrl_jax.core.types import Score
from skyrl_jax.tasks.swe.once import Once

GOOD = Score(value=1.0, verdict="resolved")


class Grader:
    """Counts gradings and how many were ended before their time."""

    def __init__(self, score=GOOD, fault=None):
        self.score, self.fault = score, fault
        self.begun = self.closed_early = 0

    async def __call__(self):
        self.begun += 1
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # the sandbox is closed
            self.closed_early += 1
            raise
        if self.fault:
            raise self.fault
        return self.score


def test_equal_submissions_are_graded_once_now_and_later():
    async def run():
        once, grader = Once(), Grader()
        found = await asyncio.gather(*(once.get("a", grader) for _ in range(8)))
        found.append(await once.get("a", grader))
        await once.get("b", grader)
        return found, grader.begun

    assert asyncio.run(run()) == ([GOOD] * 9, 2)


@pytest.mark.parametrize("verdict", ["timeout", "agent", "tampered"])
def test_a_verdict_that_load_may_have_caused_is_not_kept(verdict):
    async def run():
        once, grader = Once(), Grader(Score(value=0.0, verdict=verdict))
        await once.get("a", grader)
        await once.get("a", grader)
        return grader.begun

    assert asyncio.run(run()) == 2


def test_a_fault_reaches_every_caller_and_is_tried_again():
    async def run():
        once, grader = Once(), Grader(fault=InfraError("no disk"))
        calls = (once.get("a", grader) for _ in range(3))
        faults = await asyncio.gather(*calls, return_exceptions=True)
        grader.fault = None
        return faults, await once.get("a", grader), grader.begun

    faults, score, begun = asyncio.run(run())
    assert [type(fault) for fault in faults] == [InfraError] * 3
    assert (score, begun) == (GOOD, 2)


def test_one_cancelled_caller_leaves_the_others_and_the_last_one_closes_the_sandbox():
    async def run():
        once, grader = Once(), Grader()
        first, second = (asyncio.ensure_future(once.get("a", grader)) for _ in range(2))
        await asyncio.sleep(0.005)
        first.cancel()
        kept = await second
        alone = asyncio.ensure_future(once.get("b", grader))
        await asyncio.sleep(0.005)
        alone.cancel()
        await asyncio.wait({alone})
        return kept, first.cancelled(), alone.cancelled(), grader.closed_early

    assert asyncio.run(run()) == (GOOD, True, True, 1)


def test_the_longest_unused_score_goes_first():
    async def run():
        once, grader = Once(size=2), Grader()
        for key in ("a", "b", "a", "c", "a", "b"):  # b was unused longest when c came
            await once.get(key, grader)
        return grader.begun

    assert asyncio.run(run()) == 4
