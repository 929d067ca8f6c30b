"""What a command may not do, and what it cannot break: bwrap and docker."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from skyrl_jax.core.errors import ImageError, InfraError
from skyrl_jax.sandbox.bwrap import AGENT_UID, UID_BASE
from tests.sandbox.conftest import Backend
from tests.sandbox.test_contract import nap

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes


def test_kill_everything_does_not_reach_the_supervisor(isolated: Backend) -> None:
    async def run() -> None:
        async with isolated.box() as box:
            done = await box.exec("sleep 50 & kill -9 -1; echo survived")
            assert "survived" in done.output
            assert "denied" in (await box.exec("kill -9 1 2>&1; true")).output.lower() or (
                "not permitted" in (await box.exec("kill -9 1 2>&1; true")).output.lower()
            )
            assert (await box.exec("echo next")).output == "next\n"

    asyncio.run(run())


def test_a_fork_bomb_stays_inside_the_pids_limit(isolated: Backend) -> None:
    bomb = "import os, time\nwhile 1:\n  try: os.fork()\n  except OSError: time.sleep(0.05)"

    async def run() -> None:
        async with isolated.box(pids=40) as box:
            count = "ls -d /proc/[0-9]* | wc -l"
            done = await box.exec(
                f"python3 -S -c '{bomb}' & sleep 0.7; exec 3</proc/loadavg; read a b c d e <&3;"
                " echo ${d#*/}",
                timeout_s=5,
            )
            assert done.returncode in (0, 2), done
            peak = _pids_peak()
            assert peak is None or peak <= 40
            # whatever it did, nothing of it is left and the next command works
            assert int((await box.exec(count)).output) <= 5

    def _pids_peak() -> int | None:
        found = [
            int(path.read_text())
            for path in Path("/sys/fs/cgroup/pids/skyrl").glob(f"tests.{os.getpid()}.*/pids.peak")
        ]
        return max(found) if found else None

    asyncio.run(run())


def test_a_memory_hog_is_reported_as_killed_for_memory(isolated: Backend) -> None:
    async def run() -> None:
        async with isolated.box(memory_mb=64) as box:
            done = await box.exec("python3 -S -c 'x = bytearray(300 << 20)'; echo after")
            assert done.oom_killed and "after" in done.output
            done = await box.exec("echo fine")
            assert not done.oom_killed and done.output == "fine\n"

    asyncio.run(run())


def test_bwrap_disk_use_is_limited(bwrap: Backend) -> None:
    async def run() -> None:
        async with bwrap.box(disk_mb=8) as box:
            done = await box.exec("head -c 20000000 /dev/zero > big; echo $?; ls -s big")
            assert "No space left" in done.output
            await box.exec("rm -f big")
            assert (await box.exec("echo ok > small && cat small")).output == "ok\n"

    asyncio.run(run())


def test_nothing_of_the_host_is_seen(bwrap: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_SECRET", "s3cret-of-the-host")
    look = "env; cat /proc/self/mountinfo /proc/self/cgroup /proc/1/cmdline /proc/[0-9]*/cmdline"
    look += "; cat /etc/passwd /etc/hosts; hostname; ls -R / --ignore=proc --ignore=usr 2>/dev/null"

    async def run() -> None:
        async with bwrap.box() as box:
            seen = (await box.exec(look, max_output_bytes=1 << 20)).output
            assert "s3cret" not in seen and "SKYRL" not in seen
            for path in (bwrap.spec().image, bwrap.spec().layers[0], os.getcwd(), "/tmp/pytest"):
                assert path not in seen
            assert os.uname().nodename not in seen.split()
            assert (await box.exec("test -r /proc/1/environ || echo no")).output == "no\n"
            binaries = "grep -rlF pyenv /usr/local/bin /usr/local/lib /etc 2>/dev/null | head -3"
            assert (await box.exec(binaries, timeout_s=120)).output == ""

    asyncio.run(run())


def test_there_is_no_network(isolated: Backend) -> None:
    async def run() -> None:
        async with isolated.box() as box:
            assert (await box.exec("grep -c : /proc/net/dev")).output == "1\n"  # lo
            code = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
            done = await box.exec(["python3", "-S", "-c", code], timeout_s=10)
            assert "unreachable" in done.output

    asyncio.run(run())


def _uids_of(mark: str) -> set[int]:
    """Host uids of every process whose command line holds the mark."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "cmdline").read_bytes().replace(b"\0", b" "):
                status = (entry / "status").read_text()
                uids = next(line for line in status.splitlines() if line.startswith("Uid:"))
                found.update(int(uid) for uid in uids.split()[1:])
        except (OSError, StopIteration):
            continue
    return found


