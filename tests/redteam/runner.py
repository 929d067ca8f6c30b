"""Plays tricks: once as they are, once with their defence off. One row for each on each backend."""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import Any

from skyrl_jax.core.errors import SkyrlError
from skyrl_jax.core.types import ToolCall
from skyrl_jax.tasks.swe.suite import task_row
from tests.redteam import (
    suicides,
    tricks_code,
    tricks_log,
    tricks_machine,
    tricks_patches,
    tricks_tests,
)
from tests.redteam.table import (
    CodeTrick,
    MachineTrick,
    Off,
    RewardTrick,
    Seen,
    Suicide,
    Trick,
)
from tests.redteam.weak import graded
from tests.redteam.world import Arena, World

_LIMIT_S = 240.0  # of one trick with its control
Row = dict[str, Any]


def sealed_tricks(arena: Arena) -> tuple[RewardTrick, ...]:
    """Return the tricks on the arena's synthetic row."""
    row = arena.world("sealed").task.payload["row"]
    name = str(row.extra["function"]).partition("(")[0].removeprefix("def ")
    return tricks_log.sealed_tricks(row.extra["path"], name, (*row.fail_to_pass, *row.pass_to_pass))


def tricks(arena: Arena) -> tuple[Trick, ...]:
    """Return every trick of the tables."""
    return (
        *tricks_tests.TRICKS,
        *tricks_log.TRICKS,
        *sealed_tricks(arena),
        *tricks_patches.TRICKS,
        *tricks_machine.TRICKS,
        *tricks_code.TRICKS,
    )


def names(arena: Arena) -> list[str]:
    """Return the names of all tricks and suicides, in the order they are played."""
    return [one.name for one in (*tricks(arena), *suicides.SUICIDES)]


async def play(arena: Arena, name: str) -> Row:
    """Play one trick or suicide, and its control.

    Raises:
        KeyError: there is none of this name.
    """
    known = {one.name: one for one in (*tricks(arena), *suicides.SUICIDES)}
    one = known[name]
    if isinstance(one, Suicide):
        return await _row(arena, name, "suicide", _suicide(arena, one))
    return await _row(arena, name, "trick", both(arena, one))


def holds(row: Row) -> bool:
    """Say whether the defence held and the control bit."""
    return row["defended"] is True and row["control"] is True


async def _row(arena: Arena, name: str, kind: str, work: Any) -> Row:
    began = time.monotonic()
    try:
        async with asyncio.timeout(_LIMIT_S):
            held, bit, note = await work
    except Exception as error:
        held, bit, note = False, False, f"{type(error).__name__}: {error}"
    return {
        "trick": name,
        "kind": kind,
        "backend": arena.backend,
        "defended": held,
        "control": bit,
        "note": note,
        "seconds": round(time.monotonic() - began, 2),
    }


async def _suicide(arena: Arena, suicide: Suicide) -> tuple[bool, bool, str]:
    if not arena.twin:  # one play for all of them: it does not depend on the harm
        arena.twin.append(await suicides.control(arena))
    bit, why = arena.twin[0]
    held, note = await suicides.defended(arena, suicide)
    return held, bit, note if bit else f"{note}; the harmless twin: {why}"


async def both(arena: Arena, trick: Trick) -> tuple[bool, bool, str]:
    """Return (the defence held, the control bit, a note)."""
    if isinstance(trick, RewardTrick):
        return await _reward(arena, trick)
    if isinstance(trick, MachineTrick):
        first = await _machine(arena, trick, guarded=True)
        second = await _machine(arena, trick, guarded=False)
        note = "" if not trick.bites(first) and trick.bites(second) else _tell(first, second)
        return not trick.bites(first), trick.bites(second), note
    assert isinstance(trick, CodeTrick)
    return not await trick.play(arena, True), await trick.play(arena, False), ""


def _tell(first: Seen, second: Seen) -> str:
    return f"{first.text[-300:]!r} {first.error!r} | {second.text[-300:]!r} {second.error!r}"


async def _reward(arena: Arena, trick: RewardTrick) -> tuple[bool, bool, str]:
    world = arena.world(trick.world)
    await _honest(arena, trick.world)
    diff = await submission(arena, world, trick)
    if trick.verdict == "full":
        score = await world.suite.reward(world.task, diff, arena.provider)
        bit, note = score.value != 0.0, score.verdict
    else:
        bit = await graded(arena, world, diff, Off(verdict=trick.verdict), None)
        note = "escaped" if bit else "nothing outside the tree"
    return not bit, await _control(arena, trick, diff), note


async def _honest(arena: Arena, name: str) -> None:
    """Check once that a world's repair is rewarded: where nothing is, no trick is defended."""
    if name not in arena.honest:
        world = arena.world(name)
        patch = task_row(world.task).patch
        arena.honest[name] = await world.suite.reward(world.task, patch, arena.provider)
    score = arena.honest[name]
    if score.value != 1.0:
        raise RuntimeError(f"world {name}: its own repair is {score.verdict}: {score.breakdown}")


async def _control(arena: Arena, trick: RewardTrick, diff: str) -> bool:
    off = trick.off
    if off.own_sandbox:
        return await _in_own_sandbox(arena, trick)
    world = arena.world(off.world or trick.world)
    if off.world:
        diff = await submission(arena, world, trick)
    return await graded(arena, world, diff, off, None)


async def submission(arena: Arena, world: World, trick: RewardTrick) -> str:
    """Return what the agent submits: a diff as it is, or that of its commands."""
    if trick.diff:
        return trick.diff.decode("utf-8", "surrogateescape")
    environment = world.suite.environment(world.task, arena.provider)
    try:
        await environment.reset()
        await environment.step([_bash(trick.script)])
        return await environment.submission()
    finally:
        await environment.close()


async def _in_own_sandbox(arena: Arena, trick: RewardTrick) -> bool:
    """Grade where the agent worked."""
    world = arena.world(trick.world)
    async with arena.box(arena.spec()) as box:
        await box.exec(["bash", "-c", trick.script])
        return await graded(arena, world, "", trick.off, box)


def _bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


async def _machine(arena: Arena, trick: MachineTrick, *, guarded: bool) -> Seen:
    changes = {**trick.spec, **({} if guarded else trick.off_spec)}
    backend = "" if guarded else trick.off_backend
    script = trick.script if guarded or not trick.off_script else trick.off_script
    room = trick.output_bytes if guarded or not trick.off_output_bytes else trick.off_output_bytes
    if backend == "process":
        changes |= {"layers": (), "workdir": "/"}
    child = await asyncio.to_thread(_bystander, arena)
    done: list[Any] = []
    try:
        async with arena.box(arena.spec(**changes), backend) as box:
            commands = [script] if not guarded and trick.off_script else [script, trick.then]
            for command in filter(None, commands):
                known = _filled(command, arena)
                done.append(await box.exec(known, timeout_s=20.0, max_output_bytes=room))
    except SkyrlError as error:
        return Seen(**dict(zip(("first", "second"), done, strict=False)), error=error)
    finally:
        child.terminate()
        child.wait(timeout=10)
    return Seen(**dict(zip(("first", "second"), done, strict=False)))


def _bystander(arena: Arena) -> subprocess.Popen[bytes]:
    """Start a process of the host whose environment holds a secret."""
    env = {"REDTEAM_SECRET": arena.facts["mark"], "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(["sleep", "120"], env=env)


def _filled(command: str, arena: Arena) -> str:
    for name, value in arena.facts.items():
        command = command.replace(f"@{name}@", value)
    return command
