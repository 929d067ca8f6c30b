"""A user without root gets bwrap sandboxes too: own uid, rlimits, a pid namespace per command."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_jax.sandbox import native_build
from tests.sandbox.dockerd import REPO
from tests.sandbox.test_contract import sleepers

pytestmark = pytest.mark.xdist_group("sandbox")  # they look at the host's processes

USER = f"skyrl-plain-{os.getpid()}"


@pytest.fixture
def plain_uid() -> Iterator[int]:
    """The uid of a user made for the test; -1 when the tests do not run as root themselves."""
    if os.geteuid() != 0:
        yield -1
        return
    subprocess.run(["userdel", USER], capture_output=True, timeout=30)
    subprocess.run(["useradd", "--no-create-home", "--user-group", USER], check=True, timeout=30)
    try:
        yield pwd.getpwnam(USER).pw_uid
    finally:
        subprocess.run(["userdel", USER], check=True, timeout=30)


@pytest.fixture
def open_cache(image: Path, plain_uid: int) -> Iterator[Path]:
    """A cache directory of that user with a copy of the image it can reach."""
    home = Path(tempfile.mkdtemp(prefix="skyrl-plain-"))
    home.chmod(0o755)
    linked = subprocess.run(["cp", "-al", str(image), str(home / "image")], capture_output=True)
    if linked.returncode:
        shutil.rmtree(home / "image", ignore_errors=True)
        subprocess.run(["cp", "-a", str(image), str(home / "image")], check=True)
    shutil.copytree(native_build._SOURCES, home / "cache" / "sources")
    for directory, names, files in os.walk(home / "cache"):
        for path in (directory, *(os.path.join(directory, name) for name in (*names, *files))):
            if plain_uid >= 0:
                os.chown(path, plain_uid, plain_uid)
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def test_a_user_without_root(plain_uid: int, open_cache: Path) -> None:
    command = [sys.executable, "-m", "tests.sandbox.plain_user", str(plain_uid)]
    command += [str(open_cache / "image"), str(open_cache / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPO)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["uid"] != 0
    assert "best_effort" in found["without_best_effort"] and "cgroup" in found["warning"]
    assert found["caps"].count("0000000000000000") == 3
    assert found["user_ns"] != 0
    assert int(found["processes"]) <= 4  # the namespace's init, sh, ls, wc: no supervisor in sight
    assert found["kill"].endswith("survived\n")
    assert "dubious" not in found["git"] and "x" in found["git"]
    assert found["got"] == "two"
    assert found["timed_out"][0] and found["timed_out"][1] < 5
    assert "MemoryError" in found["memory"]
    assert 5 <= int(found["forks"].split()[0]) < 20
    assert found["live"] == 0
    assert sleepers("sleep 4567") == []
