"""A docker daemon for the tests: the host's own if one answers, else a private one of ours.

The private daemon needs root and the packages docker.io and iptables; its socket and data lie in a
temporary directory, it touches no network setting, and it ends with the test session.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
_READY_TIMEOUT_S = 60.0


def _answers(host: str) -> bool:
    done = subprocess.run(
        ["docker", "-H", host, "version", "--format", "{{.Server.Version}}"],
        capture_output=True,
        timeout=30,
    )
    return done.returncode == 0


class PrivateDaemon:
    """A daemon of our own that can be restarted; ``close`` leaves nothing of it.

    Args:
        containerd: also start a containerd of our own, as a system has it. It outlives a daemon
            that is killed; without, the daemon's own one is killed with it.
    """

    def __init__(self, *, containerd: bool = False) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="skyrl-dockerd-"))
        self.host = f"unix://{self.home}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._separate = containerd
        self._containerd: subprocess.Popen[bytes] | None = None

    def _start_containerd(self) -> list[str]:
        home = self.home
        address = f"{home}/containerd.sock"
        if self._containerd is None:
            config = home / "containerd.toml"
            config.write_text('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
            command = ["containerd", f"--config={config}", f"--address={address}"]
            command += [f"--root={home}/containerd/root", f"--state={home}/containerd/state"]
            with open(home / "containerd.log", "ab") as log:
                self._containerd = subprocess.Popen(
                    command, stdout=log, stderr=log, start_new_session=True
                )
        return [f"--containerd={address}"]

    def start(self) -> None:
        """Start it and wait until it answers."""
        home = self.home
        command = ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none"]
        command += ["--storage-driver=overlay2", f"--host={self.host}", f"--data-root={home}/root"]
        command += [f"--exec-root={home}/exec", f"--pidfile={home}/pid"]
        command += self._start_containerd() if self._separate else []
        with open(home / "log", "ab") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._process = daemon
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not _answers(self.host):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start: {(home / 'log').read_text()[-3000:]}")
            time.sleep(0.2)

    def stop(self, *, kill: bool = False) -> None:
        """End it: with SIGTERM it stops its containers first, with SIGKILL nothing is told."""
        daemon, self._process = self._process, None
        if daemon is None:
            return
        if kill:
            daemon.kill()
        else:
            daemon.terminate()
        try:
            daemon.wait(timeout=30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(timeout=10)
        if kill:  # or the next one takes the pids for those of the living
            self._end_containerd()
            (self.home / "pid").unlink(missing_ok=True)

    def _end_containerd(self) -> None:
        file = self.home / "exec" / "containerd" / "containerd.pid"
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            command = Path(f"/proc/{pid}/cmdline")
            deadline = time.monotonic() + 10.0
            while str(self.home) in command.read_text() and time.monotonic() < deadline:
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
        file.unlink(missing_ok=True)

    def close(self) -> None:
        """End it and remove its data."""
        self.stop()
        if self._containerd is not None:
            self._containerd.terminate()
            try:
                self._containerd.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._containerd.kill()
                self._containerd.wait(timeout=10)
        _unmount_below(self.home)
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def private_dockerd() -> Iterator[str]:
    """Start a daemon of our own; yields its address."""
    daemon = PrivateDaemon()
    try:
        daemon.start()
        yield daemon.host
    finally:
        daemon.close()


def _unmount_below(home: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(str(home))), reverse=True):
        subprocess.run(["umount", "-l", mount], capture_output=True, timeout=30)


@contextlib.contextmanager
def docker_host() -> Iterator[str]:
    """Yield the address of a daemon that works: DOCKER_HOST, the system's, or a private one."""
    for host in (os.environ.get("DOCKER_HOST"), "unix:///var/run/docker.sock"):
        if host and _answers(host):
            yield host
            return
    with private_dockerd() as host:
        yield host


def build_image(host: str, base: Path, tag: str = "skyrl-sandbox:test") -> str:
    """Import the base image and build containers/sandbox/Dockerfile on it; returns the tag."""
    from skyrl_jax.sandbox.images import import_into_docker

    base_tag = tag.split(":")[0] + ":base"
    import_into_docker(base, base_tag, host)
    command = ["docker", "-H", host, "build", "--network", "none", "-t", tag]
    command += ["--build-arg", f"BASE={base_tag}", str(REPO / "containers" / "sandbox")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
    )
    if done.returncode:
        raise RuntimeError(f"docker build failed: {done.stderr[-3000:]}{done.stdout[-2000:]}")
    return tag