def test_commands_have_no_power(isolated: Backend) -> None:
    seen: set[int] = set()

    def look_from_the_host() -> None:
        time.sleep(0.4)
        seen.update(_uids_of(nap(54321)))

    async def run() -> None:
        async with isolated.box() as box:
            status = (
                await box.exec("grep -E 'Cap(Inh|Prm|Eff|Amb)|NoNew' /proc/self/status")
            ).output
            assert status.count("0000000000000000") == 4 and "NoNewPrivs:\t1" in status
            assert (await box.exec("id -u")).output == "1\n"
            looker = threading.Thread(target=look_from_the_host)
            looker.start()
            await box.exec(nap(54321), timeout_s=1.0)
            looker.join()
            for attempt in (
                "unshare -Ur true",
                "mount -t tmpfs x /mnt",
                "chroot / true",
                "su -c id",
            ):
                assert (await box.exec(attempt)).returncode != 0, attempt
            assert (await box.exec("touch /usr/x /etc/x /x")).returncode != 0

    asyncio.run(run())
    assert seen and 0 not in seen
    if isolated.kind == "bwrap":
        assert seen == {AGENT_UID}


def test_no_process_of_a_bwrap_sandbox_is_host_root(bwrap: Backend) -> None:
    async def run() -> None:
        async with bwrap.box() as box:
            running = asyncio.ensure_future(box.exec("sleep 54322", timeout_s=1.5))
            await asyncio.sleep(0.4)
            (members,) = Path("/sys/fs/cgroup/pids/skyrl").glob(f"tests.{os.getpid()}.*/")
            uids = {
                line.split()[1]
                for pid in (members / "cgroup.procs").read_text().split()
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith("Uid:")
            }
            assert uids == {str(UID_BASE), str(AGENT_UID)}
            await running

    asyncio.run(run())


def test_git_and_python_work_inside(isolated: Backend) -> None:
    async def run() -> None:
        async with isolated.box() as box:
            done = await box.exec(
                "git init -q . && git add -A && git commit -qm first && echo two > a.txt; git diff"
            )
            assert "-one\n+two\n" in done.output and "dubious" not in done.output
            code = "import sys, ssl, sqlite3, ctypes, lzma, unittest; print(sys.prefix)"
            for python in ("python3", "/usr/bin/python3", "/usr/local/bin/python3"):
                assert (await box.exec([python, "-c", code])).output == "/usr/local\n"
            tools = "sh bash git grep sed find diff patch tar make ps which awk"
            done = await box.exec(
                f"for tool in {tools}; do command -v $tool || echo no $tool; done"
            )
            assert "no " not in done.output

    asyncio.run(run())


def test_a_sandbox_that_cannot_start_says_why(bwrap: Backend, tmp_path: Path) -> None:
    async def run() -> None:
        async with bwrap.make() as provider:
            with pytest.raises(ImageError, match="no-such-image"):
                await provider.create(bwrap.spec(image=str(tmp_path / "no-such-image")))
            (tmp_path / "empty").mkdir()
            with pytest.raises(ImageError, match="root filesystem"):
                await provider.create(bwrap.spec(image=str(tmp_path / "empty")))
            (tmp_path / "broken" / "bin").mkdir(parents=True)
            (tmp_path / "broken" / "proc").write_text("a file where a directory must be")
            with pytest.raises(InfraError, match=r"did not start.*proc"):
                await provider.create(bwrap.spec(image=str(tmp_path / "broken")))
            with pytest.raises(InfraError, match="network"):
                await provider.create(bwrap.spec(network=True))
            assert provider.live == 0

    asyncio.run(run())
