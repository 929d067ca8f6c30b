"""Warm start: teach the protocol on demonstrations, and stop while there is much left to learn.

The loss covers the actions (weight 1) and the prompts (a smaller weight, as language modelling).
The first ``rewrite_steps`` steps are rewrites alone; then each batch mixes the three kinds. It
stops at the first probe whose sampled success reaches the target. The script plays tasks from the
head of the training split, probes draw from the tail behind them: all mutation kinds in their usual
shares, and no task that was a demonstration.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_jax.actor.collect import collect, healthy
from skyrl_jax.agents.scripted import words_of
from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.batching.minibatch import assemble_sft
from skyrl_jax.core.config import SftConfig
from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import Batch, Episode, Task
from skyrl_jax.tasks.swe.demos import opening_tasks
from skyrl_jax.tasks.swe.shape import body_shape
from skyrl_jax.train import demonstrations
from skyrl_jax.train.policy import Policy
from skyrl_jax.train.workdir import read_json, write_json
from skyrl_jax.train.world import Say, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Demos:
    """The demonstrations of a warm start, by kind.

    ``head``: how many training tasks, from the first on, the played ones were chosen from.
    """

    head: int
    played: tuple[Episode, ...]
    openings: tuple[Episode, ...]
    rewrites: tuple[Episode, ...]

    def draw(self, rng: random.Random, size: int, *, rewrites_only: bool) -> list[Episode]:
        """Return a batch: rewrites alone, or a quarter each of played and rewrites + openings."""
        if rewrites_only:
            return rng.sample(self.rewrites, min(size, len(self.rewrites)))
        part = size // 4
        chosen = rng.sample(self.played, min(part, len(self.played)))
        chosen += rng.sample(self.rewrites, min(part, len(self.rewrites)))
        return chosen + rng.sample(self.openings, min(size - len(chosen), len(self.openings)))


async def warm_start(world: World, policy: Policy, say: Say) -> dict[str, float]:
    """Train ``policy`` on demonstrations until the target; return what was reached."""
    cfg = world.config.sft
    demos = await make_demos(world)
    say(
        f"warm start: {len(demos.played)} played demonstrations, {len(demos.openings)} openings "
        "and as many rewrites"
    )
    rng = random.Random(derive_seed(world.config.seed, "warm start"))
    success, step = 0.0, 0
    for step in range(1, cfg.max_steps + 1):
        chosen = demos.draw(rng, cfg.batch_size, rewrites_only=step <= cfg.rewrite_steps)
        metrics = await asyncio.to_thread(policy.sft_update, _batch(world, chosen))
        if step % 100 == 0 and step < cfg.probe_from:
            say(f"warm start: step {step}, loss {metrics['loss']:.3f}")
        if step >= cfg.probe_from and (step - cfg.probe_from) % cfg.probe_every == 0:
            success = await probe(world, policy, step, demos.head)
            say(f"warm start: step {step}, loss {metrics['loss']:.3f}, success {success:.3f}")
            if success >= cfg.target_success:
                break
    return {"sft_steps": float(step), "sft_success": success}


async def make_demos(world: World) -> Demos:
    """Make the demonstrations of the mutation kinds that the warm start may see."""
    every = world.suite.tasks("train")
    sft = world.config.sft
    teachable = [bool(task.payload["sft"]) for task in every]
    seen, head = choose_played(teachable, sft.played, sft.probe_episodes)
    avoid = [*world.suite.tasks("heldout"), *world.suite.tasks("unseen")]
    cfg = world.config
    tasks = await asyncio.to_thread(
        opening_tasks, cfg.sft.openings, cfg.tasks.seed, avoid, cfg.tasks.templates
    )
    shapes = {body_shape(str(task.payload["function"])) for task in tasks}
    write_json(_shapes_path(world.workdir), sorted(shapes))
    words = words_of(cfg.agent.kind)
    return Demos(
        head=head,
        played=tuple(await demonstrations.play(world, [every[at] for at in seen])),
        openings=tuple(demonstrations.opening(world.renderer, task, words) for task in tasks),
        rewrites=tuple(demonstrations.rewrite(world.renderer, task, words) for task in tasks),
    )


def read_opening_shapes(workdir: Path, sft: SftConfig) -> list[str]:
    """Return the shapes of the functions that the warm start read (none without one).

    Raises:
        DataError: the file is gone or damaged; without it "in no training text" cannot be told.
    """
    if not sft.max_steps:
        return []
    path = _shapes_path(workdir)
    shapes = read_json(path)
    if not isinstance(shapes, list) or not all(isinstance(shape, str) for shape in shapes):
        raise DataError(f"{path} is gone or damaged; bring it back, or name a new --workdir")
    return shapes


def _shapes_path(workdir: Path) -> Path:
    return workdir / "eval" / "opening_shapes.json"


def choose_played(teachable: Sequence[bool], played: int, probed: int) -> tuple[list[int], int]:
    """Return the indices of the tasks to play as demonstrations, and where the tail begins.

    Args:
        teachable: of each training task, whether its mutation kind is one to demonstrate.
        played: demonstrations wanted.
        probed: tasks wanted for probes.

    The tail (for probes) is at least ``probed`` tasks or half of all, and holds no
    demonstration; where the head has too few teachable tasks, there are fewer demonstrations.
    """
    limit = len(teachable) - min(probed, -(-len(teachable) // 2))
    chosen = [at for at in range(limit) if teachable[at]][:played]
    return chosen, chosen[-1] + 1 if chosen else 0


async def probe(world: World, policy: Policy, step: int, head: int) -> float:
    """Return the sampled success on training tasks behind the first ``head``.

    A third of the tasks comes first; only where that reaches the target do the others
    follow, and the rate of all is returned: a lucky first third does not end the warm start.
    """
    cfg = world.config.sft
    await world.serve(policy.params, 0)
    rest = list(world.suite.tasks("train")[head:])
    random.Random(derive_seed(world.config.seed, "probe", step)).shuffle(rest)
    tasks = rest[: cfg.probe_episodes]
    screen = -(-len(tasks) // 3)
    first = await _resolved(world, tasks[:screen], step)
    rate = sum(first) / len(first)
    if rate < cfg.target_success or len(tasks) <= screen:
        return rate
    both = [*first, *await _resolved(world, tasks[screen:], step)]
    return sum(both) / len(both)


async def _resolved(world: World, tasks: Sequence[Task], step: int) -> list[float]:
    """Play each task once and return the scores."""
    collected = await collect(
        tasks,
        1,
        suite=world.suite,
        provider=world.provider,
        generator=world.generator,
        agent=world.agent(f"probe/{step}"),
        rollout=world.config.rollout,
        run=world.run,
    )
    return [
        item.score.value
        for group in healthy(collected).groups
        for item in group.trajectories
        if item.score is not None
    ]


def _batch(world: World, episodes: list[Episode]) -> Batch:
    """Pack demonstrations into a batch of one fixed shape."""
    learner, size = world.config.learner, world.config.sft.batch_size
    per_row = max(1, learner.row_length // world.config.rollout.max_episode_tokens)
    rows = -(-size // per_row // learner.micro_rows) * learner.micro_rows
    return assemble_sft(
        episodes,
        row_length=learner.row_length,
        micro_rows=learner.micro_rows,
        prompt_loss_weight=world.config.sft.prompt_loss_weight,
        last_actions=2,  # a wrong edit before the right one is context, not a lesson
        total_rows=rows,
    )
