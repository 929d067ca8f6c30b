"""What the warm start learns from: three kinds of demonstrations, all ordinary episodes.

    played   (wrong edit ->) right edit -> submit, played by the script through the real loop and
             sandbox: they teach what observations look like and when to submit
    opening  the right first edit to a task's opening message
    rewrite  a broken function and its failure -> the whole repaired function, as in a commit: it
             teaches copying and what right code looks like, many tokens an instance

Openings and rewrites are made from tasks that are only read, never executed.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_jax.actor.collect import collect, healthy
from skyrl_jax.agents.scripted import CODEACT, SCRIPTED_VERSION, ScriptedAgent, Words, words_of
from skyrl_jax.core.errors import HostError
from skyrl_jax.core.types import Completion, Episode, Message, Status, Task, Turn
from skyrl_jax.generation.renderer import AnyRenderer
from skyrl_jax.tasks.swe.environment import PASSED
from skyrl_jax.train.world import World

WRONG_FIRST = 0.4  # share of played demonstrations that repair a wrong edit


async def play(world: World, tasks: Sequence[Task]) -> list[Episode]:
    """Let the script repair each task in a sandbox; keep the clean episodes that were resolved.

    Raises:
        HostError: less than half of them were.
    """
    script = ScriptedAgent(
        loop=world.agent("demo", max_turns=4),
        renderer=world.renderer,
        words=words_of(world.config.agent.kind),
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
        run=world.run,
    )
    kept = [
        item.episode
        for group in healthy(collected).groups
        for item in group.trajectories
        if item.score is not None and item.score.verdict == "resolved" and _clean(item.episode)
    ]
    if len(kept) < 0.5 * len(tasks):
        raise HostError(
            f"only {len(kept)} of {len(tasks)} scripted repairs were resolved; first reports: "
            + ("; ".join(collected.details[:3]) or "none"),
            cause="demonstrations",
        )
    return kept


def opening(renderer: AnyRenderer, task: Task, words: Words = CODEACT) -> Episode:
    """Return the one-turn episode that makes the right edit to a task's opening message."""
    payload = task.payload
    text = words.edit(payload["path"], payload["old_str"], payload["new_str"])
    messages = words.opening(task.prompt)
    return _one_turn(renderer, task, messages, renderer.assistant_ids(text))


def rewrite(renderer: AnyRenderer, task: Task, words: Words = CODEACT) -> Episode:
    """Return the one-turn episode that answers with the whole repaired function."""
    payload = task.payload
    fixed = payload["function"].replace(payload["buggy_line"], payload["fixed_line"])
    ids = (*renderer.tokenizer.encode(fixed.rstrip()), renderer.stop_id)
    messages = words.opening(task.prompt.replace("Fix ", "Rewrite ", 1))
    return _one_turn(renderer, task, messages, ids)


def _one_turn(
    renderer: AnyRenderer, task: Task, messages: tuple[Message, ...], ids: Sequence[int]
) -> Episode:
    completion = Completion(
        token_ids=tuple(ids),
        logprobs=(0.0,) * len(ids),
        weight_versions=(SCRIPTED_VERSION,) * len(ids),
        finish_reason="stop",
    )
    turn = Turn(prompt_ids=tuple(renderer.initial(messages)), completion=completion)
    return Episode(
        task_id=task.task_id,
        sample_index=0,
        messages=messages,
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
