"""From an admitted /generate body to engine requests, and from results to SGLang's answer."""

from __future__ import annotations

import math
import secrets
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_jax.engine.engine import MAX_STOP_IDS, Request, Result

# sampling fields that would change the distribution or the stop rule, with their "off" values
_OFF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 1 << 30),
    "min_p": (0.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_new_tokens": (0,),
    "n": (1,),
    "stop": ([], ""),
    "stop_regex": ([], ""),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "logit_bias": ({},),
    "beam_width": (1,),
    "watermark": (),
    "choice": ([],),
}
# top-level fields this engine has nothing to answer with, and their "off" values
_OFF_BODY: dict[str, tuple[Any, ...]] = {
    "text": (),
    "stream": (False,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "return_hidden_states": (False,),
    "return_sampling_mask": (False,),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "kv_hints": (),
    "images_config": (),
}


class BadRequest(ValueError):
    """The body is well-formed but cannot be served; the text says what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a model and an engine admit."""

    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The engine requests of one body; ``batch`` says whether the answer is a list."""

    requests: tuple[Request, ...]
    return_logprob: tuple[bool, ...]
    batch: bool
    echo_prompt: bool


def parse(body: dict[str, Any], limits: Limits) -> Parsed:
    """Turn a body that passed the schema into engine requests.

    Raises:
        BadRequest: unsupported field, value out of range, or a prompt longer than the context.
    """
    _check_off(body, _OFF_BODY, "")
    ids = body.get("input_ids")
    if not ids:
        raise BadRequest("input_ids must be a non-empty list of token ids (no tokenizer here)")
    batch = isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    count = len(prompts)
    sampling = _spread(body.get("sampling_params"), count, "sampling_params")
    logprob = _spread(body.get("return_logprob"), count, "return_logprob")
    starts = _spread(body.get("logprob_start_len"), count, "logprob_start_len")
    rids = _rids(body.get("rid"), count, batch)
    requests = tuple(
        _request(prompts[i], sampling[i] or {}, rids[i], bool(logprob[i]), starts[i], limits)
        for i in range(count)
    )
    return Parsed(
        requests=requests,
        return_logprob=tuple(bool(flag) for flag in logprob),
        batch=batch,
        echo_prompt=bool(body.get("return_prompt_token_ids")),
    )


def answer(
    result: Result, version: str, latency_s: float, *, logprob: bool, echo_prompt: bool
) -> dict[str, Any]:
    """Build SGLang's answer (as with --skip-tokenizer-init: there is no ``text``)."""
    count = len(result.token_ids)
    meta: dict[str, Any] = {
        "id": result.request.rid,
        "finish_reason": _finish(result),
        "completion_tokens": count,
        "reasoning_tokens": 0,
        "weight_version": version,
        "weight_versions": [{"version": result.version, "start": 0, "end": count}] if count else [],
        "num_retractions": 0,
        "e2e_latency": latency_s,
        "dp_rank": None,
    }
    if not result.queued:  # SGLang's answer to a request aborted in the queue lacks both
        meta["prompt_tokens"] = len(result.request.prompt)
        meta["cached_tokens"] = result.cached_tokens
    if logprob:
        pairs = zip(result.logprobs, result.token_ids, strict=True)
        meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
        meta["output_token_logprobs_length"] = count
        start = result.request.score_from
        scored = result.request.prompt[start:].tolist() if start >= 0 else []
        values = result.prompt_logprobs or ()
        entries = zip(values, scored, strict=False)
        meta["input_token_logprobs"] = [[value, token, None] for value, token in entries]
    out: dict[str, Any] = {"output_ids": list(result.token_ids), "meta_info": meta}
    if echo_prompt:
        out["prompt_token_ids"] = result.request.prompt.tolist()
    return out


def _finish(result: Result) -> dict[str, Any]:
    if result.finish == "stop":
        return {"type": "stop", "matched": result.matched}
    if result.finish == "length":
        return {"type": "length", "length": len(result.token_ids)}
    message = "Abort in waiting queue" if result.queued else "Aborted"
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


def _check_off(values: dict[str, Any], table: dict[str, tuple[Any, ...]], prefix: str) -> None:
    for key, value in values.items():
        off = table.get(key)
        if off is None or value is None or value in off:
            continue
        wanted = f"; leave it at {off[0]!r}" if off else "; leave it out"
        raise BadRequest(f"{prefix}{key}={value!r} is not supported by this engine{wanted}")


def _spread(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadRequest(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _rids(rid: Any, count: int, batch: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, list):
        return _spread(rid, count, "rid")
    return [f"{rid}_{i}" for i in range(count)] if batch else [rid]


def _request(
    prompt: list[int],
    sampling: dict[str, Any],
    rid: str,
    logprob: bool,
    start: int | None,
    limits: Limits,
) -> Request:
    _check_off(sampling, _OFF_SAMPLING, "sampling_params.")
    max_new = _or(sampling.get("max_new_tokens"), 128)
    temperature = float(_or(sampling.get("temperature"), 1.0))
    if max_new < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {max_new}")
    if not math.isfinite(temperature) or temperature < 0:
        raise BadRequest(f"temperature must be a finite number >= 0, got {temperature}")
    _check_prompt(prompt, max_new, limits)
    stops = list(_or(sampling.get("stop_token_ids"), []))
    if stops and (min(stops) < 0 or max(stops) >= limits.vocab_size):
        raise BadRequest(f"stop_token_ids must lie in [0, {limits.vocab_size}), the vocabulary")
    if not sampling.get("ignore_eos"):
        stops += [eos for eos in limits.eos_ids if eos not in stops]
    if len(stops) > MAX_STOP_IDS:
        raise BadRequest(f"at most {MAX_STOP_IDS} stop token ids (eos included), got {len(stops)}")
    seed = sampling.get("sampling_seed")
    score_from = _or(start, -1)
    if score_from >= len(prompt):
        raise BadRequest(
            f"logprob_start_len {score_from} must be below the prompt length {len(prompt)}"
        )
    return Request(
        rid=rid,
        prompt=np.asarray(prompt, np.int32),
        max_new_tokens=max_new,
        temperature=temperature,
        seed=(secrets.randbits(64) if seed is None else seed) & 0xFFFFFFFFFFFFFFFF,
        stop_ids=tuple(stops),
        score_from=score_from if logprob and score_from >= 0 else -1,
        forced=_forced(sampling.get("custom_params"), limits),
    )


def _forced(custom: Any, limits: Limits) -> tuple[int, ...]:
    """Read what custom_params may hold: {"forced_ids": [...]}."""
    if custom is None:
        return ()
    ids = custom.get("forced_ids") if isinstance(custom, dict) and len(custom) == 1 else None
    if not isinstance(ids, list) or not all(type(x) is int for x in ids):
        raise BadRequest('custom_params may hold {"forced_ids": [token ids]} and nothing else')
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        raise BadRequest(f"forced_ids must lie in [0, {limits.vocab_size}), the vocabulary")
    return tuple(ids)


def _check_prompt(prompt: list[int], max_new: int, limits: Limits) -> None:
    if not prompt:
        raise BadRequest("input_ids must not be empty")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise BadRequest(f"input_ids must lie in [0, {limits.vocab_size}), the vocabulary")
    if len(prompt) >= limits.max_context:
        raise BadRequest(
            f"the input ({len(prompt)} tokens) is longer than the context length "
            f"({limits.max_context} tokens)"
        )
    if len(prompt) + max_new > limits.max_context:
        raise BadRequest(
            f"requested token count exceeds the context length of {limits.max_context}: "
            f"{len(prompt)} of input and {max_new} new; lower max_new_tokens"
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
