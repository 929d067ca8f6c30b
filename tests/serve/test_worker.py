"""One bad request fails alone; a dead engine is said at once (a scripted engine, no model)."""

import asyncio
import contextlib
import os
import socket
import time

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from skyrl_jax.engine.engine import Request, Result
from skyrl_jax.serve import process
from skyrl_jax.serve.app import Server
from skyrl_jax.serve.process import ServeOptions
from skyrl_jax.serve.requests import Limits
from skyrl_jax.serve.worker import EngineDeadError, RequestFailedError, Worker
from tests.engine import tiny

LIMITS = Limits(vocab_size=96, max_context=128, eos_ids=())


class ScriptedEngine:
    """Ends every request a few rounds after it came; refuses the token 90, dies of the token 91."""

    def __init__(self):
        self.running = []
        self.version, self.loaded, self.free_slots = "1", True, 8
        self.round_s = 0.0

    @property
    def active(self):
        return len(self.running)

    def admit(self, request):
        if request.prompt[0] == 90:
            raise OverflowError("no such number")
        self.running.append(request)

    def abort(self, match):
        hit = [request for request in self.running if match(request.rid)]
        self.running = [request for request in self.running if not match(request.rid)]
        return [self._end(request, "abort") for request in hit]

    def step(self):
        time.sleep(self.round_s)
        if any(request.prompt[0] == 91 for request in self.running):
            raise RuntimeError("out of memory")
        ended, self.running = self.running, []
        return [self._end(request, "length") for request in ended]

    def flush(self):
        """There is no cache."""

    def _end(self, request, finish):
        return Result(request=request, token_ids=(5,), logprobs=(-1.0,), finish=finish, version="1")


def request(rid, token=3):
    prompt = np.asarray([token], np.int32)
    return Request(rid=rid, prompt=prompt, max_new_tokens=1, temperature=1.0, seed=0)


def with_worker(action, engine=None):
    async def inside():
        deaths = []
        async with asyncio.timeout(20), Worker(engine or ScriptedEngine(), deaths.append) as worker:
            return await action(worker), deaths

    return asyncio.run(inside())


def server(worker):
    return Server(
        worker, tiny.CFG, LIMITS, model_path="m", version="1", load_weights=lambda *_: None, info={}
    )


