"""What both OpenAI dialects share: error shape, sampling parameters, tool definitions, log-probs.

Source: https://platform.openai.com/docs/api-reference (error objects: {"error": {"message", "type",
"param", "code"}}). Types and codes are those by which clients tell errors apart: litellm reads
"invalid_request_error" as a bad request whatever the status, so a wrong key begins "Incorrect API
key provided", and what asking again cannot help is no invalid_request_error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from skyrl_jax.core.types import Completion, ToolDef
from skyrl_jax.gateway.dialects import fields
from skyrl_jax.gateway.dialects.base import TokenBytes
from skyrl_jax.gateway.refusals import Cause, Refused, invalid, unsupported

_REQUEST = "invalid_request_error"
_SHAPE: dict[Cause, tuple[str, str | None]] = {
    Cause.MALFORMED: (_REQUEST, None),
    Cause.INVALID: (_REQUEST, None),
    Cause.UNSUPPORTED: (_REQUEST, "unsupported_value"),
    Cause.PREVIOUS: (_REQUEST, "previous_response_not_found"),
    Cause.TOO_LARGE: (_REQUEST, "request_too_large"),
    Cause.KEY: (_REQUEST, "invalid_api_key"),
    Cause.CLOSED: (_REQUEST, "invalid_api_key"),
    Cause.NO_SESSION: ("not_found_error", "session_not_found"),
    Cause.NO_MODEL: (_REQUEST, "model_not_found"),
    Cause.NO_ROUTE: ("not_found_error", "unknown_url"),
    Cause.METHOD: ("not_found_error", "method_not_supported"),
    Cause.CONTEXT: (_REQUEST, "context_length_exceeded"),
    Cause.BUDGET: ("insufficient_quota", "insufficient_quota"),
    Cause.PEER: ("permission_error", "permission_denied"),
    Cause.SLOW: ("timeout_error", "request_timeout"),
    Cause.FAULT: ("server_error", "generation_failed"),
    Cause.BUG: ("server_error", "internal_error"),
}
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
    "reasoning_effort",
    "parallel_tool_calls",
)


def error_body(refused: Refused) -> dict[str, Any]:
    """Write a refusal: {"error": {...}}."""
    kind, code = _SHAPE[refused.cause]
    message = refused.message
    if refused.cause in (Cause.KEY, Cause.CLOSED):
        message = f"Incorrect API key provided: {message}"
    if refused.cause is Cause.CONTEXT and refused.tokens is not None:
        prompt, most = refused.tokens
        message = (
            f"This model's maximum context length is {most} tokens. However, your messages "
            f"resulted in {prompt} tokens. Please reduce the length of the messages."
        )
    return {"error": {"message": message, "type": kind, "param": refused.param, "code": code}}


def asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """Check the sampling parameters and return those that the client set.

    None of them is used (the session's are), but what is no number is still refused: a client that
    sends NaN is broken, and would be so in front of any other server.
    """
    fields.number(body, "temperature", 0.0, 2.0)
    fields.number(body, "top_p", 0.0, 1.0)
    fields.number(body, "min_p", 0.0, 1.0)
    fields.number(body, "frequency_penalty", -2.0, 2.0)
    fields.number(body, "presence_penalty", -2.0, 2.0)
    fields.number(body, "repetition_penalty", 0.0, 100.0)
    fields.whole(body, "top_k", -1)
    fields.whole(body, "seed", -(2**63), 2**63)
    found = fields.set_values(body, SAMPLING)
    if found.get("parallel_tool_calls") is True:
        del found["parallel_tool_calls"]  # what happens anyway
    choice = body.get("tool_choice")
    if choice not in (None, "auto"):
        found["tool_choice"] = choice
    return found


def tools(body: Mapping[str, Any], *, nested: bool) -> tuple[ToolDef, ...]:
    """Read the tool definitions; ``nested``: under "function", as chat has them."""
    read = []
    for index, item in enumerate(fields.items(body, "tools")):
        where = f"tools[{index}]"
        if item.get("type") != "function":
            raise unsupported(
                f"{where}.type is {item.get('type')!r}; only tools of type 'function' can be "
                "offered: nothing else is run here",
                f"{where}.type",
            )
        if nested:
            item, where = fields.required(item, "function", dict, f"{where}."), f"{where}.function"
        read.append(_tool(item, where))
    return tuple(read)


def _tool(item: Mapping[str, Any], where: str) -> ToolDef:
    name = fields.required(item, "name", str, f"{where}.")
    description = item.get("description") or ""
    parameters = item.get("parameters") or {}
    if not name or not isinstance(description, str) or not isinstance(parameters, dict):
        raise invalid(f"{where} must have a name, a text description and object parameters", where)
    return ToolDef(name=name, description=description, parameters=parameters)


def token_logprobs(completion: Completion, token_bytes: TokenBytes | None) -> list[dict[str, Any]]:
    """Write the log-prob of each sampled token (nats).

    Without a tokenizer at hand a token is named "token_id:17", as vLLM does on request.
    """
    written = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        entry: dict[str, Any] = {
            "token": f"token_id:{token}",
            "logprob": _known(logprob),
            "bytes": None,
        }
        if token_bytes is not None:
            raw = token_bytes(token)
            entry["token"], entry["bytes"] = raw.decode("utf-8", "replace"), list(raw)
        written.append({**entry, "top_logprobs": []})
    return written


def _known(logprob: float) -> float | None:
    """Return a log-prob, or null where the generator told none (NaN is no JSON)."""
    return logprob if math.isfinite(logprob) else None


def refuse_alternatives(body: Mapping[str, Any]) -> None:
    """Refuse top_logprobs > 0: only the sampled token's log-prob is known."""
    if fields.whole(body, "top_logprobs", 0, 20):
        raise unsupported(
            "top_logprobs must be 0: only the log-probs of the sampled tokens are known",
            "top_logprobs",
        )
