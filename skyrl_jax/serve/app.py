"""SGLang's HTTP contract in front of one engine (docs/http.md names every shape).

Generation: /generate. Control: /abort_request, /pause_generation, /continue_generation,
/flush_cache, /update_weights_from_disk. Status: /health, /health_generate, /model_info,
/server_info (and their old names).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from aiohttp import web

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.errors import SkyrlError
from skyrl_jax.engine.engine import Engine, Request
from skyrl_jax.serve import requests, schema
from skyrl_jax.serve.worker import EngineDeadError, RequestFailedError, Worker

LoadWeights = Callable[[Path, ModelConfig], Any]
_MAX_BODY = 64 << 20
_PAUSE_DEADLINE_S = 60.0


class Server:
    """The handlers of one server; build an aiohttp application with ``application()``.

    Args:
        worker: the engine's thread.
        cfg: the served model's shape.
        limits: what /generate admits.
        model_path: the folder served first, as /model_info shows it ("" = none yet).
        load_weights: reads a HF folder and checks it against ``cfg``.
        info: what /server_info shows beside the state.
    """

    def __init__(
        self,
        worker: Worker,
        cfg: ModelConfig,
        limits: requests.Limits,
        *,
        model_path: str,
        version: str,
        load_weights: LoadWeights,
        info: dict[str, Any],
    ) -> None:
        self._worker = worker
        self._cfg = cfg
        self._limits = limits
        self._model_path = model_path
        self._version = version
        self._load_weights = load_weights
        self._info = info
        self._running = asyncio.Event()
        self._running.set()
        self._stopping = False
        self._rids: set[str] = set()  # of every request without an answer, held-back ones too
        self._updates = asyncio.Lock()

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors])
        app.on_shutdown.append(self._let_go)
        post, get = app.router.add_post, app.router.add_get
        post("/generate", self.generate)
        post("/abort_request", self.abort_request)
        post("/pause_generation", self.pause_generation)
        post("/continue_generation", self.continue_generation)
        post("/update_weights_from_disk", self.update_weights_from_disk)
        for name in ("/model_info", "/get_model_info"):
            get(name, self.model_info)
        for name in ("/server_info", "/get_server_info"):
            get(name, self.server_info)
        get("/health", self.health)
        get("/health_generate", self.health_generate)
        app.router.add_route("*", "/flush_cache", self.flush_cache)
        return app

    async def generate(self, request: web.Request) -> web.Response:
        """Sample; blocks while the server is paused."""
        body = await _body(request)
        wrong = schema.violation(body)
        if wrong is not None:
            return web.json_response({"error": wrong}, status=400)
        parsed = requests.parse(body, self._limits)
        start = time.monotonic()
        with self._reserved([item.rid for item in parsed.requests]):
            await self._until_running()
            answers = await asyncio.gather(
                *(
                    self._one(item, start, logprob=flag, echo_prompt=parsed.echo_prompt)
                    for item, flag in zip(parsed.requests, parsed.return_logprob, strict=True)
                )
            )
        return _json(answers if parsed.batch else answers[0])

    async def _one(
        self, item: Request, start: float, *, logprob: bool, echo_prompt: bool
    ) -> dict[str, Any]:
        result = await self._worker.generate(item)
        latency = time.monotonic() - start
        return requests.answer(
            result, self._version, latency, logprob=logprob, echo_prompt=echo_prompt
        )

    async def _until_running(self) -> None:
        # a server is paused for as long as its controller wants: no deadline but the client's
        await self._running.wait()
        if self._stopping:
            raise EngineDeadError("the server is being stopped")

    async def _let_go(self, app: web.Application) -> None:
        """Answer what a pause holds back, so that a stop has nothing to wait for."""
        del app
        self._stopping = True
        self._running.set()

    @contextlib.contextmanager
    def _reserved(self, rids: list[str]) -> Iterator[None]:
        """Hold the rids from the check on: two requests of one rid may arrive at the same time."""
        ours: set[str] = set()
        try:
            for rid in rids:
                if rid in self._rids or self._worker.live(rid):
                    raise requests.BadRequest(f"rid {rid!r} is already in use; rids must be unique")
                self._rids.add(rid)
                ours.add(rid)
            yield
        finally:
            self._rids -= ours

    async def abort_request(self, request: web.Request) -> web.Response:
        """End requests by rid prefix, or all; 200 whether or not one matched."""
        body = await _body(request)
        rid, everything = body.get("rid") or "", body.get("abort_all") or False
        if not isinstance(rid, str) or not isinstance(everything, bool):
            raise requests.BadRequest("abort_request takes a string rid and a boolean abort_all")
        if everything:
            self._worker.abort(lambda _: True)
        elif rid:
            self._worker.abort(lambda live: live.startswith(rid))
        return web.Response(status=200)

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Abort what runs and hold back new requests till /continue_generation."""
        mode = (await _body(request)).get("mode", "abort")
        if mode != "abort":
            raise requests.BadRequest(
                f"pause mode {mode!r} is not supported by this engine; use 'abort'"
            )
        self._running.clear()
        async with asyncio.timeout(_PAUSE_DEADLINE_S):
            while self._worker.pending:
                self._worker.abort(lambda _: True)
                await self._worker.when_idle(lambda _: None)
                await asyncio.sleep(0)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """Let held-back requests go on."""
        await _body(request)
        self._running.set()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Empty the cache; 400 while requests are queued or running."""
        if self._worker.pending:
            return web.Response(
                status=400,
                text=f"Cache not flushed: {self._worker.pending} requests are queued or running.",
            )
        await self._worker.when_idle(lambda engine: engine.flush())
        return web.Response(status=200, text="Cache flushed.")

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """Load a HF folder; on any failure the old weights stay and the answer is 400."""
        body = await _body(request)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not isinstance(version, str | None):
            raise requests.BadRequest(
                "update_weights_from_disk takes model_path (string) and weight_version (string)"
            )
        async with self._updates:
            if body.get("abort_all_requests"):
                self._worker.abort(lambda _: True)
            name = self._version if version is None else version

            def load(engine: Engine) -> None:
                engine.load(self._load_weights(Path(path), self._cfg), name)

            try:
                await self._worker.when_idle(load)
            except (SkyrlError, OSError, ValueError) as error:
                message = f"Failed to update weights: {error}. The old weights stay."
                failed = {"success": False, "message": message, "num_paused_requests": 0}
                return web.json_response(failed, status=400)
            self._version, self._model_path = name, path
        message = "Succeeded to update model weights."
        return _json({"success": True, "message": message, "num_paused_requests": 0})

    async def model_info(self, request: web.Request) -> web.Response:
        """Say which model and weight version is served."""
        del request
        return _json(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._version,
                "load_format": "safetensors",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "model_type": self._cfg.family,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        """Say how the server was started and what it is doing."""
        del request
        state = {
            "paused": not self._running.is_set(),
            "pending": self._worker.pending,
            "weight_version": self._version,
        }
        return _json(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_path,
                "tokenizer_path": self._model_path,
                "max_context_length": self._limits.max_context,
                "incremental_streaming_output": False,
                "disaggregation_mode": "null",
                "internal_states": [state],
                **self._info,
            }
        )

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while the engine's thread lives (no generation: a pause is not sickness)."""
        del request
        return web.Response(status=200 if self._worker.alive else 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        """Generate one token, or answer 503 after 20 s."""
        del request
        probe = requests.parse(
            {
                "input_ids": [0],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "sampling_seed": 0},
            },
            self._limits,
        ).requests[0]
        try:
            async with asyncio.timeout(20.0):
                await self._until_running()
                await self._worker.generate(probe)
        except (TimeoutError, RequestFailedError):
            return web.Response(status=503)
        return web.Response(status=200)


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn what is wrong with a body into SGLang's second error shape."""
    try:
        return await handler(request)
    except requests.BadRequest as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)
    except RequestFailedError as error:
        return web.json_response({"error": {"message": str(error)}}, status=500)
    except EngineDeadError as error:
        return web.json_response({"error": {"message": str(error)}}, status=503)


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    try:
        body = json.loads(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise requests.BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict) and request.path != "/generate":
        raise requests.BadRequest("the body must be a JSON object")
    return body


def _json(value: Any) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), content_type="application/json")


def server_version() -> str:
    """Name this server in /server_info."""
    return f"skyrl_jax (jax {jax.__version__})"
