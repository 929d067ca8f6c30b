"""A client's link to one sandbox host: calls that are safe to repeat, and one heartbeat.

The heartbeat renews the lease of all this client's sandboxes there and says whether the host lives:
when it does not, everything that waits for it fails at once and not at its own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from skyrl_jax.core.errors import CapacityError, HostError, InfraError, SkyrlError
from skyrl_jax.sandbox import host_wire
from skyrl_jax.sandbox.host_layers import layer_digest, layer_file

T = TypeVar("T")
UNREACHABLE = "host_unreachable"  # cause: no answer; whether the request was done is not known
_RETRY_S = 3.0  # a call whose connection failed is repeated for so long
_CALL_TIMEOUT_S = 15.0
_BEAT_S = 5.0  # at most
_DOWN_AFTER_S = 15.0  # without an answer, at most
_REFUSALS = 3  # refused connections in a row: nobody listens there
_UPLOAD_RATE = 1 << 20  # bytes per second that a network must carry


class HostLink:
    """One host as one owner sees it. Use ``open`` and ``close``.

    Args:
        url: e.g. ``http://10.0.0.7:7070``.
        token: what the host wants.
        token_name: where the token is from, for messages.
        owner: id of whoever owns the sandboxes made through this link.
    """

    def __init__(self, url: str, *, token: str, token_name: str, owner: str) -> None:
        """Keep the settings; nothing is sent."""
        self.url = url.rstrip("/")
        self.owner = owner
        self.status: dict[str, Any] = {}  # as the last heartbeat found it
        self.down = "not opened yet"  # why the host is not used; "" = it is up
        self._token_name = token_name
        self._headers = {"Authorization": f"Bearer {token}", host_wire.OWNER_HEADER: owner}
        self._session: aiohttp.ClientSession | None = None
        self._beating: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[None] | None = None  # done when the host goes down
        self._answered = 0.0
        self._refused = 0  # connections, in a row
        self._missed = 0  # beats, in a row
        self._doubt = asyncio.Event()  # a call failed: look at once whether the host lives
        self._uploads: dict[str, asyncio.Task[None]] = {}

    async def open(self, *, must_answer: bool = True) -> None:
        """Say hello and begin the heartbeat.

        Raises:
            InfraError: the token is refused; or, with ``must_answer``, nobody answers.
        """
        self._gone = asyncio.get_running_loop().create_future()
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        try:
            await self._beat(_CALL_TIMEOUT_S)
        except HostError as error:
            if must_answer or error.cause == "token":
                await self.close()
                raise
        self._beating = asyncio.create_task(self._keep_beating())

    async def close(self) -> None:
        """End this owner's sandboxes there and the heartbeat."""
        if self._beating is not None:
            self._beating.cancel()
            if not self.down:
                with contextlib.suppress(SkyrlError):  # the lease ends what is left
                    await self.call("DELETE", f"/owners/{self.owner}", timeout_s=30.0)
        for upload in self._uploads.values():
            upload.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None
        self._take_down("closed")

    # -- is it alive? ----------------------------------------------------------------------------

    async def _keep_beating(self) -> None:
        while True:
            lease_s = float(self.status.get("lease_s", 4 * _BEAT_S))
            failing = bool(self.down or self._missed)
            await asyncio.sleep(0.2 if failing else 0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3 if failing else min(_BEAT_S, lease_s / 4)):
                    await self._doubt.wait()
            self._doubt.clear()
            patience = min(_DOWN_AFTER_S, lease_s / 2)
            try:
                await self._beat(patience / 2)
                self._missed = 0
            except Exception as error:  # whatever it is: without a beat the lease runs out
                self._missed += 1
                silent = time.monotonic() - self._answered
                # one missed beat may be our own process's, which stood still
                silent_twice = self._missed >= 2 and silent > patience / 2
                token = getattr(error, "cause", None) == "token"
                if self._refused >= _REFUSALS or silent_twice or token:
                    self._take_down(str(error) or repr(error))

    async def _beat(self, timeout_s: float) -> None:
        header, _ = await self._once("POST", f"/owners/{self.owner}/lease", b"", timeout_s)
        self.status = header
        if self.down:
            self.down = ""
            self._gone = asyncio.get_running_loop().create_future()

    def give_up(self, reason: str) -> None:
        """Stop using the host, for good."""
        if self._beating is not None:
            self._beating.cancel()
        self._take_down(reason)

    def _take_down(self, reason: str) -> None:
        self.down = self.down or reason
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    # -- calls -----------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        message: bytes = b"",
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> tuple[dict[str, Any], bytes]:
        """Ask the host; repeated where the connection fails, so the request must be repeatable.

        Returns:
            (header, body) of the answer.

        Raises:
            InfraError: cause ``UNREACHABLE``: it is down, or gave no answer in time.
            SkyrlError: what the host answered.
        """
        deadline = time.monotonic() + timeout_s
        give_up, pause = time.monotonic() + min(_RETRY_S, timeout_s), 0.05
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                return await self._or_down(self._once(method, path, message, left))
            except _NoAnswerError:
                if self.down or time.monotonic() + pause > give_up:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _or_down(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``, or raise as soon as the host is known to be down."""
        task = asyncio.ensure_future(work)
        gone = self._gone
        if self.down or gone is None:
            task.cancel()
            raise InfraError(f"sandbox host {self.url} is down: {self.down}", cause=UNREACHABLE)
        try:
            both: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if task.done():
            return task.result()
        raise InfraError(f"sandbox host {self.url} is down: {self.down}", cause=UNREACHABLE)

    async def _once(
        self, method: str, path: str, data: Any, timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        if self._session is None:
            raise InfraError(f"the client of sandbox host {self.url} is closed")
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(method, self.url + path, data=data) as answer:
                    body = await answer.read()
                    status = answer.status
        except TimeoutError as error:
            raise InfraError(
                f"sandbox host {self.url} gave no answer within {timeout_s:.0f} s",
                cause=UNREACHABLE,
            ) from error
        except aiohttp.ClientConnectorError as error:
            if error.os_error.errno in (errno.EMFILE, errno.ENFILE):
                raise CapacityError(
                    f"no connection to sandbox host {self.url}: {error.os_error.strerror} in this "
                    "process (ulimit -n); each command that runs needs one"
                ) from error
            self._refused += 1
            self._doubt.set()
            text = f"sandbox host {self.url}: nobody listens there ({error.os_error})"
            raise _NoAnswerError(text) from error
        except (aiohttp.ClientError, OSError) as error:
            self._doubt.set()
            text = f"sandbox host {self.url}: the connection was lost ({error!r})"
            raise _NoAnswerError(text) from error
        self._refused, self._answered = 0, time.monotonic()
        return self._answer(status, body)

    def _answer(self, status: int, body: bytes) -> tuple[dict[str, Any], bytes]:
        if status == 401:
            raise InfraError(
                f"sandbox host {self.url} refuses the token (401): {self._token_name} must hold "
                "the token that the host was started with",
                cause="token",
            )
        try:
            header, rest = host_wire.unpack(body)
        except SkyrlError as error:
            text = body[:200].decode("utf-8", "replace")
            raise InfraError(
                f"{self.url} answers {status} and is no sandbox host of ours: {text!r}"
            ) from error
        if "error" in header:
            raise host_wire.error_from_json(header["error"], self.url)
        return header, rest

    # -- layers ----------------------------------------------------------------------------------

    async def send_layer(self, digest: str, layer: Path) -> None:
        """Send a layer that the host lacks; one that is on its way is waited for."""
        upload = self._uploads.get(digest)
        if upload is None:
            upload = self._uploads[digest] = asyncio.create_task(self._upload(digest, layer))
            upload.add_done_callback(lambda _: self._uploads.pop(digest, None))
        await asyncio.shield(upload)

    async def _upload(self, digest: str, layer: Path) -> None:
        file = layer_file(layer)
        path = await asyncio.to_thread(file.__enter__)
        try:
            seconds = 60.0 + path.stat().st_size / _UPLOAD_RATE
            with open(path, "rb") as data:
                await self._or_down(self._once("PUT", f"/layers/{digest}", data, seconds))
        finally:
            await asyncio.to_thread(file.__exit__, None, None, None)


class _NoAnswerError(InfraError):
    """The connection failed before an answer: the request may be repeated."""

    cause = UNREACHABLE


class LayerDigests:
    """Digests of layer directories, each computed once: a layer in use must not change anyway."""

    def __init__(self, digest: Callable[[Path], str] = layer_digest) -> None:
        """Start with none."""
        self._digest = digest
        self._tasks: dict[tuple[str, int, int, int], asyncio.Task[str]] = {}

    async def of(self, layer: str) -> str:
        """Return the digest of a layer.

        Raises:
            ImageError: it is no directory, or cannot be read.
        """
        try:
            info = os.stat(layer)
            key = (layer, info.st_dev, info.st_ino, info.st_ctime_ns)
        except OSError:
            key = (layer, 0, 0, 0)  # the digest says what is wrong
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._digest, Path(layer)))
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._drop_failed(key, done))
        return await asyncio.shield(task)

    def _drop_failed(self, key: tuple[str, int, int, int], task: asyncio.Task[str]) -> None:
        if task.cancelled() or task.exception():
            self._tasks.pop(key, None)


def message_of(kind: str, fields: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Encode one operation."""
    return host_wire.pack({"kind": kind, **fields}, body)
