"""Several sandbox hosts as one provider: a new sandbox goes where there is most room.

A host that is down is left out, its sandboxes raise InfraError at once, and it comes back when its
heartbeat answers again. A host that fails to create rests for a while, so that the emptiest host is
not the broken one again and again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from skyrl_jax.core.errors import CapacityError, HostError, InfraError
from skyrl_jax.core.protocols import SandboxSpec
from skyrl_jax.sandbox.host_client import UNREACHABLE, LayerDigests
from skyrl_jax.sandbox.remote import NO_SHARED, RemoteProvider, RemoteSandbox

REST_S = 10.0  # of a host that failed to make a sandbox
_IMAGE_BONUS = 0.25  # of a host's capacity: so much fuller may a host be that has the image
_LAYERS_BONUS = 0.05  # the same of the layers, which are small


@dataclass(eq=False, slots=True, kw_only=True)
class _Member:
    """A host, and what it is known to have."""

    provider: RemoteProvider
    boot: str = ""
    images: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    rests_until: float = 0.0

    def score(self, spec: SandboxSpec) -> tuple[bool, float]:
        """Rank for a spec: the lowest is asked first."""
        boot = self.provider.link.status.get("boot", "")
        if boot != self.boot:  # started again: its caches are empty
            self.boot = boot
            self.layers.clear()
        score = self.provider.load
        if spec.image and spec.image in self.images:
            score -= _IMAGE_BONUS
        if spec.layers and self.layers.issuperset(spec.layers):
            score -= _LAYERS_BONUS
        return time.monotonic() < self.rests_until, score

    def took(self, spec: SandboxSpec) -> None:
        """Remember that a sandbox was made here."""
        self.images.add(spec.image)
        self.layers.update(spec.layers)
        self.rests_until = 0.0


class FleetProvider:
    """Makes sandboxes on whichever host is best. Use as an async context manager.

    Args:
        urls: the hosts; more may be added and removed while it is open.
        token: of all of them.
        token_name: where the token is from (a file), for messages.
    """

    def __init__(
        self, urls: Sequence[str], *, token: str, token_name: str = "sandbox.token_file"
    ) -> None:
        """Keep the settings; nothing is sent."""
        self._urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        self._token = token
        self._token_name = token_name
        self._digests = LayerDigests()
        self._members: dict[str, _Member] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> int:
        """Number of sandboxes that are not destroyed yet."""
        return sum(member.provider.live for member in self._members.values())

    @property
    def program_uid(self) -> int | None:
        """``None``: an agent's own program needs a directory shared with this machine."""
        return None

    @property
    def hosts(self) -> dict[str, str]:
        """Every host's URL and why it is left out ("" = it is used)."""
        return {url: member.provider.link.down for url, member in self._members.items()}

    @property
    def reported(self) -> int:
        """Sandboxes of all owners on these hosts, as the last heartbeats said."""
        statuses = (member.provider.link.status for member in self._members.values())
        return sum(int(status.get("live", 0)) for status in statuses)

    async def __aenter__(self) -> Self:
        """Say hello to every host; one that answers is enough.

        Raises:
            InfraError: a host refuses the token, or no host answers.
        """
        outcomes = await asyncio.gather(
            *(self._open(url, must_answer=False) for url in self._urls), return_exceptions=True
        )
        failed = [found for found in outcomes if isinstance(found, BaseException)]
        if failed or (self._urls and all(self.hosts.values())):
            reasons = self._reasons()
            await self.__aexit__(None, None, None)
            raise failed[0] if failed else InfraError(f"no sandbox host answers: {reasons}")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Destroy every sandbox; those on a host that is down end with their lease."""
        members = list(self._members.values())
        self._members.clear()
        await asyncio.gather(
            *(member.provider.__aexit__(None, None, None) for member in members),
            *self._leaving,
            return_exceptions=True,
        )

    async def _open(self, url: str, *, must_answer: bool) -> None:
        provider = RemoteProvider(
            url,
            token=self._token,
            token_name=self._token_name,
            must_answer=must_answer,
            digests=self._digests,
        )
        await provider.__aenter__()
        self._members[url] = _Member(provider=provider)

    async def add(self, url: str) -> None:
        """Use another host from now on.

        Raises:
            InfraError: it does not answer.
        """
        url = url.rstrip("/")
        if url not in self._members:
            await self._open(url, must_answer=True)

    def remove(self, url: str, reason: str) -> None:
        """Give up a host: whatever waits for its sandboxes raises InfraError with the reason."""
        member = self._members.pop(url.rstrip("/"), None)
        if member is None:
            return
        member.provider.link.give_up(reason)
        leaving = asyncio.create_task(member.provider.__aexit__(None, None, None))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def create(self, spec: SandboxSpec) -> RemoteSandbox:
        """Start a sandbox on the best host; where that one cannot, on the next.

        Raises:
            CapacityError: a host that works is full, and no other took it.
            ImageError: no host has the image.
            InfraError: no host is up, or each one failed.
        """
        if spec.shared:
            raise InfraError(NO_SHARED, cause="shared")
        failed: list[HostError] = []
        asked: set[_Member] = set()
        while (member := self._best(spec, asked)) is not None:
            asked.add(member)
            try:
                box = await member.provider.create(spec)
            except HostError as error:
                failed.append(error)
                if not isinstance(error, CapacityError):
                    member.rests_until = time.monotonic() + REST_S
                continue
            member.took(spec)
            return box
        raise self._verdict(failed)

    def _best(self, spec: SandboxSpec, asked: set[_Member]) -> _Member | None:
        """Return the host to ask next: up, not asked yet, rested, with most room."""
        able = [
            member
            for member in self._members.values()
            if not member.provider.link.down and member not in asked
        ]
        return min(able, key=lambda member: member.score(spec), default=None)

    def _verdict(self, failed: Sequence[HostError]) -> HostError:
        for error in failed:
            if isinstance(error, CapacityError):  # later there may be room
                return error
        if failed:
            return failed[0]
        return InfraError(f"no sandbox host is up: {self._reasons()}", cause=UNREACHABLE)

    def _reasons(self) -> str:
        return "; ".join(f"{url}: {reason}" for url, reason in self.hosts.items() if reason)
