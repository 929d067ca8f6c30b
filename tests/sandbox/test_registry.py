"""The list of open sandboxes outlives its owner; the reaper takes the dead's and nobody else's."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker as docker_sdk
import pytest

from launchers import doctor
from skyrl_jax.core.errors import InfraError
from skyrl_jax.sandbox import reaper
from skyrl_jax.sandbox.cgroup import owner_alive, pid_namespace, run_name
from skyrl_jax.sandbox.orphans import end_orphan
from skyrl_jax.sandbox.reaper import reap
from skyrl_jax.sandbox.registry import Book, read_run, registry_folder, runs
from tests.sandbox.conftest import CACHE, Backend
from tests.sandbox.dockerd import REPO

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes

GONE = "unix:///nowhere/docker.sock"


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder, and so a registry, of this test alone; open to a sandbox's uids."""
    with tempfile.TemporaryDirectory(prefix="skyrl-registry-") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("DOCKER_HOST", GONE)
        yield Path(folder)


def dead_run(backend: str, traces: list[str], **head: object) -> Path:
    """Write the file of a run whose owner is gone."""
    name = f"old.4194304.1.{os.urandom(3).hex()}"
    path = registry_folder() / f"{name}.jsonl"
    lines = [{"backend": backend, "run": name, "where": "", "since": time.time(), **head}]
    lines.append({"made": 0, "traces": traces})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_book_says_what_is_open_and_its_file_goes_with_the_last(own_tmp: Path) -> None:
    book: Book[str] = Book("bwrap")
    book.add("before", ["x"])  # no file yet: only the set
    assert list(book) == ["before"] and runs() == []
    book.forget("before", False)
    name = run_name("r")
    book.open(name)
    for box in ("a", "b"):
        book.add(box, [f"/{box}"])
    book.note("b", ["/b", "/more"])
    book.forget("a", False)
    book.forget("unknown", False)
    (run,) = runs()
    assert (run.backend, run.run, run.alive, len(book)) == ("bwrap", name, True, 1)
    assert list(run.open.values()) == [("/b", "/more")]
    book.forget("b", True)
    assert (len(book), book.left, len(runs()[0].open)) == (0, 1, 1)
    book.close()
    (run,) = runs()
    assert not run.alive and list(run.open.values()) == [("/b", "/more")]
    again: Book[str] = Book("bwrap")
    again.open(run_name("r"))
    again.add("c")
    again.forget("c", True)
    again.settle()
    again.close()
    assert [found.run for found in runs()] == [name]


def test_a_line_that_a_kill_cut_short_counts_for_nothing(own_tmp: Path) -> None:
    path = dead_run("bwrap", ["/x"])
    with path.open("a") as file:
        file.write('{"made": 1, "tra')
    run = read_run(path)
    assert run is not None and dict(run.open) == {0: ("/x",)} and not run.alive
    path.write_text("no json\n")
    damaged = read_run(path)
    assert damaged is not None and damaged.backend == "" and reap() == [] and path.exists()
    assert read_run(own_tmp / "absent") is None


def test_the_lock_decides_who_lives(own_tmp: Path) -> None:
    """Also of an owner in another pid namespace, whose pid means nothing here."""
    path = dead_run("process", [])
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run = read_run(path)
        assert run is not None and run.alive
        assert reap() == [] and path.exists()
    assert reap() == [] and not path.exists()
    name = run_name("r")
    assert name.endswith(f"-{pid_namespace()}") and owner_alive(name)
    assert owner_alive("r.4194304.1.abcdef-17")  # of another pid namespace: nobody here can tell
    assert not owner_alive("r.4194304.1.abcdef")


def test_a_registry_that_cannot_be_is_the_hosts_fault(own_tmp: Path) -> None:
    (own_tmp / f"skyrl-sandboxes-{os.geteuid()}").write_text("a file")
    with pytest.raises(InfraError, match="not a directory of this user") as caught:
        Book[str]("bwrap").open(run_name("r"))
    assert caught.value.cause == "registry"


def test_a_full_disk_stops_the_making_and_not_the_destroying(own_tmp: Path) -> None:
    book: Book[str] = Book("bwrap")
    book.open(run_name("r"))
    book.add("a")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, book._fd)
    os.close(full)
    with pytest.raises(InfraError, match="No space left.*TMPDIR"):
        book.add("b")
    assert list(book) == ["a"]
    book.forget("a", False)
    assert len(book) == 0


def test_commands_that_lost_their_supervisor_are_found_by_their_home(own_tmp: Path) -> None:
    folder = own_tmp / "skyrl-process-abc.old.4194304.1.abcdef"
    folder.mkdir()
    env = {"HOME": str(folder), "PATH": os.environ["PATH"]}
    orphan = subprocess.Popen(["sleep", "60"], env=env, start_new_session=True)
    other = subprocess.Popen(["sleep", "60"], env={**env, "HOME": f"{folder}x"})
    try:
        path = dead_run("process", [str(folder), "/etc"])
        (found,) = reap(remove=False)
        assert found.what == str(folder) and orphan.poll() is None and path.exists()
        (found,) = reap()
        assert (found.backend, found.what, found.problem) == ("process", str(folder), "")
        assert orphan.wait(timeout=10) == -signal.SIGKILL
        assert not folder.exists() and not path.exists() and other.poll() is None
    finally:
        for process in (orphan, other):
            process.kill()
            process.wait(timeout=10)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups")
