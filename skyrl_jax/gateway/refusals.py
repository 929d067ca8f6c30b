"""What the gateway refuses, and the status that every dialect gives it.

A refusal is an answer, not a fault of ours: the client gets its dialect's own error shape and the
server goes on. Statuses are chosen so that agents stop where asking again cannot help: clients
repeat 408, 409, 429 and 5xx by themselves, some (through litellm) also plain 400.
"""

from __future__ import annotations

import enum


class Cause(enum.StrEnum):
    """Why a request got no answer. Example: ``Cause.KEY`` is a wrong key, HTTP 401."""

    MALFORMED = "malformed"  # no JSON object
    INVALID = "invalid"  # a field that the dialect does not allow so
    UNSUPPORTED = "unsupported"  # a field that is allowed, but not here (images, n > 1)
    PREVIOUS = "previous"  # previous_response_id names nothing that is kept
    TOO_LARGE = "too_large"
    KEY = "key"
    CLOSED = "closed"
    NO_SESSION = "no_session"
    NO_MODEL = "no_model"
    NO_ROUTE = "no_route"
    METHOD = "method"
    CONTEXT = "context"  # the prompt leaves no room in the session's context
    BUDGET = "budget"  # the session's turns or tokens are used up
    PEER = "peer"  # another process than the session's agent calls its socket
    SLOW = "slow"  # the body did not come in time
    FAULT = "fault"  # the host side failed: the session is FAILED unless a retry succeeds
    BUG = "bug"  # our own error


STATUS = {
    Cause.MALFORMED: 400,
    Cause.INVALID: 400,
    Cause.UNSUPPORTED: 400,
    Cause.PREVIOUS: 400,
    Cause.TOO_LARGE: 413,
    Cause.KEY: 401,
    Cause.CLOSED: 401,
    Cause.NO_SESSION: 404,
    Cause.NO_MODEL: 404,
    Cause.NO_ROUTE: 404,
    Cause.METHOD: 405,
    Cause.CONTEXT: 400,
    Cause.BUDGET: 403,
    Cause.PEER: 403,
    Cause.SLOW: 408,
    Cause.FAULT: 503,
    Cause.BUG: 500,
}
# The same request may succeed a moment later; everything else is final, and clients are told so.
PASSING = frozenset({Cause.SLOW, Cause.FAULT})


class Refused(Exception):
    """A request that gets an error for an answer.

    Args:
        cause: picks status and shape.
        message: text for whoever reads the agent's log; names the thing and what would be right.
        param: the field of the body that is wrong.
        tokens: (tokens of the prompt, tokens allowed) where the context is too small.
        limit: the budget that is used up: "turns", "tokens" or "context".
    """

    def __init__(
        self,
        cause: Cause,
        message: str,
        *,
        param: str | None = None,
        tokens: tuple[int, int] | None = None,
        limit: str = "",
    ) -> None:
        """Store what a dialect needs to write the error."""
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.param = param
        self.tokens = tokens
        self.limit = limit

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.cause]


def unsupported(message: str, param: str) -> Refused:
    """Return the refusal of something that the dialect knows and this gateway has not."""
    return Refused(Cause.UNSUPPORTED, message, param=param)


def invalid(message: str, param: str | None = None) -> Refused:
    """Return the refusal of a field that is wrong."""
    return Refused(Cause.INVALID, message, param=param)
