"""A session by itself: what is asked of the generator, what is recorded, what is refused."""

import asyncio
import gc
import math
import weakref

import pytest

from skyrl_jax.core.errors import ConfigError, DataError, GenerationError
from skyrl_jax.core.types import Completion, Message
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.gateway.calls import ChatRequest
from skyrl_jax.gateway.front import Limits
from skyrl_jax.gateway.parts import Repeat
from skyrl_jax.gateway.refusals import Cause, Refused
from tests.gateway import world
from tests.gateway.world import END, SAMPLING, Slow, call, completion, gateway, says, spoken


def ask(*messages, **fields):
    made = tuple(Message(role="user", content=m) if isinstance(m, str) else m for m in messages)
    return ChatRequest(messages=made, model="policy", **fields)


def after(answer, *more):
    return (answer.message, *more)


def play(action, generator, *, sampling=SAMPLING, budget=None, training=True, **kwargs):
    """Run ``action(session)``; return what it returned and the record."""

    async def inside():
        async with asyncio.timeout(30), gateway(generator, **kwargs) as gate:
            session = await gate.open("task/0", sampling=sampling, budget=budget, training=training)
            outcome = await action(session)
            return outcome, await session.close()

    return asyncio.run(inside())


def test_two_turns_continue_by_ids_and_are_recorded_as_sampled():
    first = completion("a" + call(command="ls"))
    generator = says(first, "done")

    async def action(session):
        one = await session.serve(ask("hi"))
        tool = Message(role="tool", content="out", tool_call_id=one.message.tool_calls[0].id)
        return one, await session.serve(ask("hi", *after(one, tool)))

    (one, two), recorded = play(action, generator)
    assert one.message.content == "a"
    assert one.message.tool_calls[0].id.startswith("call_")
    prompts = [prompt for prompt, _, _ in generator.calls]
    assert prompts[1][: len(prompts[0]) + len(first.token_ids)] == (*prompts[0], *first.token_ids)
    assert [turn.prompt_ids for turn in recorded.turns] == prompts
    assert recorded.turns[0].completion == first
    assert recorded.for_training() == recorded.turns
    assert recorded.messages[-1] == two.message
    assert len(recorded.messages) == 4
    assert two.prompt_tokens == len(prompts[1])


def test_sampling_parameters_are_the_sessions():
    generator = says("a", "b")

    async def action(session):
        await session.serve(ask("x", asked={"temperature": 0.1, "stop": ["y"]}, max_tokens=4))
        await session.serve(ask("y", asked={"temperature": 1.0}))

    _, recorded = play(action, generator)
    one, two = (sampling for _, sampling, _ in generator.calls)
    assert (one.temperature, one.stop_token_ids, one.max_new_tokens) == (1.0, (END,), 4)
    assert two.max_new_tokens == SAMPLING.max_new_tokens
    assert generator.calls[0][2] == "task/0"
    assert recorded.asked == {"temperature": (0.1,), "stop": (["y"],)}
    assert recorded.counts["ignored_temperature"] == 1


def test_seeds_depend_on_what_is_asked_and_not_on_the_order():
    def seeds(*questions):
        generator = says(*questions)

        async def action(session):
            for question in questions:
                await session.serve(ask(question))

        play(action, generator)
        return {len(prompt): sampling.seed for prompt, sampling, _ in generator.calls}

    forward, backward = seeds("a", "bb"), seeds("bb", "a")
    assert forward == backward
    assert len(set(forward.values())) == 2


def test_an_equal_request_is_one_call_while_it_runs_and_afterwards():
    generator = Slow("ok")

    async def action(session):
        waiting = [asyncio.ensure_future(session.serve(ask("x"))) for _ in range(3)]
        await generator.begun.wait()
        generator.go.set()
        answers = await asyncio.gather(*waiting)
        return [*answers, await session.serve(ask("x"))]

    answers, recorded = play(action, generator, budget=Budget(turns=1))
    assert {answer.ident for answer in answers} == {answers[0].ident}
    assert generator.started == 1
    assert len(recorded.turns) == 1
    assert (recorded.counts["joined"], recorded.counts["replayed"]) == (2, 1)