def test_only_cgroups_of_the_run_itself_are_removed(own_tmp: Path) -> None:
    root = Path("/sys/fs/cgroup")
    root = root / "skyrl" if (root / "cgroup.controllers").exists() else root / "pids" / "skyrl"
    path = dead_run("bwrap", [])
    mine, foreign = root / f"{path.stem}.0", root / "alive.1.1.abcdef-1.0"
    for directory in (mine, foreign):
        directory.mkdir(parents=True)
    try:
        entry = {"made": 0, "traces": [str(mine), str(foreign), str(own_tmp)]}
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        assert [item.what for item in reap()] == [str(mine)]
        assert foreign.is_dir() and own_tmp.is_dir() and not mine.exists()
    finally:
        foreign.rmdir()


def test_a_daemon_that_is_away_keeps_its_run_for_a_day(own_tmp: Path) -> None:
    path = dead_run("docker", ["0" * 64], where=GONE)
    (found,) = reap()
    assert "no docker daemon" in found.problem and path.exists()
    old = dead_run("docker", ["0" * 64], where=GONE, since=time.time() - 2 * 24 * 3600)
    assert len(reap()) == 1 and not old.exists()


def test_another_backends_start_reaps_containers_too(
    bwrap: Backend, docker: Backend, daemon: str, own_tmp: Path
) -> None:
    """The file names the daemon: who starts need not know it."""
    path = dead_run("docker", [], where=daemon)
    client = docker_sdk.APIClient(base_url=daemon, timeout=30)
    labels = {reaper.LABEL_RUN: path.stem, reaper.LABEL_HOST: "another boot"}
    client.create_container(docker.spec().image, ["true"], labels=labels)
    listed = {"label": f"{reaper.LABEL_RUN}={path.stem}"}
    assert len(client.containers(all=True, filters=listed)) == 1

    async def run() -> None:
        async with bwrap.make():
            assert client.containers(all=True, filters=listed) == []

    asyncio.run(run())
    assert not path.exists()
    client.close()


def test_a_forgotten_container_is_ended_with_its_shim(tmp_path: Path) -> None:
    """The stand-in has a shim's name and arguments, and a child; others have neither."""
    number = os.urandom(32).hex()
    shim = tmp_path / "containerd-shim-runc-v2"
    shim.symlink_to("/bin/sh")
    argv = [str(shim), "-c", "sleep 61 & wait", "-id", number]
    held = subprocess.Popen(argv, start_new_session=True)
    innocent = subprocess.Popen(["sh", "-c", "sleep 62; true", "-id", number])
    try:
        assert not end_orphan(number[:12])
        assert end_orphan(number)
        held.wait(timeout=10)  # killed, or it saw the end of its child first
        assert innocent.poll() is None
        assert not end_orphan(number)
    finally:
        for process in (held, innocent):
            process.kill()
            process.wait(timeout=10)


@pytest.fixture
def owner(own_tmp: Path, bwrap: Backend) -> Iterator[subprocess.Popen[bytes]]:
    """A process with three sandboxes of bwrap."""
    spec = bwrap.spec()
    command = [sys.executable, "-W", "ignore", "-m", "tests.sandbox.owner", "bwrap"]
    command += [spec.image, str(CACHE), spec.layers[0], ""]
    env = {**os.environ, "TMPDIR": str(own_tmp)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=REPO, env=env, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"running\n"
    yield process
    process.kill()
    process.wait(timeout=10)


def doctor_says(own_tmp: Path, *flags: str) -> tuple[int, dict[str, list[dict[str, object]]]]:
    done = subprocess.run(
        [sys.executable, "launchers/doctor.py", "sandboxes", "--json", *flags],
        cwd=REPO,
        env={**os.environ, "TMPDIR": str(own_tmp)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_doctor_lists_the_living_and_removes_the_dead(
    own_tmp: Path, owner: subprocess.Popen[bytes]
) -> None:
    folder = own_tmp / "skyrl-process-abc.old.4194304.1.abcdef"
    folder.mkdir()
    _, found = doctor_says(own_tmp, "--remove")
    (live,) = found["live"]
    assert str(owner.pid) in str(live["run"]) and live["open"] == 3
    assert str(folder) in [item["what"] for item in found["left"]] and not folder.exists()
    assert owner.poll() is None
    owner.kill()
    owner.wait(timeout=10)
    deadline = time.monotonic() + 15
    while True:  # its launchers end by themselves; the run's file stays for the next
        _, found = doctor_says(own_tmp, "--remove")
        if not any(str(owner.pid) in str(item) for item in found["left"]):
            break
        assert time.monotonic() < deadline
    assert found["live"] == [] and runs() == []


def test_the_doctor_in_words(
    own_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_tmp / "skyrl-process-abc.old.4194304.1.abcdef"
    folder.mkdir()
    book: Book[str] = Book("bwrap")
    book.open(run_name("mine"))
    book.add("a")
    doctor.flags.FLAGS(["doctor"])
    kept = lambda **how: [item for item in reap(**how) if str(own_tmp) in item.what]  # noqa: E731
    monkeypatch.setattr(doctor, "reap", kept)
    assert doctor.sandboxes([]) == 1
    told = capsys.readouterr().out
    assert f"left  process old.4194304.1.abcdef: {folder}\n" in told and "--remove" in told
    assert "live  bwrap   mine." in told and ": 1 open, since 2" in told
    doctor.flags.FLAGS.remove = True
    assert doctor.sandboxes([]) == 0 and not folder.exists()
    assert f"{folder} (removed)" in capsys.readouterr().out
    assert doctor.sandboxes([]) == 0
    assert "no dead run left anything" in capsys.readouterr().out
    doctor.flags.FLAGS.remove = False
    book.close()
