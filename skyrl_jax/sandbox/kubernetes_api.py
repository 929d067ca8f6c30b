"""Calls to a Kubernetes API server: the official client for objects, websockets for channels."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import aiohttp

from skyrl_jax.core.errors import CapacityError, ConfigError, HostError, InfraError
from skyrl_jax.sandbox.channel import SupervisorChannel
from skyrl_jax.sandbox.kubernetes_pod import CONTAINER

T = TypeVar("T")
_PROTOCOL = "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_CALL_TIMEOUT_S = 30.0
_HANDSHAKE_S = 30.0
_CHUNK = 1 << 20  # of standard input; API servers refuse longer messages


class KubernetesApi:
    """One cluster.

    Args:
        context: of the kubeconfig; "" = the current one, or the pod's own service account.
        config_file: the kubeconfig; "" = KUBECONFIG, or the usual place.
        calls: at a time.
    """

    def __init__(self, context: str, config_file: str, calls: int = 16) -> None:
        """Read the credentials.

        Raises:
            ConfigError: the package is missing, or there are no credentials.
        """
        try:
            import kubernetes
        except ImportError:
            raise ConfigError(
                "sandbox.backend = 'kubernetes' needs the package: "
                "pip install 'skyrl_jax[kubernetes]'"
            ) from None
        try:
            file = config_file or None
            if context or file:
                kubernetes.config.load_kube_config(config_file=file, context=context or None)
            else:
                kubernetes.config.load_config()
        except (kubernetes.config.ConfigException, OSError) as error:
            raise ConfigError(f"no credentials of a Kubernetes cluster: {error}") from error
        self._errors = kubernetes.client.ApiException
        self._client = kubernetes.client.ApiClient()
        self.core = kubernetes.client.CoreV1Api(self._client)
        self.network = kubernetes.client.NetworkingV1Api(self._client)
        self._threads = ThreadPoolExecutor(max_workers=calls, thread_name_prefix="kubernetes")
        self._session: aiohttp.ClientSession | None = None

    @property
    def host(self) -> str:
        """The address of the API server."""
        return str(self._client.configuration.host)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._client.close)

    async def call(
        self, function: Callable[..., T], *args: Any, known: int = 0, **fields: Any
    ) -> T:
        """Call a method of the official client in a thread, with a deadline.

        Args:
            function: the method.
            *args: its arguments.
            known: a status that is fine; its answer is ``None``.
            **fields: more arguments.

        Raises:
            CapacityError: a quota is used up.
            InfraError: whatever else the server or the way to it said.
        """

        def work() -> Any:
            try:
                return function(*args, **fields, _request_timeout=_CALL_TIMEOUT_S)
            except self._errors as error:
                if error.status == known:
                    return None
                raise self._told(error) from None

        job = self._threads.submit(work)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S + 1.0):
                return await asyncio.wrap_future(job)
        except HostError:
            raise
        except TimeoutError:
            raise InfraError(f"kubernetes at {self.host}: no answer", cause="kubernetes") from None
        except Exception as error:  # urllib3's many
            raise InfraError(f"kubernetes at {self.host}: {error}", cause="kubernetes") from error

    def _told(self, error: Any) -> HostError:
        body = str(error.body or error.reason or "")[:500]
        text = f"kubernetes at {self.host}: {error.status}: {body}"
        if error.status == 403 and "quota" in body.lower():
            return CapacityError(text)
        return InfraError(text, cause="kubernetes")

    def plain(self, value: Any) -> Any:
        """Return an object of the client as plain values, in the API's own names."""
        return self._client.sanitize_for_serialization(value)

    async def attach(self, namespace: str, pod: str, channel: SupervisorChannel) -> WebsocketStream:
        """Connect a supervisor's channel with the standard streams of a pod's container.

        Raises:
            InfraError: the server refuses.
        """
        query = f"container={CONTAINER}&stdin=true&stdout=true&stderr=true&tty=false"
        url = f"{self.host}/api/v1/namespaces/{namespace}/pods/{pod}/attach?{query}"
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                socket = await self._session.ws_connect(
                    url,
                    protocols=(_PROTOCOL,),
                    headers=self._authorization(),
                    ssl=self._tls(),
                    max_msg_size=0,
                    heartbeat=30.0,
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InfraError(
                f"kubernetes at {self.host}: pod {pod} cannot be attached to: {error}",
                cause="kubernetes",
            ) from error
        return WebsocketStream(socket, channel)

    def _authorization(self) -> dict[str, str]:
        configuration = self._client.configuration
        value = configuration.get_api_key_with_prefix("authorization")
        value = value or configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": value} if value else {}

    def _tls(self) -> ssl.SSLContext | bool:
        configuration = self._client.configuration
        if not self.host.startswith("https://"):
            return True
        if not configuration.verify_ssl:
            return False
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        return context


class WebsocketStream(asyncio.WriteTransport):
    """The transport of a channel over an attached pod: one byte of stream number before the data.

    Args:
        socket: connected.
        channel: gets standard output; standard error becomes its last words.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, channel: SupervisorChannel) -> None:
        """Start reading and writing."""
        super().__init__()
        self._socket = socket
        self._channel = channel
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._closing = False
        channel.connection_made(self)
        self._tasks = {asyncio.create_task(self._read()), asyncio.create_task(self._write())}

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                data = message.data if isinstance(message.data, bytes) else b""
                if data[:1] == bytes([_STDOUT]):
                    self._channel.data_received(data[1:])
                elif data[:1] in (bytes([_STDERR]), bytes([_STATUS])):
                    self._channel.last_words += data[1:].decode("utf-8", "replace")
        finally:
            self._channel.connection_lost(None)
            self._queue.put_nowait(None)

    async def _write(self) -> None:
        try:
            while (data := await self._queue.get()) is not None:
                for at in range(0, len(data), _CHUNK):
                    await self._socket.send_bytes(bytes([_STDIN]) + data[at : at + _CHUNK])
        except (ConnectionError, aiohttp.ClientError):
            pass  # the reader tells
        finally:
            await self._socket.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes to the supervisor."""
        self._queue.put_nowait(bytes(data))

    def write_eof(self) -> None:
        """End the connection once everything is sent: standard input ends with it."""
        self.close()

    def close(self) -> None:
        """As ``write_eof``."""
        self._closing = True
        self._queue.put_nowait(None)

    def abort(self) -> None:
        """Close without waiting for what is queued."""
        self._closing = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    def is_closing(self) -> bool:
        """Return whether nothing is taken any more."""
        return self._closing

    async def wait_closed(self) -> None:
        """Return when both tasks have ended."""
        await asyncio.wait(self._tasks, timeout=_HANDSHAKE_S)