def test_different_histories_run_at_the_same_time():
    generator = Slow("ok")

    async def action(session):
        waiting = [asyncio.ensure_future(session.serve(ask(name))) for name in "abc"]
        while generator.started < 3:
            await asyncio.sleep(0)
        generator.go.set()
        return await asyncio.gather(*waiting)

    answers, recorded = play(action, generator)
    assert len({answer.ident for answer in answers}) == len(recorded.turns) == 3


def test_who_went_on_and_comes_back_gets_a_new_sample():
    generator = says("one", "two", "three")

    async def action(session):
        one = await session.serve(ask("x"))
        await session.serve(ask("x", *after(one, Message(role="user", content="go"))))
        return one, await session.serve(ask("x"))

    (one, again), recorded = play(action, generator)
    assert (one.message.content, again.message.content) == ("one", "three")
    assert generator.calls[0][1].seed != generator.calls[2][1].seed
    assert len(recorded.turns) == 3


def test_an_agent_that_only_repeats_itself_gets_a_new_sample_at_last():
    generator = says("one", "two")
    limits = Limits(max_replays=2)

    async def action(session):
        return [(await session.serve(ask("x"))).message.content for _ in range(4)]

    said, recorded = play(action, generator, limits=limits)
    assert said == ["one", "one", "one", "two"]
    assert recorded.counts["resampled"] == 1


def test_an_idempotency_key_names_one_answer():
    generator = says("one", "two")

    async def action(session):
        same = Repeat(key="k1", digest=b"1")
        one = await session.serve(ask("x"), same)
        await session.serve(ask("x", *after(one, Message(role="user", content="go"))))
        again = await session.serve(ask("x"), same)  # a late retry, though it was continued
        with pytest.raises(Refused, match="used for another body") as caught:
            await session.serve(ask("y"), Repeat(key="k1", digest=b"2"))
        return one, again, caught.value.status

    (one, again, status), _ = play(action, generator)
    assert one.ident == again.ident
    assert status == 400


def test_the_last_who_leaves_ends_the_generation():
    generator = Slow()

    async def action(session):
        first, second = (asyncio.ensure_future(session.serve(ask("x"))) for _ in range(2))
        await generator.begun.wait()
        first.cancel()
        await asyncio.wait({first})
        assert generator.cancelled == 0
        second.cancel()
        retried = asyncio.ensure_future(session.serve(ask("x")))  # before the abort went through
        await asyncio.wait({second})
        generator.go.set()
        return await retried

    answer, recorded = play(action, generator, budget=Budget(turns=1))
    assert answer.message.content == "ok"
    assert (generator.started, generator.cancelled) == (2, 1)
    assert len(recorded.turns) == 1
    assert recorded.fault is None


def refusal_of(coroutine):
    async def inside():
        with pytest.raises(Refused) as caught:
            await coroutine
        return caught.value

    return inside()


def test_a_budget_of_turns():
    async def action(session):
        await session.serve(ask("a"))
        await session.serve(ask("b"))
        await session.serve(ask("b"))  # a replay is no turn
        return await refusal_of(session.serve(ask("c")))

    refused, recorded = play(action, says("1", "2"), budget=Budget(turns=2))
    assert refused.cause is Cause.BUDGET
    assert "2 turns" in refused.message
    assert recorded.limit == "turns"
    assert recorded.counts["refused_turns"] == 1


def test_a_call_under_way_may_become_a_turn():
    generator = Slow()

    async def action(session):
        first = asyncio.ensure_future(session.serve(ask("a")))
        await generator.begun.wait()
        refused = await refusal_of(session.serve(ask("b")))
        generator.go.set()
        await first
        return refused

    refused, recorded = play(action, generator, budget=Budget(turns=1))
    assert refused.cause is Cause.BUDGET
    assert len(recorded.turns) == 1


def test_a_budget_of_tokens_cuts_and_then_refuses():
    generator = says("abc", "x" * 50)

    async def action(session):
        await session.serve(ask("a"))
        cut = await session.serve(ask("b"))
        return cut, await refusal_of(session.serve(ask("c")))

    (cut, refused), recorded = play(action, generator, budget=Budget(tokens=10))
    assert len(cut.completion.token_ids) == 6
    assert cut.cut
    assert refused.cause is Cause.BUDGET
    assert recorded.limit == "tokens"


