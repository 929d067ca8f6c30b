"""One channel to one supervisor: requests in order, replies by id, every wait with a deadline."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

from skyrl_jax.core.errors import AgentCausedError, CapacityError, InfraError, SandboxGone
from skyrl_jax.core.protocols import ExecResult
from skyrl_jax.sandbox import wire

BASE_ENV = {
    "PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin",
    "HOME": "/home/agent",
    "LANG": "C.UTF-8",
}
START_TIMEOUT_S = 20.0
DESTROY_TIMEOUT_S = 20.0
_REPLY_GRACE_S = 15.0  # the supervisor's own deadline comes first; this one is for a broken host
PING_TIMEOUT_S = 5.0
_TREE_TIMEOUT_S = 60.0
_TURN_TIMEOUT_S = 3600.0  # waiting for another command of the same sandbox to end


def spawn(
    program: str, arguments: Sequence[str], *, new_session: bool
) -> tuple[int, socket.socket]:
    """Start a program with a new channel as its standard input and output; (pid, our end).

    posix_spawn, not fork: this process may be large, and may have threads.

    Raises:
        CapacityError: no process or descriptor could be had.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise CapacityError(f"cannot make a channel for a sandbox: {error}") from error
    fd = theirs.fileno()
    actions = [(os.POSIX_SPAWN_DUP2, fd, 0), (os.POSIX_SPAWN_DUP2, fd, 1)]
    try:
        pid = os.posix_spawn(
            program,
            [os.path.basename(program), *arguments],
            {},
            file_actions=actions,
            setsid=new_session,
        )
    except OSError as error:
        ours.close()
        raise CapacityError(f"cannot start a sandbox process: {error}") from error
    finally:
        theirs.close()
    return pid, ours


class SupervisorChannel(asyncio.Protocol):
    """The host's end of a supervisor's channel.

    ``hello`` is done when the supervisor speaks; ``closed`` when the other side is gone. Bytes are
    parsed as they arrive: no task or thread waits for a sandbox.
    """

    def __init__(self) -> None:
        """Make the futures; needs a running loop."""
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.last_words = ""
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: tuple[int, asyncio.Future[wire.Reply]] | None = None
        self._next_id = 0
        self._lock = asyncio.Lock()

    async def attach(self, sock: socket.socket, timeout_s: float) -> None:
        """Take over a connected socket and wait for the supervisor's first word.

        Raises:
            InfraError: no word in time, or the other side ended; the message holds its last words.
        """
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)
                await self.hello
        except TimeoutError as error:
            raise InfraError(f"a sandbox did not start within {timeout_s:.0f} s") from error
        finally:
            if self._transport is None:
                sock.close()
                self.connection_lost(None)
        if self.closed.done():
            raise InfraError(f"a sandbox did not start: {self.last_words}", cause="start")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Cut the stream into frames."""
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from("<I", self._buffer)
            if len(self._buffer) < 4 + length:
                return
            payload = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            self._frame(payload)

    def _frame(self, payload: bytes) -> None:
        kind = payload[:1]
        if kind == b"H" and not self.hello.done():
            self.hello.set_result(None)
        elif kind == b"X":
            self.last_words = payload[5:].decode("utf-8", "replace").strip()
        elif kind == b"R" and self._waiting is not None:
            reply = wire.parse_reply(payload)
            if reply.request_id == self._waiting[0] and not self._waiting[1].done():
                self._waiting[1].set_result(reply)

    def eof_received(self) -> bool:
        """Take end of file as the end of the sandbox."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake everybody who waits."""
        if not self.closed.done():
            self.closed.set_result(None)
        if not self.hello.done():
            self.hello.set_result(None)
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_exception(SandboxGone("the sandbox ended while a command ran"))

    def write_eof(self) -> None:
        """Tell the other side that the owner is done."""
        if self._transport is not None and not self.closed.done():
            self._transport.write_eof()

    def abort(self) -> None:
        """Close without waiting."""
        if self._transport is not None:
            self._transport.abort()

    async def call(self, kind: bytes, timeout_s: float, **fields: Any) -> wire.Reply:
        """Send one request and wait for its reply; commands of one sandbox run one at a time.

        Raises:
            SandboxGone: the channel closed.
            InfraError: no reply within the command's limit and a grace, or processes of the
                command could not be killed: the next command would not be alone.
        """
        async with asyncio.timeout(_TURN_TIMEOUT_S):
            await self._lock.acquire()
        try:
            reply = await self._call(kind, timeout_s, fields)
        finally:
            self._lock.release()
        if reply.flags & wire.STUCK:
            raise InfraError("processes of a command could not be killed", cause="stuck")
        return reply

    async def ping(self, timeout_s: float = PING_TIMEOUT_S) -> None:
        """Wait for the supervisor's answer to an empty request; no process is started for it.

        Raises:
            SandboxGone: the channel closed.
            InfraError: no answer within the limit and a grace.
        """
        await self.call(b"N", timeout_s)

    async def _call(self, kind: bytes, timeout_s: float, fields: Mapping[str, Any]) -> wire.Reply:
        if self.closed.done() or self._transport is None:
            raise SandboxGone("the sandbox has ended")
        self._next_id += 1
        future = asyncio.get_running_loop().create_future()
        self._waiting = (self._next_id, future)
        number = self._next_id
        empty = kind == b"N"
        self._transport.write(
            wire.ping(number)
            if empty
            else wire.request(kind, number, timeout_s=timeout_s, **fields)
        )
        try:
            async with asyncio.timeout(timeout_s + _REPLY_GRACE_S):
                return cast(wire.Reply, await future)
        except TimeoutError as error:
            raise InfraError(
                f"no reply from the sandbox's supervisor {timeout_s + _REPLY_GRACE_S:.0f} s after "
                f"a command with a limit of {timeout_s:.0f} s",
                cause="supervisor",
            ) from error
        except asyncio.CancelledError:
            self._transport.write(wire.cancel(self._next_id))
            raise
        finally:
            self._waiting = None

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str,
        env: Mapping[str, str],
        max_output_bytes: int,
        stdin: bytes,
    ) -> ExecResult:
        """Run a command; the first half of the output limit keeps the head, the rest the tail."""
        args = wire.command_args(command, timeout_s)
        head_cap = max_output_bytes // 2
        reply = await self.call(
            b"E",
            timeout_s,
            args=args,
            cwd=cwd,
            env=env,
            head_cap=head_cap,
            tail_cap=max_output_bytes - head_cap,
            stdin=stdin,
        )
        return ExecResult(
            returncode=reply.code,
            output=reply.text(),
            truncated=bool(reply.flags & wire.TRUNCATED),
            timed_out=bool(reply.flags & wire.TIMED_OUT),
            seconds=reply.seconds,
        )

    async def put(self, path: str, tar: bytes) -> None:
        """Unpack a tar stream under ``path`` with the commands' uid."""
        reply = await self.call(
            b"P",
            _TREE_TIMEOUT_S,
            args=[path],
            head_cap=4096,
            tail_cap=0,
            stdin=wire.tar_to_records(tar),
        )
        if reply.code:
            raise AgentCausedError(f"put into {path}: {reply.text().strip()}")

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Return ``path`` as a tar stream, read with the commands' uid."""
        reply = await self.call(b"G", _TREE_TIMEOUT_S, args=[path], head_cap=max_bytes, tail_cap=0)
        if reply.flags & wire.TRUNCATED:
            raise AgentCausedError(f"get {path}: more than {max_bytes} bytes")
        if reply.code:
            raise AgentCausedError(f"get {path}: {reply.text().strip()[-500:]}")
        return wire.records_to_tar(reply.head)
