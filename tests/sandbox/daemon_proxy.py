"""A socket in front of a docker daemon that can hang, cut connections, lose answers or be slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_METHODS = (b"GET ", b"POST ", b"PUT ", b"DELETE ", b"HEAD ")


class DaemonProxy:
    """Passes requests on and writes their first lines down.

    ``mode`` says what becomes of the requests whose first line holds ``match``: "pass"; "hang" (it
    never reaches the daemon); "mute" (the daemon does it, its answer is lost); "cut" (the same, and
    the connection is closed); "slow" (the answer comes in drops).
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.mode, self.match = "pass", ""
        self.requests: list[str] = []

    @contextlib.asynccontextmanager
    async def serve(self, path: str) -> AsyncIterator[DaemonProxy]:
        """Listen on a unix socket."""
        server = await asyncio.start_unix_server(self._connected, path)
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self._target)
        manner = ["pass"]  # of this connection's latest request
        answers = asyncio.ensure_future(self._answers(up_reader, writer, manner))
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if data.startswith(_METHODS):
                    line = data.partition(b"\r\n")[0].decode()
                    self.requests.append(line)
                    manner[0] = self.mode if self.match in line else "pass"
                if manner[0] != "hang":
                    up_writer.write(data)
                    await up_writer.drain()
            if up_writer.can_write_eof():
                up_writer.write_eof()
        await answers
        up_writer.close()
        writer.close()

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, manner: list[str]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if manner[0] == "mute":
                    continue
                if manner[0] == "cut":
                    writer.transport.abort()
                    return
                size = 64 if manner[0] == "slow" else len(data)
                for at in range(0, len(data), size):
                    writer.write(data[at : at + size])
                    await writer.drain()
                    if manner[0] == "slow":
                        await asyncio.sleep(0.02)
            if writer.can_write_eof():
                writer.write_eof()
