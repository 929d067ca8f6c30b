"""The stream of an attached container: stdout and stderr in one, with a header per chunk."""

from __future__ import annotations

import asyncio
import struct

from skyrl_jax.sandbox.channel import SupervisorChannel


class AttachedStream(asyncio.Protocol):
    """Takes docker's 8-byte stream headers off and hands stdout to the supervisor's channel."""

    def __init__(self, channel: SupervisorChannel) -> None:
        """Keep the channel."""
        self._channel = channel
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the channel its transport."""
        self._channel.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Cut the stream at docker's headers."""
        self._buffer += data
        while len(self._buffer) >= 8:
            stream, length = struct.unpack_from(">BxxxI", self._buffer)
            if len(self._buffer) < 8 + length:
                return
            chunk = bytes(self._buffer[8 : 8 + length])
            del self._buffer[: 8 + length]
            if stream == 1:
                self._channel.data_received(chunk)
            else:
                self._channel.last_words += chunk.decode("utf-8", "replace")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the channel."""
        self._channel.connection_lost(exc)
