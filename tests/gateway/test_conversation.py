"""From a client's messages to rows: stored ids stay, forks have a cause, nothing is lost."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest

from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.types import Completion, Message, ToolCall
from skyrl_jax.gateway.conversation import Conversation
from skyrl_jax.generation.tokenizer import END, START
from tests.gateway.talk import (
    OTHER_TOOLS,
    RENDERER,
    TOKENIZER,
    TOOLS,
    Talk,
    ids_of,
    read,
    renderer_for,
    said,
    system,
    tool,
    user,
)

OPENING = [system("be brief"), user("fix it")]
CALL = '<call>["bash", {"command": "ls", "n": 3}]</call>'


def test_the_next_prompt_is_the_stored_ids_and_a_rendered_delta() -> None:
    """Faults C1: the newline after the end of turn is in the prompt, with mask 0."""
    talk = Talk()
    answer = talk.call(OPENING, f"look {CALL}")
    talk.call([*OPENING, answer, tool("a.py")], "done")
    assert talk.prompts[0] == RENDERER.render(OPENING)
    delta = RENDERER.delta([tool("a.py")], stopped=True)
    assert talk.prompts[1] == (*talk.full(0), *delta)
    assert TOKENIZER.decode(delta).startswith(f"\n{START}tool\na.py")
    (row,) = talk.rows().sequences
    end = len(talk.full(0)) - 1
    assert row.token_ids[end] == RENDERER.stop_id and row.mask[end] == 1
    assert TOKENIZER.decode(row.token_ids[end + 1 : end + 2]) == "\n" and row.mask[end + 1] == 0
    assert talk.conversation.counts == {"calls": 2, "aux": 0, "aborted": 0, "forks": 0}


def test_incremental_ids_are_those_of_one_render_where_the_text_encodes_to_itself() -> None:
    talk = Talk()
    history = list(OPENING)
    for number in range(4):
        history.append(talk.call(history, f"step {number}"))
        history.append(user(f"go on {number}"))
    talk.call(history, "done")
    assert talk.prompts[-1] == RENDERER.render(history)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: dataclasses.replace(m, tool_calls=(ToolCall(
            name="bash", arguments={"n": 3, "command": "ls"}, id="another"),)),
        lambda m: dataclasses.replace(m, content=m.content.strip()),
        lambda m: dataclasses.replace(m, content=f"\n{m.content} "),
        lambda m: dataclasses.replace(m, reasoning=None),
        lambda m: dataclasses.replace(m, reasoning=""),
        lambda m: dataclasses.replace(m, reasoning=f"{m.reasoning}\n"),
        lambda m: dataclasses.replace(m, reasoning=None, content=m.content.strip()),
    ],
)  # fmt: skip
def test_a_replayed_turn_goes_on_from_its_stored_ids(change) -> None:
    """Faults C2, C35, B178: other call ids, order of arguments, whitespace, dropped thinking."""
    talk = Talk()
    answer = talk.call(OPENING, f"<think>hm</think> look \n{CALL}")
    assert answer.reasoning == "hm" and answer.tool_calls and answer.content == " look \n"
    talk.call([*OPENING, change(answer), tool("a.py", "another")], "done")
    assert talk.prompts[1][: len(talk.full(0))] == talk.full(0)
    assert len(talk.rows().sequences) == 1 and talk.conversation.counts["forks"] == 0
    assert talk.trained() == talk.names(0, 1)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda m: dataclasses.replace(m, reasoning="hm?"), "reasoning"),
        (lambda m: dataclasses.replace(m, content="look there"), "content"),
        (lambda m: dataclasses.replace(m, tool_calls=()), "content"),
        (
            lambda m: dataclasses.replace(
                m, tool_calls=(ToolCall(name="bash", arguments={"command": "ls", "n": "3"}),)
            ),
            "content",
        ),
    ],
)
def test_a_changed_answer_forks_and_loses_nothing(change, cause) -> None:
    talk = Talk()
    answer = talk.call(OPENING, f"<think>hm</think>look {CALL}")
    talk.call([*OPENING, change(answer), tool("a.py")], "done")
    rows = talk.rows()
    assert len(rows.sequences) == 2 and rows.forks_by_cause == {cause: 1}
    assert talk.trained() == talk.names(0, 1)
    assert talk.conversation.counts[f"forks_{cause}"] == 1


def test_space_around_what_the_client_wrote_itself_is_a_change() -> None:
    """It was in the prompt, unlike the space around an answer, which nobody sampled anew."""
    talk = Talk()
    answer = talk.call(OPENING, "look")
    talk.call([*OPENING, answer, tool("a.py\n")], "more")
    talk.call([*OPENING, answer, tool("a.py"), said("more"), tool("b.py")], "done")
    assert talk.rows().forks_by_cause == {"edit": 1}
    assert talk.trained() == talk.names(0, 1, 2)


def test_thinking_cut_off_by_the_client_out_of_the_text_makes_two_rows() -> None:
    """Faults C4, C5: the second history says "A" where "<think>r</think>A" was sampled."""
    plain = Conversation(lambda tools: RENDERER)
    talk = Talk(plain)
    ids = ids_of("<think>r</think>A")
    whole = Message(role="assistant", content="<think>r</think>A")
    placement = plain.place(OPENING)
    talk.prompts.append(tuple(placement.prompt_ids))
    talk.completions.append(talk.complete(ids))
    plain.record(placement, talk.completions[0], whole)
    talk.call([*OPENING, said("A"), user("go on")], "B")
    assert talk.rows().forks_by_cause == {"content": 1}
    assert talk.trained() == talk.names(0, 1)


def test_eight_turns_of_thinking_replayed_without_it_are_one_row() -> None:
    """Faults C35: a client that drops the reasoning each turn made 64 samples of 8 rollouts."""
    talk = Talk()
    history = list(OPENING)
    for number in range(8):
        answer = talk.call(history, f"<think>so {number}</think>look {CALL}")
        history += [dataclasses.replace(answer, reasoning=None), tool(f"{number}.py")]
    assert len(talk.rows().sequences) == 1
    assert talk.conversation.counts["replayed_unreasoned"] == 7
    assert talk.trained() == talk.names(*range(8))


def test_a_word_sampled_in_two_pieces_stays_in_two_pieces() -> None:
    """Faults C3, C14, B123, B179: what would be encoded as one token was sampled as two."""
    talk = Talk()
    words = ("assert", "return", "Fix", "def")
    word = next(word for word in words if len(TOKENIZER.encode(word)) == 1)
    pieces = (*TOKENIZER.encode(word[:2]), *TOKENIZER.encode(word[2:]))
    assert len(pieces) > 1
    answer = talk.call(OPENING, (*pieces, RENDERER.stop_id))
    assert answer.content == word
    talk.call([*OPENING, said(word), user("go on")], "done")
    kept = talk.full(0)
    assert talk.prompts[1][: len(kept)] == kept and kept[-1 - len(pieces) : -1] == pieces
    (row,) = talk.rows().sequences
    assert tuple(row.token_ids[: len(kept)]) == kept


def test_any_sampled_id_is_kept_specials_too() -> None:
    """Faults C17: a completion that holds a start token, and one that names no token at all."""
    talk = Talk()
    ids = (TOKENIZER.token_id(START), 65, TOKENIZER.vocab_size + 7, RENDERER.stop_id)
    answer = talk.call(OPENING, ids)
    talk.call([*OPENING, answer, user("go on")], "done")
    assert talk.prompts[1][: len(talk.full(0))] == talk.full(0)
    assert talk.trained() == talk.names(0, 1)


def test_ids_without_the_opening_of_a_call_are_text_and_are_trained() -> None:
    """Faults C13: the message is read from the ids, so it never says what they do not."""
    talk = Talk()
    answer = talk.call(OPENING, '["bash", {}]</call>')
    assert answer.tool_calls == () and answer.content == '["bash", {}]</call>'
    talk.call([*OPENING, said('["bash", {}]</call>'), user("no call found")], "done")
    assert len(talk.rows().sequences) == 1


def test_a_malformed_call_is_replayed_by_its_text() -> None:
    talk = Talk()
    answer = talk.call(OPENING, "<call>{</call>")
    assert answer.error and answer.tool_calls == ()
    talk.call([*OPENING, said("<call>{</call>"), user("no JSON")], "done")
    assert len(talk.rows().sequences) == 1 and talk.conversation.counts["forks"] == 0


def test_a_run_of_tool_messages_is_rendered_together() -> None:
    """Faults C8."""
    talk = Talk()
    answer = talk.call(OPENING, CALL)
    talk.call([*OPENING, answer, tool("a"), tool("b")], "done")
    text = TOKENIZER.decode(talk.prompts[1])
    assert text.count(f"{START}tool\n") == 1 and "tool\na\nb" in text


def test_a_client_s_own_answers_and_later_turns_keep_the_sampled_ids() -> None:
    """Faults C40: few-shot answers, a forced one in the middle, a tool, a continuation."""
    talk = Talk()
    history = [*OPENING, said("an example"), user("now you")]
    history.append(talk.call(history, (*TOKENIZER.encode("as"), *TOKENIZER.encode("sert"))))
    history += [said("forced"), tool("ok")]
    history.append(talk.call(history, "second"))
    talk.call(history, "third")  # goes on without another message
    for number in (0, 1):
        assert talk.prompts[number + 1][: len(talk.full(number))] == talk.full(number)
    assert len(talk.rows().sequences) == 1 and talk.trained() == talk.names(0, 1, 2)


def test_two_answers_are_two_runs_of_ones() -> None:
    """Faults C9, B2075: the answers and their ends, whole, and nothing of what stands between."""
    talk = Talk()
    answer = talk.call(OPENING, "<think>hm</think>one")
    talk.call([*OPENING, answer, tool("0123456789"), user("go on")], "two")
    (row,) = talk.rows().sequences
    edges = np.flatnonzero(np.diff(row.mask, prepend=0, append=0))
    runs = [TOKENIZER.decode(row.token_ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]
    assert runs == [f"<think>hm</think>one{END}", f"two{END}"]
    between = TOKENIZER.decode(row.token_ids[edges[1] : edges[2]].tolist())
    head = f"{START}tool\n0123456789{END}\n{START}user\ngo on{END}\n{START}assistant\n"
    assert between == f"\n{head}"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_end_of_turn_that_was_sampled_is_not_rendered_again(finish) -> None:
    """Faults B2148, B758, B1319: by the token, whatever the engine calls the end."""
    talk = Talk()
    answer = talk.call(OPENING, "look", finish=finish)
    talk.call([*OPENING, answer, user("go on")], "done")
    delta = talk.prompts[1][len(talk.full(0)) :]
    assert TOKENIZER.decode(delta).startswith(f"\n{START}user")
    (row,) = talk.rows().sequences
    assert row.mask[len(talk.full(0)) - 1] == 1


def test_an_end_of_turn_that_was_not_sampled_is_rendered_and_never_trained() -> None:
    """Faults B2148, B758, B710: its mask and its log-prob are 0."""
    talk = Talk()
    answer = talk.call(OPENING, TOKENIZER.encode("look"), finish="length")
    talk.call([*OPENING, answer, user("go on")], "done")
    (row,) = talk.rows().sequences
    end = len(talk.full(0))
    assert row.token_ids[end] == RENDERER.stop_id
    assert row.mask[end] == 0 and row.behavior_logprobs[end] == 0
    assert row.weight_versions[end] == -1
    trained = np.flatnonzero(row.mask)
    assert len(trained) == len(talk.names(0, 1)), "no header, no newline, no end of ours"


def test_a_renderer_without_stop_tokens_goes_by_the_finish_reason() -> None:
    class Bare:
        def initial(self, messages):
            return RENDERER.initial(messages)

        def delta(self, messages, *, stopped, after=None):
            return RENDERER.delta(messages, stopped=stopped)

        def parse(self, token_ids, finish_reason):
            return RENDERER.parse(token_ids, finish_reason)

    talk = Talk(Conversation(lambda tools: Bare()))
    answer = talk.call(OPENING, "look")
    talk.call([*OPENING, answer, user("go on")], "done")
    assert TOKENIZER.decode(talk.prompts[1][len(talk.full(0)) :]).startswith("\n")


def test_an_empty_answer_is_legal() -> None:
    """Faults B406, B279: an answer without a token, for instance at the end of a budget."""
    talk = Talk()
    answer = talk.call(OPENING, (), finish="length")
    assert talk.rows().sequences == ()
    talk.call([*OPENING, answer, user("go on")], "done")
    assert talk.trained() == talk.names(1)
    assert TOKENIZER.decode(talk.prompts[1][len(talk.prompts[0]) :]).startswith(END)


# -- retries and aborts ---------------------------------------------------------------------------


def test_the_same_call_again_gets_the_recorded_answer() -> None:
    talk = Talk()
    answer = talk.call(OPENING, "look")
    placement = talk.conversation.place(OPENING)
    again = talk.conversation.retry(placement)
    assert (again.node, again.message) == (0, answer)
    assert again.completion is talk.completions[0]
    assert tuple(placement.prompt_ids) == talk.prompts[0]
    talk.call([*OPENING, answer, user("go on")], "done")
    assert talk.conversation.counts["retries"] == 1 and talk.conversation.counts["calls"] == 2
    assert len(talk.rows().sequences) == 1
    # the answer was continued: the same call is now a way back, and samples anew
    assert talk.conversation.retry(talk.conversation.place(OPENING)) is None


def test_other_tools_or_other_words_are_not_the_same_call() -> None:
    talk = Talk()
    talk.call(OPENING, "look", TOOLS)
    assert talk.conversation.retry(talk.conversation.place(OPENING, OTHER_TOOLS)) is None
    assert talk.conversation.retry(talk.conversation.place([system("no"), user("fix it")])) is None


def test_a_retry_with_another_sample_drops_the_first_and_counts_it() -> None:
    talk = Talk()
    talk.call(OPENING, "first")
    answer = talk.call(OPENING, "other")
    talk.call([*OPENING, answer, user("go on")], "done")
    assert talk.prompts[0] == talk.prompts[1]
    assert talk.trained() == talk.names(1, 2)
    assert talk.rows().dropped == {"abandoned": len(talk.completions[0].token_ids)}
    assert talk.trained(abandoned="train") == talk.names(0, 1, 2)
    assert talk.conversation.counts["forks_retry"] == 1


def test_a_way_back_whose_new_answer_is_the_last_trains_both() -> None:
    """The older answer was continued before the newer was asked for: neither is left behind."""
    talk = Talk()
    answer = talk.call(OPENING, "first")
    talk.call([*OPENING, answer, user("go on")], "wrong way")
    talk.call(OPENING, "submit")
    assert talk.trained() == talk.names(0, 1, 2) and talk.rows().abandoned_tokens == 0


def test_a_partial_answer_nobody_saw_is_abandoned_and_not_handed_out() -> None:
    talk = Talk()
    talk.call(OPENING, TOKENIZER.encode("fir"), finish="abort")
    assert talk.conversation.retry(talk.conversation.place(OPENING)) is None
    talk.call(OPENING, "second")
    assert talk.trained() == talk.names(1)
    assert talk.rows().abandoned_tokens == len(talk.completions[0].token_ids)
    assert talk.trained(abandoned="train") == talk.names(1), "its end is not the policy's"
    assert talk.conversation.counts["aborted"] == 1


def test_a_partial_answer_that_the_client_goes_on_from_is_trained() -> None:
    talk = Talk()
    partial = talk.call(OPENING, TOKENIZER.encode("fir"), finish="abort")
    talk.call([*OPENING, partial, user("go on")], "second")
    assert talk.trained() == talk.names(0, 1) and len(talk.rows().sequences) == 1


# -- forks ----------------------------------------------------------------------------------------


def loop(talk: Talk, history, turns: int, tools=()) -> list[Message]:
    """Play a tool loop; return the whole history with its last answer."""
    history = list(history)
    for number in range(turns):
        history.append(talk.call(history, f"answer {number}", tools))
        history.append(tool(f"result {number}"))
    return history[:-1]


def test_back_to_an_earlier_turn_is_a_branch() -> None:
    """Faults C4e: the shared answer is trained in the first row alone."""
    talk = Talk()
    history = loop(talk, OPENING, 3)
    talk.call([*history[:3], tool("another result")], "elsewhere")
    rows = talk.rows()
    assert rows.forks_by_cause == {"branch": 1}
    assert talk.prompts[3][: len(talk.full(0))] == talk.full(0)
    assert talk.trained() == talk.names(0, 1, 2, 3)


def test_an_edited_tool_result_is_an_edit_and_shares_what_stands_before_it() -> None:
    talk = Talk()
    history = loop(talk, OPENING, 3)
    history[3] = tool("[left out]")
    talk.call([*history, user("go on")], "on")
    assert talk.rows().forks_by_cause == {"edit": 1}
    assert talk.prompts[3][: len(talk.full(0))] == talk.full(0)
    text = TOKENIZER.decode(talk.prompts[3][len(talk.full(0)) :])
    assert "[left out]" in text and "answer 1" in text and "result 0" not in text
    assert talk.trained() == talk.names(0, 1, 2, 3)


def test_an_edited_first_message_is_an_edit() -> None:
    talk = Talk()
    history = loop(talk, [user("fix it")], 2)
    talk.call([user("fix this"), *history[1:], user("go on")], "on")
    assert talk.rows().forks_by_cause == {"edit": 1}


def test_compaction_keeps_the_opening_and_the_tail() -> None:
    talk = Talk()
    history = loop(talk, OPENING, 4)
    short = [*OPENING, user("so far: four looks"), *history[-3:]]
    answer = talk.call([*short, user("go on")], "on")
    assert talk.rows().forks_by_cause == {"compaction": 1}
    talk.call([*short, user("go on"), answer, tool("ok")], "done")
    assert len(talk.rows().sequences) == 2, "what follows the compaction goes on in its row"
    assert talk.trained() == talk.names(*range(6))


def test_another_system_prompt_is_a_new_root_and_still_work() -> None:
    talk = Talk()
    history = loop(talk, OPENING, 2)
    for swapped in ([system("be slow"), *history[1:]], history[1:]):
        talk.call([*swapped, user("go on")], "on")
    assert talk.rows().forks_by_cause == {"system": 2}
    assert talk.trained() == talk.names(0, 1, 2, 3)


def test_other_tools_are_another_prompt() -> None:
    talk = Talk()
    history = loop(talk, OPENING, 2, TOOLS)
    talk.call([*history, user("go on")], "on", OTHER_TOOLS)
    assert talk.rows().forks_by_cause == {"tools": 1}
    assert "sh" in TOKENIZER.decode(talk.prompts[2][:12])
    assert talk.trained() == talk.names(0, 1, 2)


def test_a_sub_agent_with_tools_of_its_own_is_new_though_its_system_prompt_is_not() -> None:
    talk = Talk()
    loop(talk, OPENING, 2, TOOLS)
    talk.call([OPENING[0], user("find it")], "on", OTHER_TOOLS)
    assert talk.rows().forks_by_cause == {"new": 1}


def test_interleaved_sub_agents_have_a_row_each() -> None:
    talk = Talk()
    one, two = list(OPENING), [system("you search"), user("find it")]
    for number in range(3):
        one += [talk.call(one, f"main {number}"), tool("ok")]
        two += [talk.call(two, f"sub {number}"), tool("ok")]
    rows = talk.rows()
    assert rows.forks_by_cause == {"new": 1} and len(rows.sequences) == 2
    assert talk.trained() == talk.names(*range(6))


def test_many_sub_agents_go_on_though_their_ends_are_no_longer_at_hand() -> None:
    talk = Talk()
    threads = [[user(f"part {number}")] for number in range(20)]
    for turn in range(3):
        for number, thread in enumerate(threads):
            thread += [talk.call(thread, f"{turn} of {number}"), tool("ok")]
    assert len(talk.rows().sequences) == 20
    assert talk.trained() == talk.names(*range(60))


def test_the_longest_match_wins() -> None:
    """Faults C7: a short and a long history that both fit; the long one goes on."""
    talk = Talk()
    history = loop(talk, OPENING, 3)
    talk.call([*history[:4], said("answer 1"), said("by hand")], "x")  # shares less
    talk.call([*history, user("go on")], "done")
    assert talk.prompts[-1][: len(talk.full(2))] == talk.full(2)


def test_of_two_answers_that_read_the_same_the_one_that_went_further_goes_on() -> None:
    """The second was sampled later, in other tokens; messages alone do not tell them apart."""
    talk = Talk()
    first = talk.call(OPENING, ids_of("ab"))
    history = [*OPENING, first, tool("ok")]
    second = talk.call(history, "done")
    assert talk.call(OPENING, [*ids_of("a")[:-1], *ids_of("b")]) == first
    talk.call([*history, second, user("go on")], "on")
    assert talk.prompts[3][: len(talk.full(1))] == talk.full(1)


# -- calls beside the work ------------------------------------------------------------------------


def test_a_call_without_tools_beside_calls_with_tools_is_auxiliary() -> None:
    """Faults C4e: titles and summaries carry no tool manifest."""
    talk = Talk()
    talk.call([system("title"), user("fix it")], "A title")
    history = loop(talk, OPENING, 2, TOOLS)
    talk.call([*history, user("sum up")], "A summary")
    talk.call([*OPENING, user("so far: A summary")], "on", TOOLS)
    kinds = [turn.kind for turn in talk.conversation.turns()]
    assert kinds == ["aux", "agent", "agent", "aux", "agent"]
    rows = talk.rows()
    assert rows.dropped == {"aux": sum(len(talk.completions[n].token_ids) for n in (0, 3))}
    assert talk.trained() == talk.names(1, 2, 4) and rows.forks_by_cause == {"compaction": 1}
    assert [turn.fork for turn in talk.conversation.turns()] == ["", "", "", "", "compaction"]


def test_without_any_tools_every_call_is_work() -> None:
    talk = Talk()
    loop(talk, OPENING, 2)
    talk.call([system("title"), user("fix it")], "A title")
    assert {turn.kind for turn in talk.conversation.turns()} == {"agent"}


def test_an_answer_without_tools_that_the_agent_works_on_with_is_work() -> None:
    """A plan made without tools and replayed in calls with tools is trained."""
    talk = Talk()
    plan = talk.call(OPENING, "the plan")
    history = loop(talk, [*OPENING, plan, user("do it")], 2, TOOLS)
    between = talk.call([*history, user("why?")], "since")  # without tools, then with them again
    talk.call([*history, user("why?"), between, user("go on")], "on", TOOLS)
    assert {turn.kind for turn in talk.conversation.turns()} == {"agent"}
    assert talk.trained() == talk.names(*range(5))


def test_a_mark_says_what_no_rule_can() -> None:
    talk = Talk()
    history = loop(talk, OPENING, 2, TOOLS)
    talk.call([*history, user("sum up")], "A summary", TOOLS, kind="aux")
    talk.call([*history, user("go on")], "on", TOOLS)
    assert [turn.kind for turn in talk.conversation.turns()][2] == "aux"
    assert len(talk.rows().sequences) == 1, "beside the row, not in its way"
    assert talk.trained() == talk.names(0, 1, 3) and talk.conversation.counts["forks"] == 0
    plain = Talk(Conversation(renderer_for, aux_without_tools=False))
    plain.call([user("title")], "A title")
    loop(plain, OPENING, 1, TOOLS)
    assert {turn.kind for turn in plain.conversation.turns()} == {"agent"}


def test_what_the_agent_goes_on_from_is_work_whatever_it_was_marked_as() -> None:
    talk = Talk()
    history = loop(talk, OPENING, 1, TOOLS)
    side = [*history, user("sum up")]
    summary = talk.call(side, "A summary", TOOLS, kind="aux")
    talk.call([*history, user("go on")], "on", TOOLS)
    assert [turn.kind for turn in talk.conversation.turns()] == ["agent", "aux", "agent"]
    talk.call([*side, summary, user("and then?")], "then", TOOLS)
    turns = talk.conversation.turns()
    assert [(t.kind, t.fork) for t in turns] == [
        ("agent", ""), ("agent", "branch"), ("agent", ""), ("agent", ""),
    ]  # fmt: skip
    assert talk.trained() == talk.names(*range(4))


def test_what_cannot_be_trained_stays_context_whoever_uses_it() -> None:
    talk = Talk()
    side = [*OPENING, user("sum up")]
    summary = talk.call(side, "A summary", TOOLS, kind="lacking")
    talk.call([*side, summary, user("and then?")], "then", TOOLS)
    talk.conversation.claim(0)
    assert [turn.kind for turn in talk.conversation.turns()] == ["aux", "agent"]


# -- refusals and housekeeping --------------------------------------------------------------------


def test_what_cannot_be_rendered_or_recorded_is_refused() -> None:
    conversation = Conversation(renderer_for)
    with pytest.raises(DataError, match="empty"):
        conversation.place([])
    with pytest.raises(DataError, match="role 'developer'"):
        conversation.place([Message(role="developer", content="x")])
    placement = conversation.place(OPENING)
    good = Completion(token_ids=(5,), logprobs=(-1.0,), weight_versions=(0,), finish_reason="stop")
    with pytest.raises(DataError, match="kind 'title'"):
        conversation.record(placement, good, said("x"), kind="title")
    filler = dataclasses.replace(good, logprobs=(-9999.0,))
    with pytest.raises(DataError, match="call 0: log-prob of token 0 is -9999"):
        conversation.record(placement, filler, said("x"))
    assert conversation.turns() == () and conversation.counts["calls"] == 0


def test_calls_under_way_at_the_same_time_fork_when_they_are_answered() -> None:
    """Two sub-agents begin at once, then one of them goes on twice at once."""
    talk = Talk()
    conversation = talk.conversation
    both = [conversation.place([user(f"part {n}")]) for n in range(2)]
    for placement in both:
        conversation.record(placement, talk.complete(ids_of("look")), said("look"))
    opening = [user("part 1"), said("look")]
    twice = [conversation.place([*opening, user(f"go {n}")]) for n in range(2)]
    for placement in twice:
        conversation.record(placement, talk.complete(ids_of("done")), said("done"))
    assert [turn.fork for turn in conversation.turns()] == ["", "new", "", "branch"]
    assert talk.rows().forks_by_cause == {"new": 1, "branch": 1}


def test_tools_that_a_model_cannot_have_are_the_request_s_fault() -> None:
    def none(tools):
        if tools:
            raise ConfigError("this template has no tools")
        return RENDERER

    conversation = Conversation(none)
    with pytest.raises(DataError, match="has no tools"):
        conversation.place(OPENING, TOOLS)
    assert conversation.place(OPENING).parent is None


def test_placing_records_nothing() -> None:
    talk = Talk()
    history = loop(talk, OPENING, 2)
    before = talk.conversation.counts
    placed = [talk.conversation.place([*history, user("go on")]) for _ in range(2)]
    assert placed[0].prompt_ids == placed[1].prompt_ids
    assert talk.conversation.counts == before
    placed[0].prompt_ids[0] = -1  # a caller's copy
    assert talk.conversation.place([*history, user("go on")]).prompt_ids == placed[1].prompt_ids
    conversation = Conversation(renderer_for)
    placement = conversation.place(OPENING)
    conversation.record(placement, talk.complete(ids_of("look")), said("look"))
    assert tuple(placement.prompt_ids) == RENDERER.render(OPENING), "recording changes it no more"


def test_a_closed_conversation_is_freed_without_the_collector() -> None:
    talk = Talk()
    loop(talk, OPENING, 3)
    gone = weakref.ref(talk.conversation)
    graph = weakref.ref(talk.conversation._graph.calls[0].delta)
    gc.disable()
    try:
        del talk
        assert gone() is None and graph() is None
    finally:
        gc.enable()


def test_a_call_keeps_what_it_added() -> None:
    talk = Talk()
    loop(talk, [user("x" * 4000)], 20)
    stored = sum(len(call.delta) for call in talk.conversation._graph.calls)
    assert stored == len(talk.prompts[-1]) - sum(len(c.token_ids) for c in talk.completions[:-1])
    assert [turn.prompt_ids for turn in talk.conversation.turns()] == talk.prompts


def test_the_toy_format_reads_what_the_tests_write() -> None:
    message = read(f"<think>a</think>b{CALL}", False)
    assert (message.reasoning, message.content) == ("a", "b")
    assert message.tool_calls == (ToolCall(name="bash", arguments={"command": "ls", "n": 3}),)
