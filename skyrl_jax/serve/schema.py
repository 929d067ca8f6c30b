"""Judge a /generate body as SGLang's own request schema does (see docs/http.md).

A violation is HTTP 400 ``{"error": "<text>"}``; the texts follow serde's, as SGLang's do. What the
schema admits but this engine does not support is refused later, in serve/requests.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], None]


class SchemaError(ValueError):
    """The JSON value violates the request schema."""


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{'true' if value else 'false'}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    if isinstance(value, str):
        return f'string "{value}"'
    return "sequence" if isinstance(value, list) else "map"


def _refuse(value: Any, expected: str) -> SchemaError:
    return SchemaError(f"invalid type: {_shown(value)}, expected {expected}")


def _integer(expected: str = "i64", *, unsigned: bool = False) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _refuse(value, expected)
        if unsigned and value < 0:
            raise SchemaError(f"invalid value: integer `{value}`, expected {expected}")

    return check


def _typed(kind: type, expected: str) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, kind):
            raise _refuse(value, expected)

    return check


def _number(value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refuse(value, "f64")


def _list_of(item: Check) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, list):
            raise _refuse(value, "a sequence")
        for element in value:
            item(element)

    return check


def _map_of(item: Check) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise _refuse(value, "a map")
        for element in value.values():
            item(element)

    return check


def _optional(item: Check) -> Check:
    def check(value: Any) -> None:
        if value is not None:
            item(value)

    return check


def _or_list(name: str, single: Callable[[str], Check], item: Check) -> Check:
    one = single(f"a value or an array of values for {name}")
    many = _list_of(item)

    def check(value: Any) -> None:
        (many if isinstance(value, list) else one)(value)

    return check


def _nested(name: str, item: Check, is_item: Callable[[Any], bool]) -> Check:
    flat, batch = _list_of(item), _list_of(_list_of(item))

    def check(value: Any) -> None:
        if not isinstance(value, list):
            raise _refuse(value, f"a value or an array of values for {name}")
        # [] and [scalar, ...] are one flat list; anything else is a batch
        (flat if not value or is_item(value[0]) else batch)(value)

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _string(expected: str = "a string") -> Check:
    return _typed(str, expected)


def _boolean(expected: str = "a boolean") -> Check:
    return _typed(bool, expected)


def _anything(value: Any) -> None:
    del value


def _struct(name: str, fields: Mapping[str, Check], *, closed: bool) -> Check:
    listed = ", ".join(f"`{field}`" for field in fields)

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise _refuse(value, f"struct {name}")
        for key, item in value.items():
            known = fields.get(key)
            if known is not None:
                known(item)
            elif closed:
                raise SchemaError(f"unknown field `{key}`, expected one of {listed}")

    return check


def _nullable(fields: Mapping[str, Check]) -> dict[str, Check]:
    return {key: _optional(item) for key, item in fields.items()}


_STRING_OR_LIST = _or_list("StringOrList", _string, _string())
_OPTIONAL_STRING_OR_LIST = _or_list("OptionalStringOrList", _string, _optional(_string()))
_INT_OR_LIST = _or_list("Int64OrList", _integer, _integer())
_OPTIONAL_INT_OR_LIST = _or_list("OptionalInt64OrList", _integer, _optional(_integer()))
_BOOL_OR_LIST = _or_list("BoolOrList", _boolean, _boolean())
_IDS_OR_LIST = _nested("TokenIdsOrList", _integer(), _is_number)

_WATERMARK = _struct(
    "WatermarkRequestConfig",
    _nullable({"enabled": _boolean(), "key": _string(), "context_window": _integer()}),
    closed=True,
)

_SAMPLING = _struct(
    "SamplingParams",
    _nullable(
        {
            "max_new_tokens": _integer(),
            "stop": _STRING_OR_LIST,
            "stop_token_ids": _list_of(_integer()),
            "stop_regex": _STRING_OR_LIST,
            "temperature": _number,
            "top_p": _number,
            "top_k": _integer(),
            "min_p": _number,
            "frequency_penalty": _number,
            "presence_penalty": _number,
            "repetition_penalty": _number,
            "min_new_tokens": _integer(),
            "n": _integer(),
            "json_schema": _string(),
            "regex": _string(),
            "ebnf": _string(),
            "structural_tag": _string(),
            "ignore_eos": _boolean(),
            "skip_special_tokens": _boolean(),
            "spaces_between_special_tokens": _boolean(),
            "no_stop_trim": _boolean(),
            "stream_interval": _integer(),
            "logit_bias": _map_of(_number),
            "sampling_seed": _integer(),
            "custom_params": _anything,
            "beam_width": _integer(),
            "watermark": _WATERMARK,
            "choice": _list_of(_string()),
        }
    ),
    closed=True,
)


def _sampling_or_list(value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _SAMPLING(item)
    elif isinstance(value, dict):
        _SAMPLING(value)
    else:
        raise _refuse(value, "a value or an array of values for SamplingParamsOrList")


_REQUEST = _struct(
    "GenerateRequest",
    _nullable(
        {
            "rid": _STRING_OR_LIST,
            "text": _STRING_OR_LIST,
            "input_ids": _IDS_OR_LIST,
            "stream": _boolean(),
            "sampling_params": _sampling_or_list,
            "return_logprob": _BOOL_OR_LIST,
            "logprob_start_len": _INT_OR_LIST,
            "top_logprobs_num": _INT_OR_LIST,
            "token_ids_logprob": _IDS_OR_LIST,
            "return_hidden_states": _BOOL_OR_LIST,
            "return_text_in_logprobs": _boolean(),
            "bootstrap_host": _OPTIONAL_STRING_OR_LIST,
            "bootstrap_port": _OPTIONAL_INT_OR_LIST,
            "bootstrap_room": _OPTIONAL_INT_OR_LIST,
            "bootstrap_pair_key": _OPTIONAL_STRING_OR_LIST,
            "decode_tp_size": _OPTIONAL_INT_OR_LIST,
            "routed_dp_rank": _integer(),
            "disagg_prefill_dp_rank": _integer(),
            "mm_hashes": _nested("StringListOrList", _string(), lambda v: isinstance(v, str)),
            "extra_key": _STRING_OR_LIST,
            "priority": _integer(),
            "cache_salt": _STRING_OR_LIST,
            "require_reasoning": _boolean(),
            "lora_path": _OPTIONAL_STRING_OR_LIST,
            "session_params": _anything,
            "routing_key": _string(),
            "max_thinking_tokens": _integer("u64", unsigned=True),
            "session_id": _string(),
            "custom_logit_processor": _OPTIONAL_STRING_OR_LIST,
            "custom_labels": _map_of(_string()),
            "return_sampling_mask": _BOOL_OR_LIST,
            "modalities": _list_of(_optional(_string())),
        }
    )
    # these two are plain proto fields: null is a violation
    | {"return_prompt_token_ids": _boolean(), "routed_experts_start_len": _integer()},
    closed=False,
)


def violation(body: Any) -> str | None:
    """Return the schema violation of a parsed /generate body, or None."""
    try:
        _REQUEST(body)
    except SchemaError as error:
        return str(error)
    return None