def test_a_context_is_never_overrun():
    generator = says("ok")

    async def action(session):
        await session.serve(ask("x"))
        prompt = len(generator.calls[0][0])
        refused = await refusal_of(session.serve(ask("y" * 200)))
        return prompt, refused

    (prompt, refused), recorded = play(action, generator, budget=Budget(context=100))
    assert generator.calls[0][1].max_new_tokens == 100 - prompt
    assert refused.cause is Cause.CONTEXT
    assert refused.tokens == (prompt + 199, 100)
    assert recorded.limit == "context"


def test_a_refusal_that_the_agent_survives_is_no_limit():
    async def action(session):
        await refusal_of(session.serve(ask("y" * 200)))
        await session.serve(ask("short"))

    _, recorded = play(action, says("ok"), budget=Budget(context=100))
    assert recorded.limit == ""


def test_a_host_fault_is_remembered():
    broken = GenerationError("gone", cause="engine_unreachable")

    async def action(session):
        refused = await refusal_of(session.serve(ask("x")))
        await session.serve(ask("x", Message(role="user", content="and now?")))
        return refused

    refused, recorded = play(action, says(broken, "ok"), budget=Budget(turns=1))
    assert (refused.status, refused.cause) == (503, Cause.FAULT)
    assert "gone" not in refused.message  # addresses of the host are not the agent's business
    assert recorded.fault is broken
    with pytest.raises(GenerationError, match="gone"):
        recorded.for_training()


def test_a_retry_heals_a_fault():
    async def action(session):
        await refusal_of(session.serve(ask("x")))
        return await session.serve(ask("x"))

    answer, recorded = play(action, says(GenerationError("gone"), "ok"), budget=Budget(turns=1))
    assert answer.message.content == "ok"
    assert recorded.fault is None
    assert recorded.counts["faults"] == 1


def test_a_generation_that_takes_too_long_is_a_host_fault():
    generator = Slow()
    refused, recorded = play(
        lambda session: refusal_of(session.serve(ask("x"))),
        generator,
        limits=Limits(call_s=0.05),
    )
    assert refused.status == 503
    assert recorded.fault.cause == "engine_timeout"
    assert generator.cancelled == 1


def test_an_aborted_answer_is_a_fault_and_its_tokens_are_on_record():
    part = completion("", "abort", spoken("par")[:-1])
    none = completion("", "abort", ())

    async def action(session):
        await refusal_of(session.serve(ask("x")))
        await refusal_of(session.serve(ask("x")))
        return await session.serve(ask("x"))

    answer, recorded = play(action, says(none, part, "whole"))
    assert answer.message.content == "whole"
    assert [turn.completion.finish_reason for turn in recorded.turns] == ["abort", "stop"]
    assert recorded.fault is None
    assert recorded.counts["aborted"] >= 1


def test_our_own_error_fails_the_episode(caplog):
    class Broken(world.ByteRenderer):
        def parse(self, token_ids, finish_reason):
            raise RuntimeError("a bug")

    async def inside():
        gate = world.Gateway(
            generator=says("ok"),
            renderer_for=Broken,
        )
        async with asyncio.timeout(30), gate:
            session = await gate.open("s", sampling=SAMPLING)
            refused = await refusal_of(session.serve(ask("x")))
            return refused, await session.close()

    refused, recorded = asyncio.run(inside())
    assert refused.status == 500
    assert recorded.fault.cause == "gateway"
    assert "a bug" in caplog.text


def test_a_generator_without_logprobs_is_for_evaluation_only():
    blind = Completion(
        token_ids=spoken("ok"),
        logprobs=(math.nan,) * 3,
        weight_versions=(0,) * 3,
        finish_reason="stop",
    )
    refused, recorded = play(lambda s: refusal_of(s.serve(ask("x"))), says(blind))
    assert refused.status == 503
    with pytest.raises(GenerationError, match="no log-probs: it can serve evaluation"):
        recorded.for_training()

    answer, recorded = play(lambda s: s.serve(ask("x")), says(blind), training=False)
    assert answer.message.content == "ok"
    assert recorded.lacking == "log-probs"
    assert [turn.kind for turn in recorded.turns] == ["aux"]
    with pytest.raises(DataError, match="nothing it says can be trained"):
        recorded.for_training()


