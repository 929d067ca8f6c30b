"""What a sandbox host and its clients say to each other over HTTP, as values and bytes.

Every request and answer body is one message: ``<u32 length><JSON header><raw bytes>``, so that a
command's input, its output and tar streams travel as they are. Errors travel with their type,
cause and blame: a client raises what the host's own provider raised.

    GET    /health                          open; with the token: load, capacity, cached layers
    POST   /owners/{owner}/lease            renew; sandboxes of a silent owner are destroyed
    DELETE /owners/{owner}                  destroy all that this owner has
    PUT    /layers/{digest}                 a layer's tar stream, whose SHA-256 is the name
    POST   /sandboxes/{id}                  create; the id is the client's, so a retry makes no two
    POST   /sandboxes/{id}/ops/{number}     exec, put, get, ping; a retry by number never runs twice
    DELETE /sandboxes/{id}/ops/{number}     end it; returns when it has ended
    DELETE /sandboxes/{id}                  destroy. Idempotent
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any

from skyrl_jax.core.errors import (
    AgentCausedError,
    CapacityError,
    DataError,
    HostError,
    ImageError,
    InfraError,
    SandboxGone,
    SandboxTimeout,
    SkyrlError,
)
from skyrl_jax.core.protocols import ExecResult, SandboxSpec

OWNER_HEADER = "X-Skyrl-Owner"
MAX_MESSAGE = 256 << 20  # above wire.MAX_STDIN
UNKNOWN_SANDBOX = "unknown_sandbox"  # cause: the host restarted, or the lease ran out
_LENGTH = struct.Struct("<I")
_HOST_ERRORS: tuple[type[HostError], ...] = (InfraError, CapacityError, ImageError, HostError)
_AGENT_ERRORS: tuple[type[AgentCausedError], ...] = (SandboxGone, SandboxTimeout, AgentCausedError)
_STATUS = {CapacityError: 503, ImageError: 422, DataError: 400}  # a person's hint; the body decides


def pack(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Encode one message."""
    text = json.dumps(header).encode("ascii")  # lone surrogates travel as \\udcXX
    return _LENGTH.pack(len(text)) + text + body


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Decode one message.

    Raises:
        DataError: it is no message of ours.
    """
    try:
        (length,) = _LENGTH.unpack_from(message)
        if len(message) < 4 + length:
            raise ValueError(f"{len(message)} bytes, its header alone should have {4 + length}")
        header = json.loads(message[4 : 4 + length])
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
    except (ValueError, struct.error) as error:
        raise DataError(f"not a message of the sandbox host's protocol: {error}") from error
    return header, message[4 + length :]


def spec_to_json(spec: SandboxSpec, layers: tuple[str, ...]) -> dict[str, Any]:
    """Return a spec whose layers are digests, as JSON takes it."""
    values = {item.name: getattr(spec, item.name) for item in dataclasses.fields(spec)}
    return {**values, "env": dict(spec.env), "layers": list(layers)}


def spec_from_json(values: Any) -> SandboxSpec:
    """Return the spec of a request; its layers are digests.

    Raises:
        DataError: a field is unknown here or of the wrong kind: client and host differ in version.
    """
    if not isinstance(values, dict):
        raise DataError("a sandbox request has no spec")
    known = {item.name for item in dataclasses.fields(SandboxSpec)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise DataError(
            f"the sandbox host does not know the spec's field {unknown[0]!r}: it runs another "
            "version of skyrl_jax than this client; install the same on both"
        )
    try:
        layers = tuple(str(layer) for layer in values.get("layers", ()))
        spec = SandboxSpec(**{**values, "layers": layers})
    except TypeError as error:
        raise DataError(f"a sandbox request's spec is wrong: {error}") from error
    for item in dataclasses.fields(SandboxSpec):
        default = item.default
        kind = type(default) if isinstance(default, bool | int | float | str) else None
        value = getattr(spec, item.name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            continue
        if kind is not None and not isinstance(value, kind):
            raise DataError(f"the spec's {item.name} must be {kind.__name__}, got {value!r}")
    return spec


def result_to_message(result: ExecResult) -> bytes:
    """Encode what a command did."""
    values = {item.name: getattr(result, item.name) for item in dataclasses.fields(result)}
    text = values.pop("output")
    return pack({"result": values}, text.encode("utf-8", "surrogatepass"))


def result_from_message(header: Mapping[str, Any], body: bytes) -> ExecResult:
    """Decode what a command did; fields that this side does not know are left out."""
    known = {item.name for item in dataclasses.fields(ExecResult)} - {"output"}
    values = {name: value for name, value in header["result"].items() if name in known}
    return ExecResult(output=body.decode("utf-8", "surrogatepass"), **values)


def error_to_json(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return (HTTP status, JSON) of an error; what is not ours is the host's fault."""
    if not isinstance(error, SkyrlError):
        text = f"the sandbox host failed: {type(error).__name__}: {error}"
        return 500, {"type": "InfraError", "message": text, "cause": "host_bug"}
    name = next(
        (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _BY_NAME), "InfraError"
    )
    values: dict[str, Any] = {"type": name, "message": str(error)}
    if isinstance(error, HostError | AgentCausedError):
        values["cause"] = error.cause
    if isinstance(error, AgentCausedError):
        values["certain"] = error.certain
    default = 409 if isinstance(error, AgentCausedError) else 502
    return _STATUS.get(type(error), default), values


def error_from_json(values: Any, host: str) -> SkyrlError:
    """Return the error that a host's answer means, with its type, cause and blame."""
    if not isinstance(values, dict) or "message" not in values:
        return InfraError(f"sandbox host {host} gave an answer that is no error of ours")
    message, cause = str(values["message"]), values.get("cause")
    for host_kind in _HOST_ERRORS:
        if values.get("type") == host_kind.__name__:
            return host_kind(f"{message} [{host}]", cause=cause)
    for agent_kind in _AGENT_ERRORS:
        if values.get("type") == agent_kind.__name__:
            found = agent_kind(message, certain=values.get("certain") is not False)
            if isinstance(cause, str):
                found.cause = cause
            return found
    if values.get("type") == "DataError":
        return DataError(message)
    return InfraError(f"{values.get('type')}: {message} [{host}]", cause=cause)


_BY_NAME = {kind.__name__ for kind in (*_HOST_ERRORS, *_AGENT_ERRORS, DataError)}
