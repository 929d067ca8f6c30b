"""Trying again: exponential back-off with full jitter, a server's Retry-After, one deadline."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from skyrl_jax.core.errors import HostError, InfraError

T = TypeVar("T")
FIRST_S = 1.0
LONGEST_S = 60.0


class TryLater(HostError):
    """The registry or the way to it failed for now.

    Args:
        message: for a person.
        after_s: the server's Retry-After, seconds (0: it named none).
        limited: it was the server's rate limit or overload: tried again until the deadline. Other
            failures (no route, a broken stream) are tried ``TRIES`` times.
    """

    cause = "registry"

    def __init__(self, message: str, *, after_s: float = 0.0, limited: bool = False) -> None:
        """Store the text, the wait and the kind."""
        super().__init__(message)
        self.after_s = after_s
        self.limited = limited


TRIES = 5


def pause(attempt: int, after_s: float, draw: float) -> float:
    """Return how long to wait before the next try, seconds.

    ``after_s + draw * min(LONGEST_S, FIRST_S * 2^attempt)``, where half of the second part is sure
    when the server named no time: nobody comes back before the server said, and many who were
    refused together do not come back together.

    Args:
        attempt: 0 after the first failure.
        after_s: the server's Retry-After (0 = none).
        draw: uniform in [0, 1).
    """
    step = min(LONGEST_S, FIRST_S * 2.0 ** min(attempt, 16))
    return after_s + draw * step if after_s else step * (0.5 + 0.5 * draw)


def retry_after(value: str, now: float | None = None) -> float:
    """Read a Retry-After header: seconds, or an HTTP date; what is no time counts as 0."""
    value = value.strip()
    if value.isdigit():
        return float(min(int(value), 86_400))
    try:
        then = email.utils.parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError):
        return 0.0
    return min(max(0.0, then - (time.time() if now is None else now)), 86_400.0)


async def retried(
    attempt: Callable[[], Awaitable[T]],
    *,
    what: str,
    timeout_s: float,
    say: Callable[[str], None],
    draw: Callable[[], float] = random.random,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Run ``attempt`` until it succeeds, fails for good, or the time is up.

    Raises:
        InfraError: the server could not be reached, or would not have us before the deadline; the
            first refusal is named.
    """
    deadline = time.monotonic() + timeout_s
    first: TryLater | None = None
    tries = 0
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await attempt()
        except TimeoutError:
            why = f"; before that: {first}" if first else ""
            late = f"{what}: not done within {timeout_s:g} s{why}"
            raise InfraError(late, cause="pull") from None
        except TryLater as error:
            first = first or error
            wait = pause(tries, error.after_s, draw())
            tries += 1
            if not error.limited and tries >= TRIES:
                failed = f"{what}: {tries} tries failed: {first}"
                raise InfraError(failed, cause="registry") from None
            if time.monotonic() + wait > deadline:
                raise InfraError(
                    f"{what}: given up after {tries} tries, the next would be after the deadline "
                    f"of {timeout_s:g} s; the first: {first}",
                    cause="registry",
                ) from None
            say(f"{what}: {error}; try {tries + 1} in {wait:.1f} s")
            await sleep(wait)
