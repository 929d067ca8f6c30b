"""The client of a generation server that speaks SGLang's HTTP contract (docs/http.md).

One client talks to one server: a GPU-hosted SGLang or the embedded engine. Tokens in, tokens out;
every answer is checked before anybody trains on it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from collections.abc import Sequence
from typing import Any

import aiohttp

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.core.types import Completion, SamplingParams
from skyrl_jax.generation import contract

_ATTEMPTS = 3
_BACKOFF_S = 0.2


class SGLangGenerator:
    """A Generator over HTTP, and the server's control calls; an async context manager.

    Args:
        base_url: e.g. ``http://127.0.0.1:30000``.
        timeout_s: deadline of one /generate call.
        control_timeout_s: deadline of one control call.
        gate_timeout_s: how long ``generate`` may wait for the gate.
        gate_open: False keeps every call waiting until ``open_gate`` (no rollout before the first
            weight version is acknowledged).
        unversioned: weight version of tokens from a server that names none ("default");
            ``None`` refuses such a server.
        api_key: bearer token ("" = none).
        routing: (layers, experts per token): every completion brings the experts of all its
            tokens, the prompt's too; ``None`` = do not ask. 4 bytes each: of Qwen3-30B-A3B 1.5 KB
            a token and call.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 120.0,
        control_timeout_s: float = 60.0,
        gate_timeout_s: float = 600.0,
        gate_open: bool = True,
        unversioned: int | None = None,
        api_key: str = "",
        routing: tuple[int, int] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._control_timeout_s = control_timeout_s
        self._gate_timeout_s = gate_timeout_s
        self._unversioned = unversioned
        self._routing = routing
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._gate = asyncio.Event()
        if gate_open:
            self._gate.set()
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        # weight_version as last read from the server: for answers that do not name one
        self._served: str | None = None

    async def __aenter__(self) -> SGLangGenerator:
        """Open the one connection pool."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._control_timeout_s),
            json_serialize=json.dumps,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Send the aborts still under way, then close the pool."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2.0)
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- generation ------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Sample a completion; waits while the gate is closed.

        Raises:
            GenerationError: refused, dead, too slow, or an answer that breaks the contract.
        """
        await self._pass_gate()
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": contract.sampling_fields(sampling),
            "return_logprob": True,
            "stream": False,
        }
        if self._routing is not None:
            body["return_routed_experts"] = True
        served = self._served
        answer = await self._generate(body, session)
        done = contract.completion(answer, served, self._unversioned, self.base_url)
        contract.check_forced(done, sampling.forced_ids, self.base_url)
        if self._routing is None or not done.token_ids:
            return done
        shape = (len(prompt_ids) + len(done.token_ids) - 1, *self._routing)
        routed = contract.routed_experts(answer["meta_info"], shape, self.base_url)
        return dataclasses.replace(done, routed_experts=routed)

    async def prompt_logprobs(self, prompt_ids: Sequence[int]) -> tuple[float, ...]:
        """Return log-probs (nats, temperature 1) of prompt_ids[1:]; ignores the gate.

        The weight probe uses it; rollouts never ask for prompt log-probs.
        """
        sampling = SamplingParams(temperature=1.0, max_new_tokens=1, seed=0)
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": {**contract.sampling_fields(sampling), "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        }
        answer = await self._generate(body, "probe")
        entries = answer.get("meta_info", {}).get("input_token_logprobs") or []
        if [entry[1] for entry in entries] != list(prompt_ids):
            raise GenerationError(
                f"{self.base_url}: {len(entries)} prompt log-probs for {len(prompt_ids)} tokens"
            )
        return tuple(float(entry[0]) for entry in entries[1:])

    async def _generate(self, body: dict[str, Any], session: str) -> dict[str, Any]:
        """POST /generate; a call whose connection was refused or dropped unanswered is repeated.

        Repeating is safe: the seed fixes the draw, and each try has its own rid, so the abort of a
        dropped try cannot hit its successor.
        """
        for attempt in range(_ATTEMPTS):
            rid = uuid.uuid4().hex  # fixed length: abort_request matches by prefix
            try:
                answer = await self._post_generate({**body, "rid": rid}, session)
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError) as error:
                if attempt + 1 == _ATTEMPTS:
                    raise GenerationError(
                        f"{self.base_url} is unreachable: {error}", cause="engine_unreachable"
                    ) from error
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
            except TimeoutError:
                self._abort_later(rid)
                raise GenerationError(
                    f"{self.base_url}/generate took longer than {self._timeout_s:g} s",
                    cause="engine_timeout",
                ) from None
            except aiohttp.ClientError as error:
                self._abort_later(rid)
                raise GenerationError(f"{self.base_url}/generate broke off: {error}") from error
            except asyncio.CancelledError:
                self._abort_later(rid)
                raise
            else:
                return answer
        raise AssertionError("unreachable")

    async def _post_generate(self, body: dict[str, Any], session: str) -> dict[str, Any]:
        headers = {"X-SMG-Routing-Key": session} if session else {}
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with self._open.post(
            f"{self.base_url}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
            timeout=timeout,
        ) as response:
            raw = await response.read()
            if response.status != 200:
                text = contract.error_text(raw)
                raise GenerationError(
                    f"{self.base_url}/generate answered {response.status}: {text}",
                    cause=f"engine_http_{response.status}",
                )
        answer = contract.parsed(raw, f"{self.base_url}/generate")
        if not isinstance(answer.get("meta_info"), dict):
            raise GenerationError(f"{self.base_url}/generate answered without meta_info")
        return answer

    # -- the gate --------------------------------------------------------------------------------

    def close_gate(self) -> None:
        """Keep new ``generate`` calls waiting on our side."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Let ``generate`` calls through."""
        self._gate.set()

    @property
    def gate_is_open(self) -> bool:
        """Whether ``generate`` calls go through."""
        return self._gate.is_set()

    async def _pass_gate(self) -> None:
        if self._gate.is_set():
            return
        try:
            async with asyncio.timeout(self._gate_timeout_s):
                await self._gate.wait()
        except TimeoutError:
            raise GenerationError(
                f"{self.base_url}: no weights were acknowledged for {self._gate_timeout_s:g} s",
                cause="engine_gate",
            ) from None

    # -- control ---------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Abort what runs and hold back new requests (mode "abort")."""
        await self._call("POST", "/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        """Undo ``pause`` (/continue_generation)."""
        await self._call("POST", "/continue_generation", {})

    async def flush(self, *, every_s: float = 0.2) -> None:
        """Poll /flush_cache until it answers 200 (400 right after the last answer is normal)."""
        try:
            async with asyncio.timeout(self._control_timeout_s):
                while True:
                    status, raw = await self._raw("POST", "/flush_cache", None)
                    if status == 200:
                        return
                    if status != 400:
                        raise self._refused("/flush_cache", status, raw)
                    await asyncio.sleep(every_s)
        except TimeoutError:
            raise GenerationError(
                f"{self.base_url}/flush_cache stayed busy for {self._control_timeout_s:g} s"
            ) from None

    async def update_weights(self, folder: str, version: int) -> None:
        """Load a HF folder under the name of ``version``.

        Raises:
            GenerationError: refused, or the connection broke. A broken connection is never
                "updated": the server may be dead and must be checked by ``model_info``.
        """
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": False}
        answer = await self._call("POST", "/update_weights_from_disk", body)
        if answer.get("success") is not True:
            raise GenerationError(
                f"{self.base_url} did not take {folder}: {answer.get('message')}",
                cause="engine_update",
            )

    async def model_info(self) -> dict[str, Any]:
        """Return /model_info (or its old name)."""
        info = await self._get("/model_info", "/get_model_info")
        self._served = info.get("weight_version")
        return info

    async def server_info(self) -> dict[str, Any]:
        """Return /server_info (or its old name)."""
        return await self._get("/server_info", "/get_server_info")

    async def health(self) -> bool:
        """Whether the server says it is up."""
        try:
            status, _ = await self._raw("GET", "/health", None)
        except GenerationError:
            return False
        return status == 200

    async def abort(self, rid: str = "") -> None:
        """Abort the requests whose rid begins with ``rid``; all of them when it is empty."""
        body: dict[str, Any] = {"rid": rid} if rid else {"abort_all": True}
        status, raw = await self._raw("POST", "/abort_request", body)
        if status != 200:
            raise self._refused("/abort_request", status, raw)

    def _abort_later(self, rid: str) -> None:
        """Tell the server that nobody waits for ``rid`` any more, without waiting for it."""
        task = asyncio.get_running_loop().create_task(self._abort_quietly(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            async with asyncio.timeout(2.0):
                await self.abort(rid)
        except (GenerationError, TimeoutError):
            return  # the server is gone: there is nothing to abort

    async def _get(self, path: str, old_path: str) -> dict[str, Any]:
        status, raw = await self._raw("GET", path, None)
        if status == 404:
            path = old_path
            status, raw = await self._raw("GET", path, None)
        if status != 200:
            raise self._refused(path, status, raw)
        return contract.parsed(raw, self.base_url + path)

    async def _call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, raw = await self._raw(method, path, body)
        if status != 200:
            raise self._refused(path, status, raw)
        return contract.parsed(raw, self.base_url + path)

    async def _raw(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        url = self.base_url + path
        try:
            async with self._open.request(method, url, json=body) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GenerationError(
                f"{method} {url} failed: {str(error) or type(error).__name__}",
                cause="engine_unreachable",
            ) from error

    def _refused(self, path: str, status: int, raw: bytes) -> GenerationError:
        return GenerationError(
            f"{self.base_url}{path} answered {status}: {contract.error_text(raw)}"
        )

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise GenerationError("the client is closed; use it inside 'async with'")
        return self._session
