"""The gateway: any agent that speaks to OpenAI or Anthropic plays an episode, token for token.

    async with Gateway(generator=client, renderer_for=renderer_for) as gateway:
        session = await gateway.open("task-3/0", sampling=sampling, budget=Budget(turns=40))
        ... the agent runs with base URL session.url and API key session.key ...
        recorded = await session.close()
        turns = recorded.for_training()

docs/gateway.md says how to point an agent at it.
"""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from skyrl_jax.core.errors import ConfigError, DataError, InfraError
from skyrl_jax.core.protocols import Generator
from skyrl_jax.core.types import SamplingParams
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.gateway.calls import RendererFor
from skyrl_jax.gateway.conversation import Conversation
from skyrl_jax.gateway.dialects.base import TokenBytes
from skyrl_jax.gateway.front import Front, Limits, Models
from skyrl_jax.gateway.keys import Sessions, new_key
from skyrl_jax.gateway.parts import SessionParts
from skyrl_jax.gateway.session import Session
from skyrl_jax.gateway.sockets import SocketListener

_STOP_S = 5.0
_LONGEST_ID = 512
_WILDCARDS = ("0.0.0.0", "::")


class Gateway:
    """The HTTP server and its sessions, as an async context manager.

    Args:
        generator: tokens in, tokens out; a session may bring its own.
        renderer_for: the renderer of a set of tools.
        host: where to listen. ``port``: 0 = any free one.
        api_key: the gateway's own key; needed where ``host`` is not this machine's loopback.
        public_url: base URL by which agents reach it, where that is not ``http://host:port``.
        models: names that clients may ask for; all are the one policy ("*" = any name).
        aux_models: names whose calls are no work of the agent (titles, summaries): not trained.
        token_bytes: the bytes of a token, for clients that ask for log-probs; ``None`` names the
            tokens by their ids.
        limits: sizes and deadlines.

    Raises:
        ConfigError: it would listen beyond loopback without a key.
    """

    def __init__(
        self,
        *,
        generator: Generator,
        renderer_for: RendererFor,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str = "",
        public_url: str = "",
        models: tuple[str, ...] = ("policy",),
        aux_models: tuple[str, ...] = (),
        token_bytes: TokenBytes | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Nothing listens before the context is entered."""
        if not api_key and not _is_loopback(host):
            raise ConfigError(
                f"the gateway would listen on {host} without a key: anybody who reaches it could "
                "speak for an episode; give it an api_key, or host 127.0.0.1"
            )
        self._generator, self._renderer_for = generator, renderer_for
        self._host, self._port, self._public_url = host, port, public_url.rstrip("/")
        self._limits = limits or Limits()
        self._sessions = Sessions(api_key)
        self._front = Front(
            self._sessions, Models(names=models, aux=aux_models), self._limits, token_bytes
        )
        self._runner: web.ServerRunner | None = None

    async def __aenter__(self) -> Gateway:
        """Listen.

        Raises:
            InfraError: the address cannot be had.
        """
        server = web.Server(self._front.handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=_STOP_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            text = f"the gateway cannot listen on {self._host}:{self._port}: {error.strerror}"
            raise InfraError(text, cause="gateway") from error
        self._port = site.port
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close what is open; then stop listening."""
        await asyncio.gather(*(session.close() for session in self._sessions.all()))
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        """Base URL, without session and /v1."""
        if self._public_url:
            return self._public_url
        host = "127.0.0.1" if self._host in _WILDCARDS else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def open_sessions(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    async def open(
        self,
        session_id: str,
        *,
        sampling: SamplingParams,
        budget: Budget | None = None,
        training: bool = True,
        generator: Generator | None = None,
    ) -> Session:
        """Open an episode's session.

        Args:
            session_id: its name, e.g. "toolz-3/0"; also the generator's routing key.
            sampling: of every call, whatever a client asks for; ``max_new_tokens`` is the most that
                an answer may have, ``seed`` the base of the calls' seeds.
            budget: see Budget; none by default.
            training: False accepts a generator that tells no log-probs; the record then cannot be
                trained on.
            generator: this session's own (actor/episodes.py counts tokens by one).

        Raises:
            DataError: the name is open already, or no name.
        """
        _check_id(session_id)
        parts = SessionParts(
            generator=generator or self._generator,
            renderer_for=self._renderer_for,
            conversation=Conversation(self._renderer_for),
            sampling=sampling,
            budget=budget or Budget(),
            training=training,
            call_timeout_s=self._limits.call_s,
            max_replays=self._limits.max_replays,
            listen=self._listen,
            forget=self._sessions.remove,
        )
        root = f"{self.url}/s/{quote(session_id, safe='')}"
        session = Session(session_id, new_key(), root, parts)
        self._sessions.add(session)
        return session

    async def _listen(
        self, session: Session, path: Path, uid: int, need_key: bool
    ) -> SocketListener:
        return await SocketListener.open(self._front.on_socket(session, uid, need_key), path, uid)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_id(session_id: str) -> None:
    """Refuse a name that no URL could carry."""
    fits = 0 < len(session_id) <= _LONGEST_ID and session_id.isprintable()
    if not fits or not session_id.strip("."):
        raise DataError(
            f"session id {session_id!r} must have 1 to {_LONGEST_ID} printable characters, and "
            "not dots alone"
        )
