"""Which tasks a step plays: fresh ones in turn, and a share of those worth playing again.

A group whose samples all got the same reward has advantages of 0 and teaches nothing. What a
group of 0/1 rewards teaches grows with their variance r (1 - r), r being the task's success rate:

    rate    r <- (r + mean training reward of the group) / 2, from the first group's mean on
    worth   w = r (1 - r); a task is ready when w >= MIN_WORTH and it rested REST steps
    step    floor(revisit_fraction * tasks_per_step) ready tasks, drawn by w without replacement
            (fewer where fewer are ready), the others - at least one - fresh from seeded epochs

Every task keeps its turn in the epochs, so one that is hopeless today is tried again. With
revisit_fraction 0 the epochs alone decide, and every task is played equally often. The state is a
value in the host's checkpoint: a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import TrajectoryGroup

REST = 8  # steps before a task may be revisited
MIN_WORTH = 0.04  # rates of 0.042 to 0.958


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of a played task: its ``rate`` so far and the last ``step`` that played it.

    The rate of a task whose episodes were all lost by the host side is 0: nothing is known.
    """

    rate: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Where the drawing of tasks stands.

    Args:
        total: how many tasks the indices are of (0: none was drawn yet).
        epoch: epochs of fresh tasks begun.
        queue: indices of tasks that still wait in those epochs, in order.
        seen: {index of a task: what is known of it}.

    Example: ``Curriculum(total=4, epoch=1, queue=(3, 0), seen={2: Seen(rate=0.5, step=1)})``.
    """

    total: int = 0
    epoch: int = 0
    queue: tuple[int, ...] = ()
    seen: Mapping[int, Seen] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        seen = [[at, known.rate, known.step] for at, known in (self.seen or {}).items()]
        return {"total": self.total, "epoch": self.epoch, "queue": list(self.queue), "seen": seen}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Curriculum:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is of another form.
        """
        seen = {int(at): Seen(rate=float(r), step=int(step)) for at, r, step in values["seen"]}
        total, epoch = int(values["total"]), int(values["epoch"])
        return cls(total=total, epoch=epoch, queue=tuple(values["queue"]), seen=seen)


def draw(
    state: Curriculum, total: int, count: int, fraction: float, seed: int, step: int
) -> tuple[list[int], list[int], Curriculum]:
    """Return the indices of the tasks that step ``step`` plays again, of its fresh ones, the state.

    Args:
        state: after the steps before.
        total: how many tasks there are.
        count: tasks of a step; no more than there are.
        fraction: at most this share of them is played again.
        seed: of the run.
        step: the step, from 1.

    Raises:
        DataError: the state is of another number of tasks.
    """
    if state.total not in (0, total):
        raise DataError(
            f"the checkpoint was made with {state.total} training tasks, now there are {total}: "
            "bring tasks.json of this very run back from a copy"
        )
    size = min(count, total)
    again = _again(state, min(int(fraction * size), size - 1), seed, step)
    fresh: list[int] = []
    epoch, queue = state.epoch, list(state.queue)
    while len(again) + len(fresh) < size:
        following = next((at for at in queue if at not in again and at not in fresh), None)
        if following is None:  # tasks that the step has already wait for the next one
            order = list(range(total))
            random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
            queue += order
            epoch += 1
        else:
            queue.remove(following)
            fresh.append(following)
    return again, fresh, replace(state, total=total, epoch=epoch, queue=tuple(queue))


def observe(
    state: Curriculum, chosen: Sequence[int], groups: Sequence[TrajectoryGroup], step: int
) -> Curriculum:
    """Return the state that knows the groups of ``chosen``.

    FAILED members say nothing of a task; where all are, its rate stays and it rests all the same.
    """
    seen = dict(state.seen or {})
    for at, group in zip(chosen, groups, strict=True):
        values = [item.score.value for item in group.trajectories if item.score is not None]
        before = seen[at].rate if at in seen else None
        if values:
            rate = min(1.0, max(0.0, sum(values) / len(values)))
            rate = rate if before is None else (before + rate) / 2
        else:
            rate = before or 0.0
        seen[at] = Seen(rate=rate, step=step)
    return replace(state, seen=seen)


def _again(state: Curriculum, count: int, seed: int, step: int) -> list[int]:
    """Draw up to ``count`` ready tasks, weighted by their worth, without replacement.

    The largest u^(1/w), u uniform, are such a draw (Efraimidis and Spirakis 2006, algorithm A).
    """
    rng = random.Random(derive_seed(seed, "revisit", step))
    keys: list[tuple[float, int]] = []
    for at, known in sorted((state.seen or {}).items()):
        worth = known.rate * (1 - known.rate)
        if worth >= MIN_WORTH and step - known.step > REST:
            keys.append((rng.random() ** (1 / worth), at))
    return [at for _, at in sorted(keys, reverse=True)[:count]]
