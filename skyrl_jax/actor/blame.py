"""Whose fault was it? The one table from exceptions to blame, per stage of an episode.

    stage   host error   agent-caused error   deadline passed    anything else
    init    host         host (1)             host               host (our bug)
    run     host         agent                the episode ends   host (our bug)
    grade   host         agent                agent (2)          host (our bug)

(1) no command of the agent has run yet. (2) uncertain: graded once more in a fresh sandbox first.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from skyrl_jax.core.errors import AgentCausedError, HostError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a stage gave no value. ``certain`` False: try once more in a fresh sandbox.

    Example: ``Fault(host=True, cause="engine", detail="connection refused")``.
    """

    host: bool
    cause: str
    detail: str
    certain: bool = True


def blame(error: Exception, stage: str) -> Fault:
    """Return the fault that ``error`` means in ``stage`` ("init", "run" or "grade")."""
    detail = f"{type(error).__name__}: {error}"
    if isinstance(error, HostError):
        return Fault(host=True, cause=error.cause, detail=detail)
    if isinstance(error, AgentCausedError):
        if stage == "init":
            return Fault(host=True, cause=f"init_{error.cause}", detail=detail)
        return Fault(host=False, cause=error.cause, detail=detail, certain=error.certain)
    text = "".join(traceback.format_exception(error, limit=-6))
    return Fault(host=True, cause=f"bug_{type(error).__name__}", detail=text)


def deadline(stage: str, seconds: float) -> Fault:
    """Return the fault of a stage that ran past its deadline."""
    detail = f"{stage} took longer than {seconds:g} s"
    if stage == "init":
        return Fault(host=True, cause="init_deadline", detail=detail)
    return Fault(host=False, cause=f"{stage}_deadline", detail=detail, certain=False)
