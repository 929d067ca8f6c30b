"""What the client does with answers that other servers could give (a scripted HTTP server)."""

import asyncio
import base64
import json

import numpy as np
import pytest
from aiohttp import web

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.core.types import LOGPROB_CEILING, SamplingParams
from skyrl_jax.generation import contract
from skyrl_jax.generation.sglang import SGLangGenerator

SEEN = web.AppKey("seen", list)
SAMPLING = SamplingParams(max_new_tokens=4, seed=1)


def answer(ids=(5, 6, 7), logprobs=(-0.1, -0.2, -0.3), **meta):
    made = {
        "finish_reason": {"type": "length", "length": len(ids)},
        "completion_tokens": len(ids),
        "output_token_logprobs": [[x, i, None] for x, i in zip(logprobs, ids, strict=False)],
        "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}],
    }
    made |= meta
    return {
        "output_ids": list(ids),
        "meta_info": {k: v for k, v in made.items() if v != "absent"},
    }


def parse(value, served=None, unversioned=None):
    return contract.completion(value, served, unversioned, "here")


def test_a_good_answer():
    done = parse(answer())
    assert done.token_ids == (5, 6, 7)
    assert done.logprobs == (-0.1, -0.2, -0.3)
    assert done.weight_versions == (3, 3, 3)


@pytest.mark.parametrize(
    "bad", [-9999.0, -1000.0, 2e-6, 0.5, float("nan"), float("-inf"), None, True, "x"]
)
def test_an_impossible_logprob_is_refused(bad):
    with pytest.raises(GenerationError, match="finite, <= 0, > -1000") as caught:
        parse(answer(logprobs=(-0.1, bad, -0.3)))
    assert caught.value.cause == "engine_contract"


def test_the_bounds_are_those_of_training():
    """Whatever a server's answer may hold can be trained, and nothing else (batching agrees)."""
    edge = (LOGPROB_CEILING, -999.9, -0.3)
    assert parse(answer(logprobs=edge)).logprobs == edge


def test_fewer_logprobs_than_ids_are_refused():
    with pytest.raises(GenerationError, match=r"output_ids \(3\) and the log-probs' ids \(2\)"):
        parse(answer(logprobs=(-0.1, -9999.0)))
    short = answer(logprobs=(-0.1, -0.2))
    del short["output_ids"]
    with pytest.raises(GenerationError, match="3 completion tokens but 2 log-probs"):
        parse(short)
    with pytest.raises(GenerationError, match="completion tokens"):
        parse(answer(completion_tokens=5))


def test_an_old_server_without_output_ids():
    old = answer()
    del old["output_ids"]
    assert parse(old).token_ids == (5, 6, 7)


def test_unknown_finish_is_refused():
    with pytest.raises(GenerationError, match="finish_reason is 'odd'"):
        parse(answer(finish_reason={"type": "odd"}))
    with pytest.raises(GenerationError, match="finish_reason is None"):
        parse(answer(finish_reason=None))


def test_abort_in_the_queue_has_no_tokens():
    queued = answer(
        ids=(),
        logprobs=(),
        finish_reason={"type": "abort", "message": "Abort in waiting queue"},
        weight_versions=[],
    )
    done = parse(queued)
    assert done.finish_reason == "abort"
    assert done.token_ids == ()


def test_spans_become_versions_per_token():
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    assert parse(answer(weight_versions=spans)).weight_versions == (3, 4, 4)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{"version": "3", "start": 0, "end": 2}],
        [{"version": "3", "start": 1, "end": 3}],
        [{"version": "3", "start": 0, "end": 4}],
        [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 1, "end": 3}],
    ],
)
def test_spans_that_do_not_tile_the_answer_are_refused(spans):
    with pytest.raises(GenerationError, match="do not cover 3 tokens"):
        parse(answer(weight_versions=spans))


def test_servers_without_spans():
    one = answer(weight_versions="absent", weight_version="6")
    assert parse(one).weight_versions == (6, 6, 6)
    assert parse(one, served="6").weight_versions == (6, 6, 6)
    with pytest.raises(GenerationError, match="changed during the call") as caught:
        parse(one, served="5")
    assert caught.value.cause == "engine_mixed_version"
    none = answer(weight_versions="absent")
    assert parse(none, served="5").weight_versions == (5, 5, 5)
    with pytest.raises(GenerationError, match="no number"):
        parse(none)
    assert parse(none, unversioned=0).weight_versions == (0, 0, 0)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"error": "a string"}', "a string"),
        (b'{"error": {"message": "an object"}}', "an object"),
        (b'{"detail": "a detail"}', "a detail"),
        (b'{"message": "plain"}', "plain"),
        (b"not json", "not json"),
        (b"[1]", "[1]"),
    ],
)
def test_every_error_shape_is_read(raw, text):
    assert contract.error_text(raw) == text


def serve(handler, action, **kwargs):
    """Run ``action(client)`` against a server whose every POST /generate is ``handler``."""

    async def inside():
        app = web.Application()
        app[SEEN] = []
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            async with (
                asyncio.timeout(30),
                SGLangGenerator(f"http://127.0.0.1:{port}", **kwargs) as client,
            ):
                outcome = await action(client)
        finally:
            await runner.cleanup()
        return outcome, app[SEEN]

    return asyncio.run(inside())


def generate(client):
    return client.generate((1, 2), SAMPLING, "task/0")


def test_the_body_says_everything():
    async def handler(request):
        request.app[SEEN].append((dict(request.headers), await request.json()))
        return web.json_response(answer())

    _, seen = serve(handler, generate)
    headers, body = seen[0]
    assert headers["X-SMG-Routing-Key"] == "task/0"
    assert len(body["rid"]) == 32
    assert body["return_logprob"] is True
    assert "logprob_start_len" not in body
    sampling = body["sampling_params"]
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (1.0, -1, 0.0)
    assert sampling["sampling_seed"] == 1
    assert sampling["ignore_eos"] is False


