"""SGLang's JSON, written and read: what we send, and what an answer must satisfy."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.core.types import LOGPROB_CEILING, LOGPROB_FLOOR, Completion, SamplingParams


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return every sampling field: a server's generation_config may set what a body leaves out."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        fields["sampling_seed"] = sampling.seed
    if sampling.forced_ids:
        fields["custom_params"] = {"forced_ids": list(sampling.forced_ids)}
    return fields


def completion(
    answer: dict[str, Any], served: str | None, unversioned: int | None, where: str
) -> Completion:
    """Turn a /generate answer into a Completion.

    Args:
        answer: the parsed answer; it has a ``meta_info``.
        served: the server's weight version when the call began, as far as known.
        unversioned: see SGLangGenerator.
        where: the server, for messages.

    Raises:
        GenerationError: the lists disagree, a log-prob is impossible, or a token has no version.
    """
    meta = answer["meta_info"]
    entries = meta.get("output_token_logprobs") or []
    ids = tuple(entry[1] for entry in entries)
    logprobs = tuple(entry[0] for entry in entries)
    wrong = _disagreement(answer, ids, logprobs)
    if wrong:
        raise GenerationError(f"{where}: {wrong}", cause="engine_contract")
    finish = (meta.get("finish_reason") or {}).get("type")
    if finish not in ("stop", "length", "abort"):
        raise GenerationError(
            f"{where}: finish_reason is {finish!r}; known: stop, length, abort",
            cause="engine_contract",
        )
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        weight_versions=_versions(meta, len(ids), served, unversioned, where),
        finish_reason=finish,
    )


def check_forced(done: Completion, forced: Sequence[int], where: str) -> None:
    """Make sure that the server said what it was told to say.

    Raises:
        GenerationError: it did not; SGLang ignores ``custom_params``.
    """
    said = done.token_ids[: len(forced)]
    if said != tuple(forced[: len(said)]):
        raise GenerationError(
            f"{where}: the completion does not begin with forced_ids; the embedded engine alone "
            "follows them",
            cause="engine_contract",
        )


def routed_experts(
    meta: dict[str, Any], shape: tuple[int, int, int], where: str
) -> NDArray[np.int16]:
    """Read which experts each fed token was sent through (base64 of int32, row by row).

    Args:
        meta: ``meta_info`` of an answer to a call with ``return_routed_experts``.
        shape: (tokens fed, layers, experts per token) that must come.
        where: the server, for messages.

    Raises:
        GenerationError: it is not there, or not of this shape: replaying nothing, or the routing
            of other tokens, would go unnoticed.
    """
    text = meta.get("routed_experts")
    if not isinstance(text, str):
        raise GenerationError(
            f"{where}: the answer has no routed_experts; start the server with "
            "--enable-return-routed-experts, or set rollout.replay_routing to False",
            cause="engine_contract",
        )
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise GenerationError(
            f"{where}: routed_experts is no base64: {error}", cause="engine_contract"
        ) from None
    if len(raw) != 4 * math.prod(shape):
        raise GenerationError(
            f"{where}: routed_experts has {len(raw)} bytes; {shape[0]} tokens, {shape[1]} layers "
            f"and {shape[2]} experts a token make {4 * math.prod(shape)}",
            cause="engine_contract",
        )
    return np.frombuffer(raw, "<i4").reshape(shape).astype(np.int16)


def error_text(raw: bytes) -> str:
    """Read any of the three error shapes: {"error": text}, {"error": {"message"}}, {"detail"}."""
    text = raw.decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return text[:500]
    if not isinstance(body, dict):
        return text[:500]
    error = body.get("error", body.get("detail", body.get("message", text[:500])))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)


def parsed(raw: bytes, url: str) -> dict[str, Any]:
    """Parse an answer that must be a JSON object."""
    try:
        body = json.loads(raw)
    except ValueError:
        raise GenerationError(f"{url} answered no JSON: {raw[:200]!r}") from None
    if not isinstance(body, dict):
        raise GenerationError(f"{url} answered no JSON object: {raw[:200]!r}")
    return body


def _disagreement(answer: dict[str, Any], ids: Sequence[int], logprobs: Sequence[Any]) -> str:
    count = answer["meta_info"].get("completion_tokens", len(ids))
    output = answer.get("output_ids")
    if output is not None and tuple(output) != tuple(ids):
        return f"output_ids ({len(output)}) and the log-probs' ids ({len(ids)}) differ"
    if count != len(ids):
        return f"{count} completion tokens but {len(ids)} log-probs"
    bad = [x for x in logprobs if not _plausible(x)]
    return f"a log-prob is {bad[0]!r}; it must be finite, <= 0, > {LOGPROB_FLOOR:g}" if bad else ""


def _versions(
    meta: dict[str, Any], count: int, served: str | None, unversioned: int | None, where: str
) -> tuple[int, ...]:
    spans = meta.get("weight_versions")
    if spans is None:
        # older servers: one name, or none; a change during the call cannot be attributed
        name = meta.get("weight_version", served)
        if served is not None and name != served:
            raise GenerationError(
                f"{where}: the weights changed during the call (from {served} to {name})",
                cause="engine_mixed_version",
            )
        return (_number(name, unversioned, where),) * count
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            break
        number = _number(span["version"], unversioned, where)
        versions += [number] * (span["end"] - span["start"])
    if len(versions) != count:
        raise GenerationError(
            f"{where}: weight_versions {spans} do not cover {count} tokens",
            cause="engine_contract",
        )
    return tuple(versions)


def _number(name: str | None, unversioned: int | None, where: str) -> int:
    if name is not None and name.isdecimal():
        return int(name)
    if unversioned is None:
        raise GenerationError(
            f"{where} serves weight version {name!r}, which is no number: publish a version to "
            "it, or start it with a number for one (launchers/serve.py: --weight_version=0, "
            "SGLang: --weight-version=0)",
            cause="engine_contract",
        )
    return unversioned


def _plausible(logprob: Any) -> bool:
    number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
    return number and LOGPROB_FLOOR < logprob <= LOGPROB_CEILING  # false for NaN, infinities too
