"""How much a session may use, and how much it has used."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_jax.gateway.refusals import Cause, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one session; ``None`` = none.

    Args:
        turns: answers, auxiliary calls included; a replay is none.
        tokens: sampled tokens of all answers together. An answer is cut where they end; calls that
            run at the same time may go beyond by one answer each.
        context: tokens of one call, prompt and answer. A longer prompt is refused, never cut.

    Example: ``Budget(turns=40, tokens=16_000, context=32_768)``.
    """

    turns: int | None = None
    tokens: int | None = None
    context: int | None = None


@dataclass(slots=True, kw_only=True)
class Spent:
    """What a session has used: its answers and their tokens."""

    turns: int = 0
    tokens: int = 0

    def room(self, budget: Budget, prompt: int, wanted: int, *, running: int = 0) -> int:
        """Return how many tokens the next answer may have: at most ``wanted``.

        Args:
            budget: the session's.
            prompt: tokens of the prompt.
            wanted: what sampling parameters and client allow.
            running: calls under way, each of which may become a turn.

        Raises:
            Refused: a budget leaves nothing; the message names it.
        """
        context = wanted + prompt if budget.context is None else budget.context
        if prompt >= context:
            raise Refused(
                Cause.CONTEXT,
                f"the prompt has {prompt} tokens; the context holds {context}",
                param="messages",
                tokens=(prompt, context),
                limit="context",
            )
        left = wanted if budget.tokens is None else budget.tokens - self.tokens
        if budget.turns is not None and self.turns + running >= budget.turns:
            raise _used_up(f"{budget.turns} turns", "turns")
        if left < 1:
            raise _used_up(f"{budget.tokens} sampled tokens", "tokens")
        return min(wanted, context - prompt, left)


def _used_up(what: str, limit: str) -> Refused:
    return Refused(Cause.BUDGET, f"this session's budget of {what} is used up", limit=limit)
