"""A unix socket that serves one session to one uid.

An agent in a sandbox without a network reaches the gateway through a socket that is mounted into
it. The agent's process has another uid than the commands it runs: the kernel tells who calls
(SO_PEERCRED), so that a command which finds the socket gets 403 and is counted. File modes keep
others out as well: socket 0600, its folder 0700, both the agent's.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from skyrl_jax.core.errors import ConfigError, InfraError

_LONGEST = 107  # bytes of a path that fit into sockaddr_un, its closing NUL left out
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_STOP_S = 2.0

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end of a unix socket, as this host knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def caller_uid(request: web.BaseRequest) -> int | None:
    """Return the uid of the process that sent a request; ``None``: it has gone."""
    transport = request.transport
    end = None if transport is None else transport.get_extra_info("socket")
    return None if end is None else peer_uid(end)


class SocketListener:
    """A listening socket; ``open`` makes it, ``close`` removes it."""

    def __init__(self, runner: web.ServerRunner, path: Path, folder_made: bool) -> None:
        """Keep what ``close`` takes away."""
        self._runner, self._path, self._folder_made = runner, path, folder_made

    @classmethod
    async def open(cls, handler: Handler, path: Path, uid: int) -> SocketListener:
        """Listen at ``path`` for processes of ``uid``.

        Raises:
            ConfigError: the path is too long, or its folder is open to others.
            InfraError: the socket cannot be made or given to ``uid``.
        """
        if len(os.fsencode(path)) > _LONGEST:
            raise ConfigError(
                f"socket path {path} has {len(os.fsencode(path))} bytes; a socket's may have "
                f"{_LONGEST}: use a shorter folder"
            )
        server = web.Server(handler, handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=_STOP_S)
        made = False
        try:
            made = _folder(path.parent, uid)
            await runner.setup()
            await web.UnixSite(runner, str(path)).start()
            path.chmod(0o600)
            os.chown(path, uid, -1)
            if made:
                os.chown(path.parent, uid, -1)
        except OSError as error:
            await cls(runner, path, made).close()
            raise InfraError(f"socket {path} for uid {uid}: {error}", cause="gateway") from error
        return cls(runner, path, made)

    async def close(self) -> None:
        """Stop listening, let the connections go, remove the socket and a folder we made."""
        await self._runner.cleanup()
        self._path.unlink(missing_ok=True)
        if self._folder_made and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()


def _folder(folder: Path, uid: int) -> bool:
    """Make the socket's folder, closed to everybody else; return whether it was not there.

    A folder that is there stays as it is, but must not let others put a socket of their own in our
    place: nobody but root, ourselves and the agent may own it, and nobody else may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        found = folder.stat()
        if stat.S_IMODE(found.st_mode) & 0o022 or found.st_uid not in (0, os.geteuid(), uid):
            raise ConfigError(
                f"socket folder {folder} can be written by others; name one that is not there yet, "
                f"or give it to uid {os.geteuid()} and chmod 0700 it"
            ) from None
        return False
    return True
