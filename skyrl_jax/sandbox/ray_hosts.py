"""Sandbox hosts placed by Ray: one actor a node, the same host as launchers/sandbox_host.py inside.

Ray places the hosts, says which nodes live, and ends the hosts with the run; sandboxes are made and
used over HTTP as on any host, so that no command goes through Ray. A host whose node or actor died
is given up (its sandboxes raise InfraError) and another node takes its place. Every node needs this
project and the backend's programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skyrl_jax.core.config import ActorConfig
from skyrl_jax.core.errors import ConfigError, InfraError, SkyrlError
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox.docker_daemon import DockerOptions
from skyrl_jax.sandbox.fleet import FleetProvider
from skyrl_jax.sandbox.host_process import HostOptions, open_host, raise_file_limit
from skyrl_jax.sandbox.image_store import ImageOptions
from skyrl_jax.sandbox.remote import RemoteSandbox

WATCH_S = 2.0  # between two looks at the cluster
_START_TIMEOUT_S = 120.0  # of an actor: Ray starts a process, the host makes its base image
_CALL_S = 10.0
_DOWN_TIMEOUT_S = 2.0  # for an actor whose host does not answer over HTTP
_STOP_TIMEOUT_S = 30.0
_TRIES = 3  # each on other nodes: Ray may not know yet that a node is dead
_REST_S = 20.0  # of a node where a host did not start
_NO_RAY = "actor.runtime = 'ray' needs the package: pip install 'skyrl_jax[ray]'"


class HostActor:
    """What runs in a Ray actor: one sandbox host."""

    def __init__(self, options: HostOptions, run_id: str) -> None:
        """Keep the settings; ``start`` does the work."""
        self._options = options
        self._run_id = run_id
        self._stack = AsyncExitStack()

    async def start(self) -> str:
        """Serve on this node's address; return the URL."""
        raise_file_limit()
        return await self._stack.enter_async_context(open_host(self._options, self._run_id))

    async def ping(self) -> int:
        """Return the process, as a sign of life."""
        return os.getpid()

    async def stop(self) -> None:
        """Destroy every sandbox and end the server."""
        await self._stack.aclose()


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A host that runs on a node."""

    actor: Any
    url: str


class RayProvider:
    """Makes sandboxes on hosts over a Ray cluster. Use as an async context manager.

    Args:
        cfg: how many hosts, where, and how large.
        backend: what the hosts make sandboxes with.
        run_id: part of the names of what lies on the nodes.
        cache_dir: of every node: base image and compiled helpers.
        docker: of the hosts with docker.
        images: of the same; a login file must lie on every node.
    """

    def __init__(
        self,
        cfg: ActorConfig,
        *,
        backend: str,
        run_id: str,
        cache_dir: Path,
        docker: DockerOptions | None = None,
        images: ImageOptions | None = None,
    ) -> None:
        """Keep the settings; nothing is started."""
        self._docker = (docker or DockerOptions(), images or ImageOptions())
        self._cfg = cfg
        self._backend = backend
        self._run_id = run_id
        self._cache_dir = cache_dir.absolute()
        self._token = secrets.token_hex(32)
        self._fleet = FleetProvider([], token=self._token, token_name="the run's own token")
        self._placed: dict[str, _Placed] = {}  # by node id
        self._resting: dict[str, float] = {}
        self._failures: dict[str, str] = {}  # why a node has no host
        self._connected = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return self._fleet.live

    @property
    def program_uid(self) -> int | None:
        """``None``: an agent's own program needs a directory shared with this machine."""
        return None

    @property
    def token(self) -> str:
        """The hosts' token, made for this run."""
        return self._token

    @property
    def hosts(self) -> dict[str, str]:
        """Every host's URL and why it is left out ("" = it is used)."""
        return self._fleet.hosts

    async def __aenter__(self) -> Self:
        """Join the cluster and place the hosts; one that starts is enough.

        Raises:
            ConfigError: Ray is not installed.
            InfraError: no cluster at the address, or no host started; the reasons of each node.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigError(_NO_RAY) from error
        self._ray = ray
        if not ray.is_initialized():
            await asyncio.to_thread(self._connect)
        try:
            for _ in range(_TRIES):
                await self._place()
                if self._placed:
                    break
            else:
                raise InfraError(f"no node of the Ray cluster took a sandbox host: {self._why()}")
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self._watcher = asyncio.create_task(self._watch())
        return self

    def _connect(self) -> None:
        try:
            self._ray.init(address=self._cfg.ray_address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InfraError(
                f"no Ray cluster at actor.ray_address = {self._cfg.ray_address!r}: {error}; start "
                "one with `ray start --head`",
                cause="ray",
            ) from error
        self._connected = True

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Destroy every sandbox, end the hosts, and leave the cluster if we joined it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        await self._fleet.__aexit__(None, None, None)
        await asyncio.gather(*(self._end(placed) for placed in self._placed.values()))
        self._placed.clear()
        if self._connected:
            await asyncio.to_thread(self._ray.shutdown)
            self._connected = False

    async def create(self, spec: SandboxSpec) -> RemoteSandbox:
        """Start a sandbox on the best host; see ``FleetProvider.create``."""
        return await self._fleet.create(spec)

    # -- placing ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            with contextlib.suppress(Exception):  # the cluster's head may be away for a while
                await self._place()

    async def _place(self) -> None:
        """Give up hosts that died; start hosts where there should be more."""
        nodes = await self._nodes()
        for node, placed in list(self._placed.items()):
            if node not in nodes:
                self._give_up(node, f"the Ray node {node[:8]} of this sandbox was lost")
            elif not await self._lives(placed):
                self._give_up(node, f"the sandbox host's actor on Ray node {node[:8]} died")
        wanted = (self._cfg.ray_hosts or len(nodes)) - len(self._placed)
        now = time.monotonic()
        free = sorted(
            (
                node
                for node in nodes
                if node not in self._placed and self._resting.get(node, 0.0) <= now
            ),
            key=lambda node: node in self._failures,  # Ray takes a while to call a node dead
        )
        await asyncio.gather(*(self._start(node, nodes[node]) for node in free[: max(0, wanted)]))

    async def _nodes(self) -> dict[str, str]:
        """Return {id: address} of the living nodes that a host may lie on."""
        resource = self._cfg.ray_resource
        async with asyncio.timeout(_CALL_S):
            found = await asyncio.to_thread(self._ray.nodes)
        return {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in found
            if node["Alive"] and (not resource or node["Resources"].get(resource, 0) >= 1)
        }

    async def _lives(self, placed: _Placed) -> bool:
        down = self._fleet.hosts.get(placed.url)  # what the host's own heartbeat says
        try:
            return bool(
                await self._ask(placed.actor.ping.remote(), _DOWN_TIMEOUT_S if down else _CALL_S)
            )
        except TimeoutError:
            return not down
        except self._ray.exceptions.RayError:
            return False

    async def _ask(self, ref: Any, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(ref.future())

    def _give_up(self, node: str, reason: str) -> None:
        placed = self._placed.pop(node)
        self._fleet.remove(placed.url, reason)
        self._failures[node] = reason
        self._kill(placed.actor)

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # it is dead already, or its node is
            self._ray.kill(actor)

    async def _start(self, node: str, address: str) -> None:
        """Place one host; what goes wrong is kept for ``_why``, and the node rests."""
        actor = self._actor(node, address)
        try:
            url = await self._ask(actor.start.remote(), _START_TIMEOUT_S)
            await self._fleet.add(url)
        except (TimeoutError, SkyrlError, OSError, self._ray.exceptions.RayError) as error:
            cause = getattr(error, "cause", None)  # what the host raised in its actor
            reason = cause if isinstance(cause, BaseException) else error
            self._failures[node] = str(reason) or "no answer in time"
            self._resting[node] = time.monotonic() + _REST_S
            self._kill(actor)
        except BaseException:
            self._kill(actor)
            raise
        else:
            self._failures.pop(node, None)
            self._placed[node] = _Placed(actor=actor, url=url)

    def _actor(self, node: str, address: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resource = self._cfg.ray_resource
        options = HostOptions(
            token=self._token,
            backend=self._backend,
            address=address,
            capacity=self._cfg.host_capacity,
            lease_s=self._cfg.host_lease_s,
            cache_dir=self._cache_dir,
            docker=self._docker[0],
            docker_images=self._docker[1],
        )
        kind = self._ray.remote(HostActor).options(
            num_cpus=0,
            resources={resource: 1} if resource else None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_restarts=0,
        )
        return kind.remote(options, self._run_id)

    async def _end(self, placed: _Placed) -> None:
        with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
            await self._ask(placed.actor.stop.remote(), _STOP_TIMEOUT_S)
        self._kill(placed.actor)

    def _why(self) -> str:
        reasons = [f"{node[:8]}: {text}" for node, text in self._failures.items()]
        resource = self._cfg.ray_resource
        none = f"no living node has the resource {resource!r} (ray start --resources)"
        return "; ".join(reasons) or (none if resource else "no living node")
