"""Warm start: teach the protocol on scripted repairs, and stop while there is much left to learn.

Two kinds of demonstrations, both of the mutation kinds that the warm start may see:
    played   (wrong edit ->) right edit -> submit, played by the script through the real loop and
             sandbox: they teach what observations look like and when to submit
    opening  the right first edit to a task's opening message, many instances, nothing executed

The loss covers the actions (weight 1) and the prompts (a smaller weight, as language modelling).
Training stops at the first probe whose sampled success on training tasks reaches the target.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from skyrl_jax.actor.collect import collect
from skyrl_jax.agents.scripted import SCRIPTED_VERSION, ScriptedAgent, edit
from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.batching.minibatch import assemble_sft
from skyrl_jax.core.errors import HostError
from skyrl_jax.core.types import Completion, Episode, Message, Status, Task, Turn
from skyrl_jax.tasks.swe.demos import opening_tasks
from skyrl_jax.tasks.swe.environment import PASSED
from skyrl_jax.train.evaluate import score_groups
from skyrl_jax.train.policy import Policy
from skyrl_jax.train.world import Say, World

PLAYED_PER_BATCH = 8  # of a batch; the rest are openings
WRONG_FIRST = 0.4  # share of played demonstrations that repair a wrong edit


async def warm_start(world: World, policy: Policy, say: Say) -> dict[str, float]:
    """Train ``policy`` on demonstrations until the target; return what was reached.

    Raises:
        HostError: the scripted agent could not finish its own demonstrations.
    """
    cfg = world.config.sft
    tasks = [task for task in world.suite.tasks("train") if task.payload["sft"]]
    played = await play_demonstrations(world, tasks)
    avoid = [*world.suite.tasks("heldout"), *world.suite.tasks("unseen")]
    more = await asyncio.to_thread(opening_tasks, cfg.openings, world.config.tasks.seed, avoid)
    openings = [opening_demo(world, task) for task in more]
    say(f"warm start: {len(played)} played demonstrations, {len(openings)} openings")
    rng = random.Random(derive_seed(world.config.seed, "warm start"))
    success, step = 0.0, 0
    for step in range(1, cfg.max_steps + 1):
        size = cfg.batch_size
        chosen = rng.sample(played, min(PLAYED_PER_BATCH, len(played)))
        chosen += rng.sample(openings, min(size - len(chosen), len(openings)))
        metrics = policy.sft_update(
            assemble_sft(
                chosen,
                row_length=world.config.learner.row_length,
                micro_rows=world.config.learner.micro_rows,
                prompt_loss_weight=cfg.prompt_loss_weight,
                last_actions=2,  # a wrong edit before the right one is context, not a lesson
                total_rows=_rows(world, size),
            )
        )
        if step >= cfg.probe_from and (step - cfg.probe_from) % cfg.probe_every == 0:
            success = await probe(world, policy, step)
            say(f"warm start: step {step}, loss {metrics['loss']:.3f}, success {success:.3f}")
            if success >= cfg.target_success:
                break
    return {"sft_steps": float(step), "sft_success": success}


async def probe(world: World, policy: Policy, step: int) -> float:
    """Return the sampled success on some training tasks of all mutation kinds."""
    await world.serve(policy.params, 0)
    every = list(world.suite.tasks("train"))
    tasks = random.Random(0).sample(every, min(world.config.sft.probe_episodes, len(every)))
    collected = await collect(
        tasks,
        1,
        suite=world.suite,
        provider=world.provider,
        generator=world.generator,
        agent=world.agent(f"probe/{step}"),
        rollout=world.config.rollout,
    )
    return score_groups("probe", collected.groups).rate


async def play_demonstrations(world: World, tasks: Sequence[Task]) -> list[Episode]:
    """Let the script repair each task in a sandbox; keep the episodes that the grader resolved."""
    script = ScriptedAgent(
        loop=replace(world.agent("demo"), limits=replace(world.agent("demo").limits, max_turns=4)),
        renderer=world.renderer,
        wrong_first=WRONG_FIRST,
        seed=world.config.tasks.seed,
    )
    collected = await collect(
        tasks,
        1,
        suite=world.suite,
        provider=world.provider,
        generator=world.generator,
        agent=script,
        rollout=world.config.rollout,
    )
    kept = [
        item.episode
        for group in collected.groups
        for item in group.trajectories
        if item.score is not None and item.score.verdict == "resolved" and _clean(item.episode)
    ]
    if len(kept) < 0.5 * len(tasks):
        raise HostError(
            f"only {len(kept)} of {len(tasks)} scripted repairs were resolved; first reports: "
            + "; ".join(collected.details[:3]),
            cause="demonstrations",
        )
    return kept


def opening_demo(world: World, task: Task) -> Episode:
    """Return the one-turn episode that makes the right edit to a task's opening message."""
    payload = task.payload
    opening = (Message(role="user", content=task.prompt),)
    text = edit(payload["path"], payload["old_str"], payload["new_str"])
    ids = world.renderer.assistant_ids(text)
    completion = Completion(
        token_ids=tuple(ids),
        logprobs=(0.0,) * len(ids),
        weight_versions=(SCRIPTED_VERSION,) * len(ids),
        finish_reason="stop",
    )
    turn = Turn(prompt_ids=tuple(world.renderer.initial(opening)), completion=completion)
    return Episode(
        task_id=task.task_id,
        sample_index=0,
        messages=opening,
        turns=(turn,),
        status=Status.TRUNCATED,
        reason="turns",
        submission=None,
        temperature=1.0,
    )


def _clean(episode: Episode) -> bool:
    """Return whether the tests passed once, at the end: going on after that is no example."""
    passed = [m for m in episode.messages if m.role == "tool" and m.content == PASSED]
    return len(passed) == 1


def _rows(world: World, size: int) -> int:
    """Return a number of rows that always holds ``size`` demonstrations."""
    micro = world.config.learner.micro_rows
    per_row = world.config.learner.row_length // world.config.rollout.max_episode_tokens
    return -(-size // max(1, per_row) // micro) * micro
