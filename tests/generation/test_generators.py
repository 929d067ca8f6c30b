"""One contract for the fake and the real generator (over the embedded server)."""

import asyncio

import pytest

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.core.types import Completion, SamplingParams
from skyrl_jax.generation.fake import FakeGenerator
from skyrl_jax.generation.sglang import SGLangGenerator
from tests.serve import running


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = running.save_model(folder / "m")
    with running.running(model, folder, "--weight_version=7") as (base, _):
        yield base


@pytest.fixture(params=["fake", "server"])
def make(request, url):
    def script(prompt, sampling, session):
        return [(sum(prompt) + (sampling.seed or 0) + i) % 90 + 2 for i in range(100)]

    def factory(**kwargs):
        if request.param == "fake":
            return FakeGenerator(script, version=7, **kwargs)
        return SGLangGenerator(url, **kwargs)

    return factory


def sampling(**changes):
    return SamplingParams(**({"max_new_tokens": 6, "seed": 11} | changes))


def use(generator, action):
    async def inside():
        async with asyncio.timeout(60), generator:
            return await action(generator)

    return asyncio.run(inside())


def test_a_completion_is_whole(make):
    done = use(make(), lambda g: g.generate((5, 6, 7), sampling(), "s"))
    assert len(done.token_ids) == len(done.logprobs) == 6
    assert done.weight_versions == (7,) * 6
    assert done.finish_reason == "length"
    assert all(x <= 0 for x in done.logprobs)


def test_same_seed_same_answer_and_prompt_may_be_a_list(make):
    async def twice(g):
        return await g.generate((5, 6), sampling(), "a"), await g.generate([5, 6], sampling(), "b")

    first, second = use(make(), twice)
    assert first == second
    other = use(make(), lambda g: g.generate((5, 6), sampling(seed=12), "a"))
    assert other.token_ids != first.token_ids


def test_stop_token_is_kept(make):
    free = use(make(), lambda g: g.generate((5, 6, 7), sampling(), "s"))
    stop = free.token_ids[2]
    stops = sampling(stop_token_ids=(stop,))
    done = use(make(), lambda g: g.generate((5, 6, 7), stops, "s"))
    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_an_empty_prompt_is_refused(make):
    with pytest.raises(GenerationError, match="input_ids must"):
        use(make(), lambda g: g.generate((), sampling(), "s"))


def test_many_at_once(make):
    async def many(g):
        return await asyncio.gather(
            *(g.generate((3 + i,), sampling(seed=i), f"s{i}") for i in range(40))
        )

    assert all(len(done.token_ids) == 6 for done in use(make(), many))


def test_the_gate_holds_calls_back(make):
    async def gated(g):
        call = asyncio.create_task(g.generate((5,), sampling(), "s"))
        await asyncio.sleep(0.2)
        assert not call.done()
        g.open_gate()
        first = await call
        g.close_gate()
        second = asyncio.create_task(g.generate((5,), sampling(), "s"))
        await asyncio.sleep(0.2)
        assert not second.done()
        g.open_gate()
        assert await second == first

    use(make(gate_open=False), gated)


def test_the_gate_has_a_deadline(make):
    with pytest.raises(GenerationError) as caught:
        use(
            make(gate_open=False, gate_timeout_s=0.05),
            lambda g: g.generate((5,), sampling(), "s"),
        )
    assert caught.value.cause == "engine_gate"


def test_fake_scripts_may_answer_whole_completions_and_raise():
    whole = Completion(
        token_ids=(4,), logprobs=(-0.5,), weight_versions=(3,), finish_reason="abort"
    )
    fake = FakeGenerator(lambda prompt, sampling, session: whole)
    assert use(fake, lambda g: g.generate((1, 2), sampling(), "s")) == whole
    assert fake.calls == [((1, 2), sampling(), "s")]

    def fail(prompt, sampling, session):
        raise GenerationError("scripted")

    with pytest.raises(GenerationError, match="scripted"):
        use(FakeGenerator(fail), lambda g: g.generate((1,), sampling(), "s"))


def test_control_calls_on_the_server(url):
    async def control(g):
        assert await g.health()
        assert (await g.model_info())["weight_version"] == "7"
        assert (await g.server_info())["max_context_length"] == 128
        jobs = [
            asyncio.create_task(g.generate((3 + i % 80,), sampling(max_new_tokens=120), "s"))
            for i in range(300)
        ]
        await asyncio.sleep(0.1)
        assert not all(job.done() for job in jobs)
        await g.pause()
        await g.flush()
        await g.resume()  # calls that arrived during the pause go on now
        done = await asyncio.gather(*jobs)
        await g.abort("0" * 32)
        await g.abort()
        return done

    done = use(SGLangGenerator(url), control)
    aborted = [one for one in done if one.finish_reason == "abort"]
    assert aborted
    assert all(set(one.weight_versions) <= {7} for one in done)


def test_prompt_logprobs_pass_a_closed_gate(url):
    logprobs = use(SGLangGenerator(url, gate_open=False), lambda g: g.prompt_logprobs((5, 6, 7)))
    assert len(logprobs) == 2
    assert all(x < 0 for x in logprobs)


def test_a_cancelled_call_is_aborted_on_the_server(url):
    async def pending(g):
        return (await g.server_info())["internal_states"][0]["pending"]

    async def cancel(g):
        """300 calls on 8 slots take a second; those cancelled leave the server at once."""
        jobs = [
            asyncio.create_task(g.generate((3 + i % 80,), sampling(max_new_tokens=120), "s"))
            for i in range(300)
        ]
        await asyncio.sleep(0.1)
        assert not jobs[-1].done()
        for job in jobs:
            job.cancel()
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(outcomes[-1], asyncio.CancelledError)
        while await pending(g):
            await asyncio.sleep(0.02)

    use(SGLangGenerator(url), cancel)
