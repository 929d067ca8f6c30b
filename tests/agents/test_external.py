"""A foreign program plays whole episodes: its own sandbox, the gateway, the real grader."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
import tempfile
from pathlib import Path

import pytest

from skyrl_jax.actor.collect import collect
from skyrl_jax.agents.commands import CommandSocket
from skyrl_jax.agents.external import GATEWAY, ExternalAgent, Program
from skyrl_jax.agents.scripted import DONE
from skyrl_jax.agents.tools import format_call
from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.errors import ConfigError, GenerationError, InfraError, SandboxGone
from skyrl_jax.core.protocols import SHARED, SandboxSpec
from skyrl_jax.core.types import SamplingParams, Status
from skyrl_jax.gateway.app import Gateway
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.train.scaffold import tools_renderer
from tests.actor.fakes import FakeSuite, TextGenerator, make_renderer, make_rollout, make_task
from tests.tasks.worlds import CACHE, in_bwrap, make_suite

PROGRAM = Path(__file__).with_name("plain_program.py")
RENDERER = make_renderer()


def sh(command: str) -> str:
    return format_call("bash", {"command": command})


def repair(task) -> list[str]:
    """Four turns: look, repair, look again, submit."""
    path, bad, good = (task.payload[key] for key in ("path", "old_str", "new_str"))
    code = "import sys; p, a, b = sys.argv[1:]; t = open(p).read(); "
    code += "open(p, 'w').write(t.replace(a, b))"
    return [
        sh(f"cat {path}"),
        sh(shlex.join(["python3", "-c", code, path, bad, good]) + "; git diff --stat"),
        sh(f"grep -c . {path}"),
        sh(DONE),
    ]


class Heard:
    """An environment that remembers what its shell answered."""

    def __init__(self, inner):
        self._inner = inner
        self.outputs = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def shell(self, argv, **fields):
        result = await self._inner.shell(argv, **fields)
        self.outputs.append(result.output)
        return result


def player(mode, gateway, provider, *, time_limit_s=60.0, budget=None):
    return ExternalAgent(
        program=Program(
            name="plain",
            argv=("python3", "{shared}/plain_program.py", mode),
            files={PROGRAM.name: PROGRAM},
            job={"cwd": "/testbed"},
            memory_mb=256,
        ),
        gateway=gateway,
        provider=provider,
        image=str(base_image(CACHE)),
        sampling=SamplingParams(max_new_tokens=400, stop_token_ids=RENDERER.stop_token_ids),
        budget=budget or Budget(turns=8, context=6000),
        time_limit_s=time_limit_s,
        seed=0,
        phase="test",
        best_effort=True,
    )


def task_of(tmp_path):
    return make_suite(tmp_path).tasks("train")[0]


def episode(tmp_path, mode, answers=None, *, grade=False, time_limit_s=60.0, budget=None):
    """Play one synthetic task; return (episode or error, what the shell said, the score)."""
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]
    lines = repair(task) if answers is None else answers

    def say(session, turn):
        return lines[turn] if turn < len(lines) else GenerationError("no more lines")

    async def work(provider):
        generator = TextGenerator(RENDERER, say)
        world = Heard(suite.environment(task, provider))
        async with Gateway(generator=generator, renderer_for=tools_renderer(RENDERER)) as gateway:
            agent = player(mode, gateway, provider, time_limit_s=time_limit_s, budget=budget)
            try:
                played = await agent.run(task, world, generator, sample_index=0)
                score = await suite.reward(task, played.submission, provider) if grade else None
                return played, world.outputs, score
            finally:
                await world.close()
                assert gateway.open_sessions == 0

    return in_bwrap(work)


def test_a_foreign_program_repairs_a_task(tmp_path):
    played, outputs, score = episode(tmp_path, "play", grade=True)
    assert (played.status, played.reason) == (Status.FINISHED, "submit")
    assert score.value == 1.0, score
    assert len(played.turns) == len(outputs) == 4
    for before, after in zip(played.turns, played.turns[1:], strict=False):
        known = (*before.prompt_ids, *before.completion.token_ids)
        assert after.prompt_ids[: len(known)] == known
    (row,) = make_rows(played).sequences
    sampled = [x for turn in played.turns for x in turn.completion.token_ids]
    assert row.token_ids[row.mask == 1].tolist() == sampled
    assert set(row.behavior_logprobs[row.mask == 1].tolist()) == {-0.5}
    assert [m.role for m in played.messages][:3] == ["user", "assistant", "tool"]


def test_a_command_reaches_nothing_of_the_program(tmp_path):
    played, outputs, _ = episode(tmp_path, "spy")
    assert played.reason == "submit"
    assert "reached" not in outputs[0] and len(outputs[0].split()) == 3
    for secret in ("plain_program", "v1.sock", "commands.sock", "start.py", "API_KEY"):
        assert secret not in outputs[1], secret


def test_a_program_that_breaks_before_its_first_call_is_the_hosts_fault(tmp_path):
    with pytest.raises(InfraError, match=r"before its first call: .*nonsense"):
        episode(tmp_path, "crash")


def test_a_program_that_breaks_later_ends_the_episode(tmp_path):
    played, _, _ = episode(tmp_path, "late")
    assert (played.status, played.reason) == (Status.TRUNCATED, "agent:program")
    assert len(played.turns) == 1


def test_time_is_a_budget(tmp_path):
    played, _, _ = episode(tmp_path, "hang", time_limit_s=3.0)
    assert (played.status, played.reason) == (Status.TRUNCATED, "time")
    assert len(played.turns) == 1 and played.submission == ""


@pytest.mark.parametrize(
    ("budget", "reason", "turns"),
    [(Budget(turns=2, context=6000), "turns", 2), (Budget(context=40), "context", 0)],
)
def test_budgets_end_an_episode(tmp_path, budget, reason, turns):
    played, _, _ = episode(tmp_path, "play", budget=budget)
    assert (played.status, played.reason) == (Status.TRUNCATED, reason)
    assert len(played.turns) == turns


def test_a_fault_of_the_engine_is_no_fault_of_the_agent(tmp_path):
    with pytest.raises(GenerationError, match="no more lines"):
        episode(tmp_path, "play", [sh("true")])


def test_an_environment_without_a_shell_is_refused(tmp_path):
    fields = {f.name: None for f in dataclasses.fields(ExternalAgent)}
    agent = ExternalAgent(**{**fields, "program": Program(name="plain", argv=("x",))})
    world = FakeSuite().environment(make_task(), None)
    with pytest.raises(ConfigError, match="plain needs an environment with a shell"):
        asyncio.run(agent.run(make_task(), world, None, sample_index=0))


def test_a_command_in_front_of_the_sockets_is_refused(tmp_path):
    """Were they in its sandbox, it would still have the wrong uid."""
    code = (
        "import socket, sys\n"
        "door = socket.socket(socket.AF_UNIX)\n"
        "door.connect(sys.argv[1])\n"
        "door.sendall(sys.argv[2].encode() + b'\\n')\n"
        "print('answer:', door.recv(1000))\n"
    )

    async def work(provider):
        generator = TextGenerator(RENDERER, lambda session, turn: "hello")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            folder.chmod(0o755)
            uid = provider.program_uid
            async with Gateway(generator=generator, renderer_for=tools_renderer(RENDERER)) as gw:
                session = await gw.open("s", sampling=SamplingParams())
                await session.socket(folder / GATEWAY, allow_uid=uid)
                world = make_suite(tmp_path).environment(task_of(tmp_path), provider)
                commands = CommandSocket(folder / "commands.sock", world, allow_uid=uid)
                image = str(base_image(CACHE))
                box = await provider.create(
                    SandboxSpec(image=image, shared=name, best_effort=True, user=1)
                )
                async with commands:
                    said = [
                        await box.exec(["python3", "-S", "-c", code, f"{SHARED}/{end}", line])
                        for end, line in (
                            (GATEWAY, "GET /v1/models HTTP/1.0\r\n\r"),
                            ("commands.sock", '{"argv": ["true"]}'),
                        )
                    ]
                await box.destroy()
                await session.close()
        return said, commands

    said, commands = in_bwrap(work)
    assert "PermissionError" in said[0].output  # the folder is the program's alone
    assert said[1].output in ("answer: b''\n", "") or "Error" in said[1].output
    assert (commands.served, commands.refused) == (0, 1)


class Doomed:
    """A suite whose environments lose their sandbox by a command that says so, or never answer."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def environment(self, task, provider):
        return DoomedWorld(self._inner.environment(task, provider))


