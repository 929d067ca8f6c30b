"""Tricks with code of their own: what outlives an episode, tar streams that leave their place."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from skyrl_jax.core.errors import DataError, SkyrlError
from tests.redteam.table import CodeTrick
from tests.redteam.world import Arena

_STAY = "setsid sleep {nap} > /dev/null 2>&1 & sleep 0.2"


async def _outlive(arena: Arena, guarded: bool) -> bool:
    """Start a process in a session of its own; is it there when the episode is over?"""
    nap = f"4{os.getpid()}.{1 if guarded else 2}{'bd'.index(arena.backend[0])}"
    command = _STAY.format(nap=nap)
    if guarded:
        async with arena.box(arena.spec()) as box:
            running = asyncio.ensure_future(box.exec(command + "; sleep 5"))
            await asyncio.sleep(1.0)
            assert _sleepers(nap), "the daemon did not start"
        await asyncio.gather(running, return_exceptions=True)
    else:
        await asyncio.to_thread(_naive_episode, command)
    left = _sleepers(nap)
    for pid in left:  # ours, by its own number
        os.kill(pid, signal.SIGKILL)
    return bool(left)


def _naive_episode(command: str) -> None:
    """Run a command as a runner does that ends an episode by its process group."""
    child = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    child.wait(timeout=30)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _sleepers(nap: str) -> list[int]:
    """Return the host's processes that are ``sleep nap``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == b"sleep\0%b\0" % (
                nap.encode()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _tar(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member in members:
            data = b"x" * member.size
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    member.size = 1 if kind == tarfile.REGTYPE else 0
    if kind == tarfile.BLKTYPE:
        member.devmajor, member.devminor = 8, 0
    return member


def _archive(
    members: Callable[[Path], tuple[tarfile.TarInfo, ...]], bad: str
) -> Callable[[Arena, bool], Awaitable[bool]]:
    """Return a play: ``members(outside)`` unpacked by ``put``, or by tar as it always was.

    The damage is ``bad`` outside of the target folder, or (a device) inside it.
    """

    async def play(arena: Arena, guarded: bool) -> bool:
        if not guarded:
            return await asyncio.to_thread(_unpacked, members, bad)
        async with arena.box(arena.spec()) as box:
            place = "/tmp/place/in"
            await box.exec(["mkdir", "-p", place], cwd="/")
            try:
                await box.put(place, _tar(*members(Path("/tmp/place"))))
            except (DataError, SkyrlError):
                pass
            look = f"cd {place} && {{ test -e {bad} || test -L {bad}; }}"
            return (await box.exec(look, cwd="/")).returncode == 0

    return play


def _unpacked(members: Callable[[Path], tuple[tarfile.TarInfo, ...]], bad: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="skyrl-redteam-tar-") as folder:
        place = Path(folder) / "in"
        place.mkdir()
        with tarfile.open(fileobj=io.BytesIO(_tar(*members(Path(folder))))) as archive:
            archive.extractall(place, filter="fully_trusted")
        return os.path.lexists(place / bad)


TRICKS = (
    CodeTrick(
        name="a daemon that outlives the episode",
        defence="a sandbox's processes end with it",
        play=_outlive,
    ),
    CodeTrick(
        name="tar: a member with ../",
        defence="members that leave the target are refused",
        play=_archive(lambda outside: (_member("../evil"),), "../evil"),
    ),
    CodeTrick(
        name="tar: an absolute member",
        defence="members that leave the target are refused",
        play=_archive(lambda outside: (_member(f"{outside}/evil"),), "../evil"),
    ),
    CodeTrick(
        name="tar: a file through a symlink",
        defence="links that leave the target, and members through links, are refused",
        play=_archive(
            lambda outside: (_member("way", tarfile.SYMTYPE, ".."), _member("way/evil")), "../evil"
        ),
    ),
    CodeTrick(
        name="tar: a hard link to what is outside",
        defence="a hard link's target must be in the stream",
        play=_archive(
            lambda outside: (
                _member("way", tarfile.SYMTYPE, "/etc"),
                _member("evil", tarfile.LNKTYPE, "way/passwd"),
            ),
            "evil",
        ),
    ),
    CodeTrick(
        name="tar: a device",
        defence="devices and pipes are refused",
        play=_archive(lambda outside: (_member("evil", tarfile.BLKTYPE),), "evil"),
    ),
)
