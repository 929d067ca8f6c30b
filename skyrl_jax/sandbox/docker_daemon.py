"""The connection to a docker daemon: found, checked once, and every call with a deadline."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl_jax.core.errors import HostError, ImageError, InfraError
from skyrl_jax.sandbox.orphans import end_orphan

T = TypeVar("T")
_SCHEMES = ("unix://", "tcp://", "http://", "https://")
# What `docker info` calls the limits that a spec asks for; rootless daemons often lack some.
_LIMITS = {"MemoryLimit": "memory_mb", "PidsLimit": "pids", "CpuCfsQuota": "cpus"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerOptions:
    """How the docker backend uses a daemon.

    Args:
        runtime: OCI runtime, such as "runsc" ("" = the daemon's default).
        read_only: the root filesystem is read-only; the working directory and /tmp are tmpfs with
            ``disk_mb`` together, which limits the sandbox's disk use (and counts as its memory).
        connections: connections to the daemon kept open, and calls to it at a time.
        call_timeout_s: deadline of every single call to the daemon.
    """

    runtime: str = ""
    read_only: bool = False
    connections: int = 16
    call_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """What a daemon says of itself: limits it cannot enforce, and whether it maps user ids."""

    missing_limits: tuple[str, ...] = ()
    maps_ids: bool = False


def candidates(environ: Mapping[str, str], root: str = "") -> list[str]:
    """Return the sockets at which a daemon may listen: docker's, rootless docker's, podman's."""
    found = [f"{root}/var/run/docker.sock", f"{root}/run/podman/podman.sock"]
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        found[1:1] = [f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock"]
    return found


def find_daemon(environ: Mapping[str, str], root: str = "") -> str:
    """Return the address of the daemon: DOCKER_HOST, or the first socket that is there.

    Raises:
        InfraError: DOCKER_HOST has another form than an address of a daemon, or there is no socket;
            the text names all places.
    """
    named = environ.get("DOCKER_HOST", "")
    if named:
        return check_address(named)
    places = candidates(environ, root)
    for place in places:
        if _is_socket(place):
            return f"unix://{place}"
    raise InfraError(
        "docker: no daemon's socket found; DOCKER_HOST is not set, and there is none at "
        f"{', '.join(places)}: start dockerd, rootless docker or `podman system service`, set "
        "DOCKER_HOST, or put `.venv/bin/python .ci/with_docker.py` before the command, which "
        "starts one",
        cause="docker",
    )


def check_address(host: str) -> str:
    """Return an address that the client understands.

    Raises:
        InfraError: it has another form.
    """
    if not host.startswith(_SCHEMES):
        raise InfraError(
            f"docker: the address {host!r} must begin with one of {', '.join(_SCHEMES)}",
            cause="docker",
        )
    return host


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


class DaemonConnection:
    """Calls to one daemon, each in a thread with a deadline.

    Args:
        host: its address; ``None``: see ``find_daemon``.
        options: how it is used.
    """

    def __init__(self, host: str | None, options: DockerOptions) -> None:
        """Keep the settings; nothing is reached."""
        self._host = host or ""
        self._options = options
        self._timeout_s = options.call_timeout_s
        self._threads = ThreadPoolExecutor(
            max_workers=options.connections, thread_name_prefix="docker"
        )
        self._client: Any = None
        self._facts = DaemonFacts()

    async def connect(self) -> None:
        """Reach the daemon and read what it can do.

        Raises:
            InfraError: no daemon answers, or it lacks the runtime; the message names the address.
        """
        self._client = await self.call(self._connect)
        self._facts = await self.call(self._read_facts)

    @property
    def client(self) -> Any:
        """The API client: for use inside ``call``."""
        return self._client

    def disconnect(self) -> None:
        """Close the connections; calls under way are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    async def call(
        self,
        function: Callable[..., T],
        *args: Any,
        late: Callable[[T], None] | None = None,
        seconds: float | None = None,
    ) -> T:
        """Run a call to the daemon in a thread, with a deadline.

        Args:
            function: the call.
            *args: its arguments.
            late: takes a result that nobody waits for any more, in the call's own thread.
            seconds: its deadline; by default that of a single request.

        Raises:
            ImageError, InfraError: what the daemon or the client said.
        """
        job = self._threads.submit(function, *args)
        try:
            return await self._wait(job, self._timeout_s if seconds is None else seconds)
        except BaseException:
            if late is not None:
                job.add_done_callback(lambda done: _hand_over(done, late))
            raise

    async def _wait(self, job: Future[T], seconds: float) -> T:
        try:
            async with asyncio.timeout(seconds + 1.0):
                return await asyncio.wrap_future(job)
        except TimeoutError as error:
            raise InfraError(
                f"docker at {self._host} did not answer within {seconds:.0f} s", cause="docker"
            ) from error
        except HostError:
            raise
        except Exception as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        import docker.errors
        import requests.exceptions

        if isinstance(error, docker.errors.ImageNotFound):
            return ImageError(
                f"docker image not found: {error.explanation} (the sandbox's own image is made by "
                "the two commands in skyrl_jax/sandbox/images.py)"
            )
        if isinstance(error, (docker.errors.DockerException, requests.exceptions.RequestException)):
            return InfraError(f"docker at {self._host}: {error}", cause="docker")
        if isinstance(error, OSError):
            return InfraError(f"docker at {self._host}: {error}", cause="docker")
        return error

    def _connect(self) -> Any:
        import docker.errors

        self._host = check_address(self._host) if self._host else find_daemon(os.environ)
        try:
            made = self.new_client(self._timeout_s)
            made.ping()
        except docker.errors.DockerException as error:
            raise InfraError(
                f"docker at {self._host}: no daemon answers; start one, or put `.venv/bin/python "
                f".ci/with_docker.py` before the command, which starts one ({error})",
                cause="docker",
            ) from error
        return made

    def new_client(self, timeout_s: float) -> Any:
        """Return another client of the daemon; its requests have this time-out."""
        import docker

        return docker.APIClient(
            base_url=self._host,
            timeout=timeout_s,
            version="auto",
            max_pool_size=self._options.connections,
        )

    def _read_facts(self) -> DaemonFacts:
        info = self._client.info()
        runtimes = sorted(info.get("Runtimes") or ())
        wanted = self._options.runtime
        if wanted and runtimes and wanted not in runtimes:
            raise InfraError(
                f"docker at {self._host} has no runtime {wanted!r}; it has: {', '.join(runtimes)} "
                "(sandbox.docker_runtime; a daemon learns of one in its daemon.json)",
                cause="docker",
            )
        security = " ".join(info.get("SecurityOptions") or ())
        return DaemonFacts(
            missing_limits=tuple(key for name, key in _LIMITS.items() if info.get(name) is False),
            maps_ids="rootless" in security or "userns" in security,
        )

    def remove(self, container: str) -> None:
        """Remove a container; one that is gone or going already is fine."""
        import docker.errors

        try:
            self._client.remove_container(container, force=True, v=True)
        except docker.errors.NotFound:
            end_orphan(container)
        except docker.errors.APIError as error:
            if error.status_code != 409:  # 409: auto-removal is on its way
                raise

    def ping(self) -> None:
        """Ask the daemon for a sign of life."""
        self._client.ping()


def _hand_over(done: Future[T], late: Callable[[T], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        late(done.result())
