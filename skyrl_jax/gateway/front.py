"""HTTP in front of the sessions: find the session, read the body, answer or refuse in its dialect.

Every await has a deadline. A request whose client disconnects is cancelled (aiohttp's
``handler_cancellation``), and its generation with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from skyrl_jax.gateway.calls import ChatRequest
from skyrl_jax.gateway.dialects.anthropic import Anthropic
from skyrl_jax.gateway.dialects.base import Dialect, TokenBytes, dumps, read_request
from skyrl_jax.gateway.dialects.fields import read_json
from skyrl_jax.gateway.dialects.openai_chat import OpenAIChat
from skyrl_jax.gateway.dialects.openai_responses import OpenAIResponses
from skyrl_jax.gateway.keys import Sessions, check_socket_key
from skyrl_jax.gateway.parts import Repeat
from skyrl_jax.gateway.refusals import PASSING, Cause, Refused
from skyrl_jax.gateway.session import Session
from skyrl_jax.gateway.sockets import Handler, caller_uid

_log = logging.getLogger(__name__)
KIND_HEADER = "X-Call-Kind"  # "aux": no work of the agent
_PATH = re.compile(r"(?:/s/([^/]+))?(?:/v1)+(/[^?]*)")
_ANY_MODEL = "*"
_RELEASED = "2026-01-01T00:00:00Z"  # of every model: clients want a date, and there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes and deadlines of the gateway.

    Args:
        body_bytes: largest body of a request, unpacked.
        body_s: for a body to arrive. ``call_s``: for one generation. ``write_s``: for a client to
            take an answer, or one piece of a stream.
        keep_alive_s: a stream says something at least this often while its answer is sampled.
        max_replays: how often the recorded answer of one call is given again.
    """

    body_bytes: int = 8 << 20
    body_s: float = 30.0
    call_s: float = 600.0
    write_s: float = 30.0
    keep_alive_s: float = 10.0
    max_replays: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The names that clients may ask for: all are the one policy.

    ``aux`` names mark a call as no work of the agent, e.g. the small model that an agent asks for
    titles. "*" in ``names`` takes any name.
    """

    names: tuple[str, ...] = ("policy",)
    aux: tuple[str, ...] = ()

    def is_aux(self, name: str) -> bool:
        """Return whether a call to this model is auxiliary.

        Raises:
            Refused: there is no such model.
        """
        if name in self.aux:
            return True
        if name not in self.names and _ANY_MODEL not in self.names:
            known = ", ".join((*self.names, *self.aux))
            raise Refused(
                Cause.NO_MODEL,
                f"The model {name!r} does not exist; models here: {known}",
                param="model",
            )
        return False

    def listed(self) -> list[str]:
        """Return the names to show."""
        return [name for name in (*self.names, *self.aux) if name != _ANY_MODEL]


@dataclass(frozen=True, slots=True)
class _Call:
    """A request on its way: what is needed to answer it in its dialect."""

    request: web.BaseRequest
    dialect: Dialect
    request_id: str
    path: str  # after /v1


Find = Callable[[str | None], Session]


class Front:
    """The request handlers.

    Args:
        sessions: who is open.
        models: names that clients may ask for.
        limits: see Limits.
        token_bytes: the bytes of a token, for log-probs.
    """

    def __init__(
        self, sessions: Sessions, models: Models, limits: Limits, token_bytes: TokenBytes | None
    ) -> None:
        """Make the dialects."""
        self._sessions, self._models, self._limits = sessions, models, limits
        self._chat, self._responses = OpenAIChat(token_bytes), OpenAIResponses(token_bytes)
        self._anthropic = Anthropic()
        self._posts: dict[str, Callable[[_Call, Session], Awaitable[web.StreamResponse]]] = {
            "/chat/completions": self._converse,
            "/responses": self._converse,
            "/messages": self._converse,
            "/messages/count_tokens": self._count_tokens,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request that came by TCP."""
        return await self._handle(request, lambda name: self._sessions.find(request.headers, name))

    def on_socket(self, session: Session, uid: int, need_key: bool) -> Handler:
        """Return the handler of a session's own socket: that session alone, for one uid.

        It holds the session weakly: aiohttp's servers are cycles, and a record is large.
        """
        known = weakref.ref(session)

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            def find(name: str | None) -> Session:
                caller = caller_uid(request)
                if caller is None:
                    raise ConnectionResetError("the peer has gone")
                session = known()
                if session is None:
                    raise Refused(Cause.CLOSED, "the session is closed")
                if caller != uid:
                    session.note("refused_peers")
                    raise Refused(Cause.PEER, "this socket is not for your process")
                check_socket_key(session, request.headers, needed=need_key)
                if name not in (None, session.session_id):
                    raise Refused(Cause.NO_SESSION, f"there is no session {name!r}")
                return session

            return await self._handle(request, find)

        return handle

    async def _handle(self, request: web.BaseRequest, find: Find) -> web.StreamResponse:
        found = _PATH.fullmatch(request.rel_url.raw_path)
        name, path = (found[1], found[2].rstrip("/")) if found else (None, "")
        dialect = self._dialect(path, request.headers)
        call = _Call(request, dialect, f"req_{uuid.uuid4().hex}", path)
        session = None
        try:
            session = find(None if name is None else unquote(name))
            return await self._route(call, session)
        except Refused as refused:
            return await self._refuse(call, refused)
        except ConnectionError:
            return _drop(request)
        except Exception as error:
            _log.exception("request %s broke", call.request_id)
            if session is not None:
                session.note_bug(error)
            text = "the gateway broke; its log says how"
            return await self._refuse(call, Refused(Cause.BUG, text))

    def _dialect(self, path: str, headers: Mapping[str, str]) -> Dialect:
        if path == "/responses":
            return self._responses
        if path.startswith("/messages") or "anthropic-version" in headers:
            return self._anthropic
        return self._chat

    async def _route(self, call: _Call, session: Session) -> web.StreamResponse:
        method, path = call.request.method, call.path
        lists_models = path == "/models" or path.startswith("/models/")
        if path not in self._posts and not lists_models:
            raise Refused(Cause.NO_ROUTE, f"there is no {method} {call.request.path} here")
        if method != ("GET" if lists_models else "POST"):
            raise Refused(Cause.METHOD, f"{call.request.path} takes no {method}")
        if lists_models:
            return await self._send(call, 200, self._list_models(call))
        return await self._posts[path](call, session)

    # -- routes ----------------------------------------------------------------------------------

    async def _converse(self, call: _Call, session: Session) -> web.StreamResponse:
        raw = await self._body(call.request)
        chat = read_request(call.dialect, raw, session.memory(call.dialect))
        headers = call.request.headers
        aux = self._models.is_aux(chat.model) or headers.get(KIND_HEADER) == "aux"
        key = headers.get("Idempotency-Key", "")
        repeat = Repeat(key=key, digest=hashlib.blake2b(raw).digest() if key else b"")
        answering = session.serve(chat, repeat, aux=aux)
        if chat.stream:
            return await self._stream(call, chat, answering)
        return await self._send(call, 200, call.dialect.answer(chat, await answering))

    async def _stream(
        self, call: _Call, chat: ChatRequest, answering: Awaitable[Any]
    ) -> web.StreamResponse:
        """Answer by events; a refusal that comes before the first of them is a plain error."""
        waiting = asyncio.ensure_future(answering)
        response: web.StreamResponse | None = None
        try:
            while not (await asyncio.wait({waiting}, timeout=self._limits.keep_alive_s))[0]:
                response = response or await self._open_stream(call)
                await self._write(response, call.dialect.keep_alive)
            answer = waiting.result()
            response = response or await self._open_stream(call)
            await self._write(response, b"".join(call.dialect.events(chat, answer)))
        except Refused as refused:
            if response is None:
                raise
            await self._write(response, call.dialect.late_error(refused, call.request_id))
        finally:
            waiting.cancel()
        await self._in_time(response.write_eof())
        return response

    async def _count_tokens(self, call: _Call, session: Session) -> web.StreamResponse:
        raw = await self._body(call.request)
        memory = session.memory(self._anthropic)
        chat = self._anthropic.parse_count(read_json(raw, memory.bodies), memory)
        self._models.is_aux(chat.model)
        return await self._send(call, 200, {"input_tokens": session.count(chat)})

    def _list_models(self, call: _Call) -> dict[str, Any]:
        names = self._models.listed()
        anthropic = call.dialect is self._anthropic
        write = _anthropic_model if anthropic else _openai_model
        wanted = unquote(call.path.removeprefix("/models").removeprefix("/"))
        if wanted:
            self._models.is_aux(wanted)
            return write(wanted)
        listed: dict[str, Any] = {"data": [write(name) for name in names]}
        if not anthropic:
            return {"object": "list", **listed}
        first, last = (names[0], names[-1]) if names else (None, None)
        return {**listed, "has_more": False, "first_id": first, "last_id": last}

    # -- reading and writing ---------------------------------------------------------------------

    async def _body(self, request: web.BaseRequest) -> bytes:
        most = self._limits.body_bytes
        too_large = Refused(
            Cause.TOO_LARGE, f"the body is larger than {most} bytes; send a shorter history"
        )
        if (request.content_length or 0) > most:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                if request.headers.get("Expect", "").lower() == "100-continue":
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                while part := await request.content.readany():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            text = f"the body did not arrive within {self._limits.body_s:g} s"
            raise Refused(Cause.SLOW, text) from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            raise Refused(Cause.MALFORMED, f"the body cannot be read: {error}") from None
        return b"".join(parts)

    async def _refuse(self, call: _Call, refused: Refused) -> web.StreamResponse:
        passing = refused.cause in PASSING
        headers = {"x-should-retry": "true" if passing else "false"}
        if passing:
            headers["Retry-After"] = "1"
        body = call.dialect.error(refused, call.request_id)
        return await self._send(call, refused.status, body, headers)

    async def _send(
        self,
        call: _Call,
        status: int,
        value: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        response = web.Response(
            status=status,
            body=dumps(value),
            content_type="application/json",
            headers={**_identity(call), **(headers or {})},
        )

        async def send() -> None:
            await response.prepare(call.request)
            await response.write_eof()

        await self._in_time(send())
        return response

    async def _open_stream(self, call: _Call) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**headers, **_identity(call)})
        await self._in_time(response.prepare(call.request))
        return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        await self._in_time(response.write(data))

    async def _in_time(self, writing: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.write_s):
                await writing
        except TimeoutError:
            raise ConnectionResetError("the client does not read its answer") from None


def _drop(request: web.BaseRequest) -> web.Response:
    """End a connection whose client has gone or does not read; nobody sees the response."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _identity(call: _Call) -> dict[str, str]:
    """Return the headers by which the official clients tell a request's id."""
    return {"x-request-id": call.request_id, "request-id": call.request_id}


def _openai_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "skyrl_jax"}


def _anthropic_model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": _RELEASED}
