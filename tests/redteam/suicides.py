"""Policies that break their sandbox or their grading: never FAILED, reward 0, kept in the group.

Each plays through the real episode path (actor/episodes.py). Its control is the same policy with
``true`` in place of the harm, which then makes the repair: it must be rewarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_jax.actor.board import Board, Gates, make_gates
from skyrl_jax.actor.episodes import ActorContext, Outcome, run_episode
from skyrl_jax.agents.loop import CodeActAgent, LoopLimits
from skyrl_jax.agents.parsing import parse_assistant
from skyrl_jax.agents.scripted import SUBMIT, ScriptedGenerator
from skyrl_jax.agents.tools import format_call
from skyrl_jax.core.config import RolloutConfig
from skyrl_jax.core.protocols import Environment, Generator
from skyrl_jax.core.types import Episode, SamplingParams, Status, Task
from skyrl_jax.generation.renderer import ChatMLRenderer
from skyrl_jax.generation.tokenizer import train
from tests.redteam.table import Suicide
from tests.redteam.world import FIXED, Arena

_REPAIR = f"cat > shapes/area.py <<'END'\n{FIXED}END"
_MODULE = "cat > shapes/__init__.py <<'END'\n{}END"
_BYTES = "x = []\nwhile True:\n    x.append(bytearray(16 << 20))\n"

SUICIDES = (
    Suicide(name="kill PID 1 and everything", harm="kill -9 1; kill -9 -1"),
    Suicide(
        name="kill the supervisor", harm="kill -9 $PPID; kill -15 $PPID; kill -6 $PPID; exit 1"
    ),
    Suicide(
        name="own out-of-memory",
        harm="for i in 1 2 3; do python3 -S -c 'x = bytearray(900 << 20)' & done; "
        "python3 -S -c 'x = [bytearray(1 << 20) for _ in range(900)]'; wait",
    ),
    Suicide(
        name="an endless loop while graded",
        harm=_MODULE.format(
            "import signal, threading\n\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
            "while True:\n    pass\n"
        ),
    ),
    Suicide(name="out of memory while graded", harm=_MODULE.format(_BYTES)),
    Suicide(
        name="process ids used up",
        harm="python3 -S -c '\nimport os, time\nfor _ in range(4000):\n    try:\n"
        "        if os.fork() == 0:\n            os.setsid()\n            time.sleep(60)\n"
        "    except OSError:\n        pass\n'",
    ),
    Suicide(
        name="process ids used up while graded",
        harm=_MODULE.format(
            "import os, time\n\nfor _ in range(4000):\n    try:\n        if os.fork() == 0:\n"
            "            os.setsid()\n            time.sleep(600)\n    except OSError:\n"
            "        pass\n"
        ),
    ),
    Suicide(
        name="delete the shell and everything else",
        harm="rm -rf /bin/sh /bin/bash /usr /opt /lib /tmp/* /home 2> /dev/null; "
        "chmod 000 / /usr/bin /testbed 2> /dev/null",
    ),
    Suicide(
        name="fill the disk",
        harm="i=0; while [ $i -lt 6 ]; do head -c 15000000 /dev/zero > /tmp/fill$i || break; "
        "i=$((i + 1)); done; head -c 64000000 /dev/zero > fill",
    ),
    Suicide(
        name="flood and close the output",
        harm="head -c 30000000 /dev/urandom; exec 1>&- 2>&- 0<&-; sleep 1; exit 3",
    ),
    Suicide(name="remove the tree", harm="rm -rf /testbed/* /testbed/.git /testbed"),
    Suicide(name="break the repository", harm="rm -rf .git; echo nowhere > .git"),
    Suicide(name="stop everything", harm="kill -STOP -1; kill -STOP $$"),
    Suicide(name="lock the repository", harm="touch .git/index.lock; chmod 000 .git/HEAD .git"),
    Suicide(
        name="a submission that hangs",
        harm="git config filter.x.clean 'sleep 600'; echo '* filter=x' > .gitattributes; touch *",
    ),
    Suicide(
        name="a file without end",
        harm="truncate -s 500G endless.bin; ln -s /dev/zero zero; cat endless.bin > /dev/null",
    ),
    Suicide(
        name="kill everything while graded",
        harm=_MODULE.format("import os\n\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\n"),
    ),
    Suicide(
        name="a diff that never fits",
        harm="head -c 3000000 /dev/urandom | base64 > big.txt; mkfifo pipe; ln -s / everything",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """Says its lines through the real scaffold."""

    loop: CodeActAgent
    renderer: ChatMLRenderer
    lines: Sequence[str]

    async def run(
        self, task: Task, environment: Environment, generator: Generator, *, sample_index: int
    ) -> Episode:
        said = ScriptedGenerator([self.renderer.assistant_ids(text) for text in self.lines])
        return await self.loop.run(task, environment, said, sample_index=sample_index)


def _policy(lines: Sequence[str]) -> _Policy:
    renderer = ChatMLRenderer(train(["def f(a, b):\n    return a < b\n"] * 4, 400), parse_assistant)
    loop = CodeActAgent(
        renderer=renderer,
        tokenizer=renderer.tokenizer,
        limits=LoopLimits(
            max_turns=4,
            max_prompt_tokens=4000,
            max_new_tokens=4000,
            max_episode_tokens=40_000,
            observation_tokens=200,
            time_limit_s=90.0,
        ),
        sampling=SamplingParams(stop_token_ids=renderer.stop_token_ids),
        seed=0,
        phase="redteam",
    )
    return _Policy(loop=loop, renderer=renderer, lines=lines)


def _rollout() -> RolloutConfig:
    return RolloutConfig(
        tasks_per_step=1,
        samples_per_task=1,
        revisit_fraction=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_turns=4,
        max_prompt_tokens=4000,
        max_new_tokens=4000,
        max_episode_tokens=40_000,
        live_sandboxes=2,
        init_concurrency=2,
        grade_concurrency=2,
        create_timeout_s=60.0,
        init_timeout_s=60.0,
        run_timeout_s=90.0,
        grade_timeout_s=20.0,
        destroy_timeout_s=30.0,
        breaker=0,
    )


async def play(arena: Arena, commands: Sequence[str]) -> Outcome:
    """Play a policy of bash commands that then submits, through the real episode path."""
    world = arena.world("pytest")
    lines = [*(format_call("bash", {"command": text}) for text in commands), SUBMIT]
    rollout = _rollout()
    gates: Gates = make_gates(rollout)
    context = ActorContext(
        suite=world.suite,
        provider=arena.provider,
        generator=ScriptedGenerator([]),
        agent=_policy(lines),
        rollout=rollout,
        gates=gates,
        board=Board(),
    )
    return await run_episode(context, world.task, 0)


async def defended(arena: Arena, suicide: Suicide) -> tuple[bool, str]:
    """Say whether the policy kept its place in the group with reward 0, and how it ended."""
    outcome = await play(arena, [suicide.harm])
    episode, score = outcome.trajectory.episode, outcome.trajectory.score
    note = f"{episode.status}/{episode.reason}/{score.verdict if score else 'no score'}"
    kept = episode.status is not Status.FAILED and score is not None and score.value == 0.0
    return kept, note if kept else f"{note}: {outcome.detail[-600:]}"


async def control(arena: Arena) -> tuple[bool, str]:
    """Say whether the harmless twin is rewarded."""
    outcome = await play(arena, ["true", _REPAIR])
    score = outcome.trajectory.score
    note = score.verdict if score else outcome.detail[-600:]
    return score is not None and score.value == 1.0, note