def routing_text(tokens, layers=2, each=3):
    numbers = np.arange(tokens * layers * each, dtype="<i4")
    return base64.b64encode(numbers.tobytes()).decode()


def test_router_replay_asks_for_the_routing_of_every_token_fed():
    """Two prompt tokens and three sampled ones: four were fed."""

    async def handler(request):
        request.app[SEEN].append(await request.json())
        return web.json_response(answer(routed_experts=routing_text(4)))

    done, (body,) = serve(handler, generate, routing=(2, 3))
    assert body["return_routed_experts"] is True
    np.testing.assert_array_equal(done.routed_experts, np.arange(24).reshape(4, 2, 3))
    assert done.routed_experts.dtype == np.int16
    plain, (body,) = serve(handler, generate)
    assert "return_routed_experts" not in body and plain.routed_experts is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("absent", "no routed_experts; start the server with --enable-return-routed-experts"),
        (routing_text(3), "72 bytes; 4 tokens, 2 layers and 3 experts a token make 96"),
        (routing_text(5), "120 bytes"),
        ("no base64!", "no base64"),
    ],
)
def test_routing_that_is_absent_or_of_other_tokens_is_refused(value, text):
    """Replay that was asked for and silently does nothing would look like replay (faults C15)."""

    async def handler(_):
        return web.json_response(answer(routed_experts=value))

    with pytest.raises(GenerationError, match=text) as caught:
        serve(handler, generate, routing=(2, 3))
    assert caught.value.cause == "engine_contract"


def test_http_errors_become_generation_errors():
    async def handler(request):
        return web.json_response({"detail": "The request queue is full."}, status=503)

    with pytest.raises(
        GenerationError, match=r"answered 503: The request queue is full\."
    ) as caught:
        serve(handler, generate)
    assert caught.value.cause == "engine_http_503"


def test_a_dropped_connection_is_tried_again_under_another_rid():
    async def handler(request):
        seen = request.app[SEEN]
        seen.append((await request.json())["rid"])
        if len(seen) == 1:
            request.transport.close()
        return web.json_response(answer())

    done, seen = serve(handler, generate)
    assert done.token_ids == (5, 6, 7)
    assert len(seen) == len(set(seen)) == 2


def test_a_dead_server_is_an_error_not_a_hang():
    async def dead():
        async with asyncio.timeout(20), SGLangGenerator("http://127.0.0.1:9") as client:
            assert not await client.health()
            await generate(client)

    with pytest.raises(GenerationError) as caught:
        asyncio.run(dead())
    assert caught.value.cause == "engine_unreachable"


def test_a_slow_call_ends_at_its_deadline_and_is_aborted():
    aborted = asyncio.Event()

    async def handler(request):
        body = await request.json()
        request.app[SEEN].append((request.path, body))
        if request.path == "/generate":
            await asyncio.sleep(30)
        aborted.set()
        return web.Response()

    async def action(client):
        with pytest.raises(GenerationError) as caught:
            await generate(client)
        assert caught.value.cause == "engine_timeout"
        async with asyncio.timeout(20.0):
            await aborted.wait()

    _, seen = serve(handler, action, timeout_s=1.0)
    (path, sent), (abort_path, abort) = seen
    assert (path, abort_path) == ("/generate", "/abort_request")
    assert abort == {"rid": sent["rid"]}


@pytest.mark.parametrize("raw", [b"nope", b"[]", b"{}"])
def test_answers_that_are_no_answers(raw):
    async def handler(request):
        return web.Response(body=raw)

    with pytest.raises(GenerationError, match="answered"):
        serve(handler, generate)


def test_old_endpoint_names_are_tried_on_404():
    async def handler(request):
        if request.path == "/get_model_info":
            return web.json_response({"weight_version": "5"})
        return web.Response(status=404)

    info, _ = serve(handler, lambda client: client.model_info())
    assert info == {"weight_version": "5"}


def test_flush_polls_until_the_server_is_idle():
    async def handler(request):
        request.app[SEEN].append(request.path)
        return web.Response(status=200 if len(request.app[SEEN]) == 3 else 400)

    _, seen = serve(handler, lambda client: client.flush(every_s=0.01))
    assert len(seen) == 3


def test_flush_gives_up():
    async def handler(request):
        return web.Response(status=400)

    with pytest.raises(GenerationError, match="stayed busy"):
        serve(handler, lambda client: client.flush(every_s=0.01), control_timeout_s=0.2)


@pytest.mark.parametrize("status", [200, 400])
def test_a_refused_update_is_an_error(status):
    async def handler(request):
        request.app[SEEN].append(json.loads(await request.text()))
        return web.json_response({"success": False, "message": "no room"}, status=status)

    with pytest.raises(GenerationError, match="no room"):
        serve(handler, lambda client: client.update_weights("/w", 3))


def test_use_outside_the_context_is_refused():
    client = SGLangGenerator("http://127.0.0.1:9", timeout_s=1)
    with pytest.raises(GenerationError, match="async with"):
        asyncio.run(generate(client))


def test_a_failure_without_words_is_named_by_its_type():
    """An exception is always true, and asyncio's TimeoutError says nothing."""

    async def handler(request):
        await asyncio.sleep(5)

    with pytest.raises(GenerationError, match=r"/model_info failed: \w*Timeout\w*$"):
        serve(handler, lambda client: client.model_info(), control_timeout_s=0.2)