def test_a_generator_without_ids_is_refused():
    mute = completion("", "stop", ())
    refused, recorded = play(lambda s: refusal_of(s.serve(ask("x"))), says(mute), training=False)
    assert refused.status == 503
    assert "no token ids" in str(recorded.fault)


def test_a_closed_session_refuses_and_ends_what_runs():
    generator = Slow()

    async def action(session):
        waiting = asyncio.ensure_future(session.serve(ask("x")))
        await generator.begun.wait()
        one, two = await asyncio.gather(session.close(), session.close())
        assert one is two
        late = await refusal_of(session.serve(ask("x")))
        return await refusal_of(waiting), late

    (running, late), recorded = play(action, generator)
    assert running.cause is late.cause is Cause.CLOSED
    assert generator.cancelled == 1
    assert recorded.turns == ()


def test_auxiliary_calls_are_marked():
    async def action(session):
        await session.serve(ask("title?"), aux=True)
        return await session.serve(ask("x"))

    answer, recorded = play(action, says("t", "ok"))
    assert [turn.kind for turn in recorded.turns] == ["aux", "agent"]
    assert recorded.messages[-1] == answer.message


@pytest.mark.parametrize("running", [True, False])
def test_an_auxiliary_call_that_the_agent_asks_for_as_well_is_its_work(running):
    """It joins the call, or gets its recorded answer: the same tokens, which it goes on from."""

    async def action(session):
        first = asyncio.create_task(session.serve(ask("x"), aux=True))
        if not running:
            await first
        answer = await session.serve(ask("x"))
        assert (await first).ident == answer.ident
        return answer

    answer, recorded = play(action, says("ok", "another"))
    assert [turn.kind for turn in recorded.turns] == ["agent"]
    assert recorded.messages[-1] == answer.message


def test_names_and_addresses():
    async def inside():
        async with gateway(says()) as gate:
            session = await gate.open("a/b 1", sampling=SAMPLING)
            assert session.url == f"{gate.url}/s/a%2Fb%201/v1"
            assert gate.open_sessions == 1
            with pytest.raises(DataError, match="open already"):
                await gate.open("a/b 1", sampling=SAMPLING)
            for bad in ("", "..", "a\nb", "x" * 600):
                with pytest.raises(DataError, match="session id"):
                    await gate.open(bad, sampling=SAMPLING)
            await session.close()
            assert gate.open_sessions == 0
            await gate.open("a/b 1", sampling=SAMPLING)  # a second attempt may take its name

    asyncio.run(inside())


def test_it_does_not_listen_beyond_loopback_without_a_key():
    for host in ("0.0.0.0", "10.0.0.1", "example.com", "::"):
        with pytest.raises(ConfigError, match="without a key"):
            gateway(says(), host=host)
    for host in ("127.0.0.1", "localhost", "::1"):
        gateway(says(), host=host)
    assert gateway(says(), host="0.0.0.0", api_key="k").url.startswith("http://127.0.0.1:")


def test_a_history_that_no_template_renders_is_the_agents_fault():
    class Strict(world.ByteRenderer):
        def initial(self, messages):
            raise DataError("conversation roles must alternate")

    async def inside():
        gate = world.Gateway(
            generator=says("ok"),
            renderer_for=Strict,
        )
        async with asyncio.timeout(30), gate:
            session = await gate.open("s", sampling=SAMPLING)
            refused = await refusal_of(session.serve(ask("x")))
            return refused, await session.close()

    refused, recorded = asyncio.run(inside())
    assert (refused.status, refused.message) == (400, "conversation roles must alternate")
    assert recorded.fault is None


def test_a_closed_session_leaves_memory():
    async def inside():
        async with gateway(says(*("ok",) * 40)) as gate:
            left, kept = [], []
            for number in range(10):
                session = await gate.open(f"s{number}", sampling=SAMPLING)
                for word in "abcd":
                    await session.serve(ask(word), Repeat(key=word, digest=b"1"))
                recorded = await session.close()
                assert len(recorded.turns) == 4
                left.append(weakref.ref(session))
                kept.append(session if number == 0 else None)
                del session, recorded
            gc.collect()
            assert [ref() for ref in left[1:]] == [None] * 9
            # one that somebody still holds: its record is what it gave away
            assert not hasattr(kept[0], "_conversation")

    asyncio.run(inside())