class DoomedWorld(Heard):
    async def shell(self, argv, **fields):
        if "the end" in argv[-1]:
            raise SandboxGone("a command ended it")
        if "for ever" in argv[-1]:
            await asyncio.sleep(600)
        return await super().shell(argv, **fields)


class Keeping(TextGenerator):
    """Remembers what an agent says of its calls."""

    def keep(self, turns, messages):
        self.kept = turns, messages


def test_a_run_that_is_cancelled_hands_over_the_record_of_its_gateway(tmp_path):
    suite = Doomed(make_suite(tmp_path))
    task = suite.tasks("train")[0]
    lines = ["A title", sh("echo for ever")]
    generator = Keeping(RENDERER, lambda session, turn: lines[turn])

    async def work(provider):
        world = suite.environment(task, provider)
        async with Gateway(generator=generator, renderer_for=tools_renderer(RENDERER)) as gateway:
            agent = player("title", gateway, provider)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3.0):
                    await agent.run(task, world, generator, sample_index=0)
            await world.close()

    in_bwrap(work)
    turns, messages = generator.kept
    assert [turn.kind for turn in turns] == ["aux", "agent"]
    assert [message.role for message in messages] == ["user", "assistant"]


def test_an_episode_without_a_result_keeps_the_record_of_its_gateway(tmp_path):
    """A command ended its sandbox: a title stays beside the work."""
    suite = Doomed(make_suite(tmp_path))
    task = suite.tasks("train")[0]
    lines = ["A title", sh("true"), sh("echo the end")]

    async def work(provider):
        generator = TextGenerator(RENDERER, lambda session, turn: lines[turn])
        async with Gateway(generator=generator, renderer_for=tools_renderer(RENDERER)) as gateway:
            return await collect(
                [task],
                1,
                suite=suite,
                provider=provider,
                generator=generator,
                agent=player("title", gateway, provider, time_limit_s=600.0),
                rollout=make_rollout(run_timeout_s=60.0, grade_timeout_s=60.0, init_timeout_s=30.0),
            )

    collected = in_bwrap(work)
    ((one,),) = (group.trajectories for group in collected.groups)
    assert (one.episode.status, one.episode.reason) == (Status.TRUNCATED, "agent:gone")
    assert one.score.value == 0.0
    assert [turn.kind for turn in one.episode.turns] == ["aux", "agent", "agent"]
    assert [m.role for m in one.episode.messages] == ["user", "assistant", "tool", "assistant"]
    counted = sum(len(t.completion.token_ids) for t in one.episode.turns)
    assert collected.sampled_tokens == counted > 0


def test_episodes_are_collected_as_any_others(tmp_path):
    """Through actor/: the world's shell is passed on and every sampled token is counted."""
    suite = make_suite(tmp_path)
    task = suite.tasks("train")[0]

    def say(session, turn):
        lines = repair(task) if session.endswith("/0") else [sh("true"), sh(DONE)]
        return lines[turn]

    async def work(provider):
        generator = TextGenerator(RENDERER, say)
        async with Gateway(generator=generator, renderer_for=tools_renderer(RENDERER)) as gateway:
            return await collect(
                [task],
                2,
                suite=suite,
                provider=provider,
                generator=generator,
                agent=player("play", gateway, provider),
                rollout=make_rollout(run_timeout_s=60.0, grade_timeout_s=60.0, init_timeout_s=30.0),
            )

    collected = in_bwrap(work)
    (group,) = collected.groups
    assert [item.score.value for item in group.trajectories] == [1.0, 0.0], collected.details
    assert [item.episode.reason for item in group.trajectories] == ["submit", "submit"]
    counted = sum(len(t.completion.token_ids) for i in group.trajectories for t in i.episode.turns)
    assert collected.sampled_tokens == counted > 0
