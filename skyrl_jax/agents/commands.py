"""The shell of a foreign scaffold: a unix socket on the host that runs commands in the sandbox.

The scaffold's program has a sandbox and a uid of its own; what its model wants to run goes through
this socket to the episode's sandbox and runs there with the commands' uid. So a command can neither
signal the program nor read its memory, its key or its socket.

One call is one connection: a line of JSON each way.
    {"argv": [...], "cwd": "", "env": {...}, "stdin": ""}  ->  {"code", "output", "timed_out"}
    or {"error": text} where the call makes no sense.
A caller that hangs up ends its command. A peer with another uid gets nothing and is counted.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skyrl_jax.core.errors import DataError
from skyrl_jax.core.protocols import ExecResult, Shell
from skyrl_jax.gateway.sockets import peer_uid

MAX_CALL = 4 << 20  # bytes of one call
_READ_TIMEOUT_S = _WRITE_TIMEOUT_S = 30.0
TIMED_OUT = 124  # the exit code of coreutils' timeout
_BYTES = "surrogateescape"  # how JSON carries bytes that are no text


class BadCall(ValueError):
    """A call that is no call; the text says what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One command: ``argv`` runs in ``cwd`` ("" = where the task lies)."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    stdin: bytes


class CommandSocket:
    """Serves the commands of one episode; an async context manager.

    Args:
        path: where the socket is made.
        shell: runs the commands.
        allow_uid: the only uid that is served.

    ``failed`` is done with the first error that no scaffold could do anything about (the sandbox
    ended, the host broke): the episode ends by it. ``served`` and ``refused`` count calls.
    """

    def __init__(self, path: Path, shell: Shell, *, allow_uid: int) -> None:
        """Keep the settings; needs a running loop."""
        self._path = path
        self._shell = shell
        self._allow_uid = allow_uid
        self._calls: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.served = 0
        self.refused = 0

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_unix_server(
            self._connected, path=str(self._path), limit=MAX_CALL
        )
        os.chmod(self._path, 0o666)  # who may call is decided by the peer's uid, not by the mode
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop listening and end the commands that still run."""
        self._server.close()
        for call in list(self._calls):
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=5.0)
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # it was looked at, or the episode ended before it mattered
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            if peer_uid(writer.get_extra_info("socket")) != self._allow_uid:
                self.refused += 1
                return
            answer = await self._answer(reader)
            if answer is not None:
                writer.write(json.dumps(answer).encode() + b"\n")
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await writer.drain()
        except (ConnectionError, TimeoutError):
            return  # the caller is gone, or does not read
        finally:
            self._calls.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                line = await reader.readuntil(b"\n")
            call = read_call(line)
        except (TimeoutError, asyncio.IncompleteReadError):
            return None
        except asyncio.LimitOverrunError:
            return {"error": f"a call may have {MAX_CALL} bytes"}
        except BadCall as error:
            return {"error": str(error)}
        try:
            result = await self._run(call, reader)
        except DataError as error:  # a zero byte in an argument, an empty command
            return {"error": str(error)}
        except Exception as error:  # whose fault it is, actor/blame.py says
            if not self.failed.done():
                self.failed.set_exception(error)
            return None
        return None if result is None else _shown(result)

    async def _run(self, call: Call, reader: asyncio.StreamReader) -> ExecResult | None:
        """Run a call; ``None``: the caller hung up, and its command was ended."""
        self.served += 1
        work = asyncio.ensure_future(
            self._shell.shell(call.argv, cwd=call.cwd, env=call.env, stdin=call.stdin)
        )
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=5.0)


def read_call(line: bytes) -> Call:
    """Read one call.

    Raises:
        BadCall: it is none.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"a call must be a line of JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadCall("a call must be a JSON object")
    argv, env = values.get("argv"), values.get("env", {})
    if not isinstance(argv, list) or not argv or not all(isinstance(x, str) for x in argv):
        raise BadCall("argv must be a list of strings that names a program")
    if not isinstance(env, dict) or not all(isinstance(x, str) for x in env.values()):
        raise BadCall("env must map names to strings")
    cwd, stdin = values.get("cwd", ""), values.get("stdin", "")
    if not isinstance(cwd, str) or not isinstance(stdin, str):
        raise BadCall("cwd and stdin must be strings")
    try:  # half of a surrogate pair is no text: it must not become a fault of the host
        "".join((*argv, *env, *env.values(), cwd)).encode()
        return Call(argv=tuple(argv), cwd=cwd, env=env, stdin=stdin.encode(errors=_BYTES))
    except UnicodeEncodeError as error:
        raise BadCall(f"a call must be text: {error}") from None


def _shown(result: ExecResult) -> dict[str, Any]:
    code = TIMED_OUT if result.timed_out else result.returncode
    return {"code": code, "output": result.output, "timed_out": result.timed_out}
