"""Sandboxes on a budget: making one ends in time, however the backend fares."""

from __future__ import annotations

import asyncio

from skyrl_jax.core.errors import InfraError
from skyrl_jax.core.protocols import Sandbox, SandboxProvider, SandboxSpec


class BudgetedProvider:
    """A provider whose every ``create`` has a deadline of its own.

    Args:
        provider: makes the sandboxes; a creation that is cancelled leaves nothing there.
        create_timeout_s: the deadline of one creation, in seconds.
    """

    def __init__(self, provider: SandboxProvider, create_timeout_s: float) -> None:
        """Keep both."""
        self._provider = provider
        self._seconds = create_timeout_s

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox in time.

        Raises:
            InfraError: it was not there in time.
        """
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await self._provider.create(spec)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise InfraError(
                f"no sandbox within rollout.create_timeout_s = {self._seconds:g} s", cause="create"
            ) from error