@contextlib.asynccontextmanager
async def served(worker):
    runner = web.AppRunner(server(worker).application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        async with aiohttp.ClientSession(base, timeout=aiohttp.ClientTimeout(total=10)) as session:
            yield session
    finally:
        await runner.cleanup()


def body(rid=None, token=3):
    sampling = {"max_new_tokens": 1, "sampling_seed": 0}
    return {"input_ids": [token], "sampling_params": sampling} | ({"rid": rid} if rid else {})


def test_a_request_the_engine_cannot_take_fails_alone():
    async def action(worker):
        outcomes = await asyncio.gather(
            *(worker.generate(request(f"r{i}", token)) for i, token in enumerate((3, 90, 4))),
            return_exceptions=True,
        )
        assert worker.alive
        return outcomes, await worker.generate(request("later"))

    ((first, refused, last), later), deaths = with_worker(action)
    assert isinstance(refused, RequestFailedError)
    assert "'r1': OverflowError('no such number')" in str(refused)
    assert [first.finish, last.finish, later.finish] == ["length"] * 3
    assert deaths == []


def test_over_http_such_a_request_is_an_answer_and_the_next_one_works():
    async def action(worker):
        async with served(worker) as session:
            async with session.post("/generate", json=body(token=90)) as bad:
                assert bad.status == 500
                assert "could not take request" in (await bad.json())["error"]["message"]
            async with session.post("/generate", json=body()) as good:
                return good.status

    assert with_worker(action)[0] == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_is_said_to_all_who_wait_and_all_who_come():
    async def action(worker):
        async with served(worker) as session:
            async with session.get("/health") as response:
                assert response.status == 200
            waiting = [
                asyncio.create_task(worker.generate(request("fatal", 91))),
                asyncio.create_task(worker.when_idle(lambda _: None)),
            ]
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            with pytest.raises(EngineDeadError, match="out of memory"):
                await worker.generate(request("late"))
            with pytest.raises(EngineDeadError, match="out of memory"):
                await worker.when_idle(lambda _: None)
            async with session.get("/health") as response:
                assert response.status == 503
            async with session.post("/generate", json=body()) as response:
                assert response.status == 503
                assert "the engine died" in (await response.json())["error"]["message"]
        return outcomes

    outcomes, deaths = with_worker(action)
    assert isinstance(outcomes[0], EngineDeadError)
    assert len(deaths) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_ends_the_server_with_its_cause(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(process, "_build", lambda *_: (ScriptedEngine(), server))
    options = ServeOptions(model="m", port_file=str(tmp_path / "port"))

    async def action():
        listener = process._listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/generate"
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:
            serving = asyncio.create_task(process._serve(options, listener, os.getppid()))
            while not (tmp_path / "port").exists():
                await asyncio.sleep(0.01)
            async with session.post(url, json=body(token=91)) as response:
                assert response.status == 503
            return await serving

    assert asyncio.run(action()) == 1
    assert "error: the engine died: RuntimeError('out of memory')" in capfd.readouterr().err


def test_of_two_requests_with_one_rid_the_second_is_refused_running_or_held_back():
    """They arrive together: neither is known to the engine's thread when the other is checked."""

    async def both(session):
        async def one():
            async with session.post("/generate", json=body("same")) as response:
                return response.status, await response.json()

        return await asyncio.gather(one(), one())

    async def action(worker):
        async with served(worker) as session:
            together = await both(session)
            async with session.post("/pause_generation", json={}):
                pass
            held = asyncio.create_task(both(session))
            await asyncio.sleep(0.2)
            async with session.post("/continue_generation", json={}):
                pass
            answers = await held
            async with session.post("/generate", json=body("same")) as after:
                return together, answers, after.status

    engine = ScriptedEngine()
    engine.round_s = 0.05
    (together, held, after), _ = with_worker(action, engine)
    for answers in (together, held):
        assert sorted(status for status, _ in answers) == [200, 400]
        (refused,) = (answer for status, answer in answers if status == 400)
        assert "'same' is already in use" in refused["error"]["message"]
    assert after == 200, "a rid is free again after its answer"


def test_an_answer_goes_to_its_own_request_when_the_rid_is_used_again():
    async def action(worker):
        first = asyncio.create_task(worker.generate(request("same")))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = request("same")
        assert (await worker.generate(second)).request is second

    engine = ScriptedEngine()
    engine.round_s = 0.05
    with_worker(action, engine)


def test_stopping_while_requests_are_held_back_takes_no_deadline(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_build", lambda *_: (ScriptedEngine(), server))
    options = ServeOptions(model="m", port_file=str(tmp_path / "port"))

    async def action():
        listener: socket.socket = process._listen("127.0.0.1", 0)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.timeout(20), aiohttp.ClientSession(base) as session:
            serving = asyncio.create_task(process._serve(options, listener, os.getppid()))
            while not (tmp_path / "port").exists():
                await asyncio.sleep(0.01)
            async with session.post("/pause_generation", json={}) as response:
                assert response.status == 200
            held = [asyncio.create_task(session.post("/generate", json=body())) for _ in range(3)]
            await asyncio.sleep(0.3)
            began = time.monotonic()
            os.kill(os.getpid(), process.signal.SIGTERM)
            code = await serving
            took = time.monotonic() - began
            assert [response.status for response in await asyncio.gather(*held)] == [503] * 3
            return code, took

    code, took = asyncio.run(action())
    assert code == 0
    assert took < 0.9, "nothing waits for the deadline of what runs"


def test_stopping_cancels_what_runs_after_a_second(monkeypatch, tmp_path):
    engine = ScriptedEngine()
    engine.loaded = False  # nothing is ever admitted
    monkeypatch.setattr(process, "_build", lambda *_: (engine, server))
    options = ServeOptions(model="m", port_file=str(tmp_path / "port"))

    async def action():
        listener = process._listen("127.0.0.1", 0)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.timeout(20), aiohttp.ClientSession(base) as session:
            serving = asyncio.create_task(process._serve(options, listener, os.getppid()))
            while not (tmp_path / "port").exists():
                await asyncio.sleep(0.01)
            running = asyncio.create_task(session.post("/generate", json=body()))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            os.kill(os.getpid(), process.signal.SIGTERM)
            code = await serving
            took = time.monotonic() - began
            (outcome,) = await asyncio.gather(running, return_exceptions=True)
            assert isinstance(outcome, aiohttp.ClientError)
            return code, took

    code, took = asyncio.run(action())
    assert code == 0
    assert took < 4.0
