"""A sandbox host's HTTP: token, messages, layers that arrive; everything else is sandbox/host.py.

TLS is not spoken: the token travels in the clear, so a host belongs on a private network or behind
a tunnel.
"""

from __future__ import annotations

import functools
import hmac
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from skyrl_jax.core.errors import DataError
from skyrl_jax.sandbox import host_wire
from skyrl_jax.sandbox.host import OPERATIONS, MissingLayers, SandboxHost
from skyrl_jax.sandbox.host_layers import HashingFile

_ID = re.compile(r"[0-9a-f]{16,64}")
_BINARY = "application/octet-stream"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(host: SandboxHost, *, token: str, max_layer_bytes: int) -> web.Application:
    """Return the application; run it with ``handler_cancellation=True``.

    Args:
        host: does the work.
        token: what a client must bring; never "".
        max_layer_bytes: of one layer's tar stream.
    """
    if not token:
        raise ValueError("a sandbox host needs a token")
    app = web.Application(
        client_max_size=host_wire.MAX_MESSAGE,
        middlewares=[_answer_errors, _token_check(token, host)],
    )
    handlers = _Handlers(host, max_layer_bytes)
    app.add_routes(
        [
            web.get("/health", handlers.health),
            web.post("/owners/{owner}/lease", handlers.lease),
            web.delete("/owners/{owner}", handlers.drop_owner),
            web.put("/layers/{digest}", handlers.layer),
            web.post("/sandboxes/{key}", handlers.create),
            web.delete("/sandboxes/{key}", handlers.destroy),
            web.post("/sandboxes/{key}/ops/{number:[0-9]+}", handlers.operate),
            web.delete("/sandboxes/{key}/ops/{number:[0-9]+}", handlers.cancel),
        ]
    )
    return app


def _token_check(token: str, host: SandboxHost) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        request["known"] = hmac.compare_digest(given, expected)
        if not request["known"] and request.path != "/health":
            what = "the wrong token" if given else "no token"
            text = f"401: {what}: this sandbox host wants 'Authorization: Bearer <its token>'\n"
            return web.Response(status=401, text=text)
        owner = request.headers.get(host_wire.OWNER_HEADER, "")
        if request["known"] and _ID.fullmatch(owner):
            host.renew(owner)
        return await handler(request)

    return check


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except MissingLayers as missing:
        return _message({"missing": missing.digests}, status=428)
    except Exception as error:
        status, values = host_wire.error_to_json(error)
        return _message({"error": values}, status=status)


def _message(header: dict[str, Any], body: bytes = b"", status: int = 200) -> web.Response:
    return web.Response(status=status, body=host_wire.pack(header, body), content_type=_BINARY)


def _named(request: web.Request, name: str) -> str:
    value = request.match_info[name]
    if not _ID.fullmatch(value):
        raise DataError(f"{name} must be 16 to 64 hexadecimal digits, got {value[:80]!r}")
    return value


class _Handlers:
    """One method per request of ``host_wire``'s table."""

    def __init__(self, host: SandboxHost, max_layer_bytes: int) -> None:
        self._host = host
        self._max_layer_bytes = max_layer_bytes

    async def health(self, request: web.Request) -> web.Response:
        values: dict[str, Any] = {"status": "ok"}
        if request["known"]:
            values |= self._host.status() | {"layers": list(self._host.layers.digests)}
        return web.json_response(values)

    async def lease(self, request: web.Request) -> web.Response:
        return _message(self._host.renew(_named(request, "owner")))

    async def drop_owner(self, request: web.Request) -> web.Response:
        await self._host.drop_owner(_named(request, "owner"))
        return _message({})

    async def layer(self, request: web.Request) -> web.Response:
        digest = _named(request, "digest")
        if not self._host.layers.missing([digest]):
            return _message({})
        file, path = self._host.layers.new_file()
        try:
            with file:
                sink = HashingFile(file)
                async for chunk in request.content.iter_chunked(1 << 20):
                    sink.write(chunk)
                    if sink.size > self._max_layer_bytes:
                        raise DataError(f"a layer has more than {self._max_layer_bytes} bytes")
            if sink.hexdigest() != digest:
                raise DataError("a layer's content is not what its digest says: it changed")
            await self._host.layers.add(digest, path, sink.size)
        finally:
            path.unlink(missing_ok=True)
        return _message({})

    async def create(self, request: web.Request) -> web.Response:
        key = _named(request, "key")
        header, _ = host_wire.unpack(await request.read())
        owner = request.headers.get(host_wire.OWNER_HEADER, "")
        if not _ID.fullmatch(owner):
            raise DataError(f"a request to create needs the header {host_wire.OWNER_HEADER}")
        await self._host.create(owner, key, host_wire.spec_from_json(header.get("spec")))
        return _message({})

    async def destroy(self, request: web.Request) -> web.Response:
        await self._host.destroy(_named(request, "key"))
        return _message({})

    async def operate(self, request: web.Request) -> web.Response:
        header, body = host_wire.unpack(await request.read())
        kind = OPERATIONS.get(header.get("kind", ""))
        if kind is None:
            known = ", ".join(OPERATIONS)
            raise DataError(f"no operation {header.get('kind')!r}; known: {known}")
        number = int(request.match_info["number"])
        work = functools.partial(kind, header=header, body=body)
        answer = await self._host.operate(_named(request, "key"), number, work)
        return web.Response(body=answer, content_type=_BINARY)

    async def cancel(self, request: web.Request) -> web.Response:
        await self._host.cancel(_named(request, "key"), int(request.match_info["number"]))
        return _message({})
