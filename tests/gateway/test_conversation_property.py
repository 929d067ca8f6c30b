"""Thousands of random sessions: what the agent used is trained exactly once, the rest is counted.

A client plays threads (the main agent and sub-agents) and does to its histories what clients do:
rollback, compaction, rewriting, other system prompts, retries that get the recorded answer or
another sample (also one that reads the same), calls beside the work, answers cut by a length limit,
aborts with partial tokens or none, an engine that dies under a call and comes back with older
weights, calls under way together, weights that change within an answer. It knows itself which
answers it went on to use. What the rows must be is worked out again here, by comparing whole
prompts.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_jax.batching.ledger import Ledger
from skyrl_jax.batching.minibatch import assemble
from skyrl_jax.batching.sequences import make_rows
from skyrl_jax.core.types import Message, TrajectoryGroup, Turn
from skyrl_jax.gateway.matching import likeness
from tests.batching.make import objective, trajectory
from tests.gateway.talk import RENDERER, TOKENIZER, TOOLS, Talk, system, tool, user

MOVES = (
    "say", "say", "say", "say", "results", "strip", "trim", "back", "edit", "compact", "system",
    "spawn", "same", "again", "abort", "empty", "cut", "aux", "title",
    "restart", "together", "twin", "twin", "adopt",
)  # fmt: skip


@dataclass
class Thread:
    """A history of a client. ``last``: the call whose answer ends it, while nothing was changed."""

    history: list[Message]
    last: int | None = None


@dataclass
class Client:
    """Plays moves; remembers what it used."""

    chance: random.Random
    talk: Talk = field(default_factory=Talk)
    threads: list[Thread] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    partial: set[int] = field(default_factory=set)
    beside: set[int] = field(default_factory=set)
    known: dict[int, list[Message]] = field(default_factory=dict)
    words: int = 0

    def play(self, move: str) -> None:
        if not self.threads or move == "spawn":
            opening = [system(self.word()), user(self.word())]
            self.threads.append(Thread(opening))
            self.ask(self.threads[-1])
            return
        thread = self.chance.choice(self.threads)
        getattr(self, f"do_{move}")(thread)
        if self.chance.random() < 0.2:
            self.talk.version += 1

    # -- moves that go on ------------------------------------------------------------------------

    def do_say(self, thread: Thread) -> None:
        self.go_on(thread, user(self.word()))

    def do_results(self, thread: Thread) -> None:
        self.go_on(thread, tool(self.word()), tool(self.word()))

    def do_strip(self, thread: Thread) -> None:
        thread.history = [
            dataclasses.replace(m, reasoning=None) if m.role == "assistant" else m
            for m in thread.history
        ]
        self.go_on(thread, user(self.word()))

    def do_trim(self, thread: Thread) -> None:
        thread.history = [
            dataclasses.replace(m, content=m.content.strip()) if m.role == "assistant" else m
            for m in thread.history
        ]
        self.go_on(thread, user(self.word()))

    def do_cut(self, thread: Thread) -> None:
        thread.history.append(user(self.word()))
        self.ask(thread, finish="length")

    # -- moves that change what was --------------------------------------------------------------

    def do_back(self, thread: Thread) -> None:
        keep = self.chance.randrange(2, len(thread.history) + 1)
        thread.history = [*thread.history[:keep], user(self.word())]
        thread.last = None
        self.ask(thread)

    def do_edit(self, thread: Thread) -> None:
        at = self.chance.randrange(len(thread.history))
        changed = dataclasses.replace(thread.history[at], content=self.word(), tool_calls=())
        thread.history[at] = changed
        thread.history.append(user(self.word()))
        thread.last = None
        self.ask(thread)

    def do_compact(self, thread: Thread) -> None:
        tail = thread.history[max(2, len(thread.history) - 2) :]
        summary = [*thread.history, user(self.word())]
        self.call(summary, beside=True)
        thread.history = [*thread.history[:2], user(self.word()), *tail, user(self.word())]
        thread.last = None
        self.ask(thread)

    def do_system(self, thread: Thread) -> None:
        thread.history = [system(self.word()), *thread.history[1:], user(self.word())]
        thread.last = None
        self.ask(thread)

    # -- retries and aborts ----------------------------------------------------------------------

    def do_same(self, thread: Thread) -> None:
        """The client lost the answer and asks again: the recorded one comes back, or another."""
        if thread.last is None:
            return
        conversation = self.talk.conversation
        calls = len(self.talk.completions)
        again = conversation.retry(conversation.place(thread.history[:-1], TOOLS))
        if again is None:
            assert any(p[: len(full)] == full for p in self.talk.prompts
                       for full in self.fulls_of(thread)), "it was continued"  # fmt: skip
            return
        assert again.completion is self.talk.completions[again.node]
        asked = self.known[again.node][:-1]  # below a twin: other tokens, which read alike
        assert len(asked) == len(thread.history) - 1
        assert all(map(likeness, asked, thread.history))
        assert len(self.talk.completions) == calls
        thread.last = again.node
        thread.history[-1] = again.message

    def fulls_of(self, thread: Thread) -> list[tuple[int, ...]]:
        """Return all tokens of the calls whose history reads as this one."""
        asked = thread.history[:-1]
        return [
            self.talk.full(n)
            for n, known in self.known.items()
            if len(known) == len(thread.history) and all(map(likeness, known, asked))
        ]

    def do_again(self, thread: Thread) -> None:
        """The client throws its last answer away and gets another sample."""
        if thread.last is not None:
            thread.history.pop()
            thread.last = None
            self.ask(thread)

    def do_abort(self, thread: Thread) -> None:
        history = [*thread.history, user(self.word())]
        self.partial.add(self.call(history, finish="abort", whole=False)[0])

    def do_empty(self, thread: Thread) -> None:
        number = len(self.talk.prompts)
        history = [*thread.history, user(self.word())]
        self.know(number, history, self.talk.call(history, (), TOOLS, finish="abort"))
        self.partial.add(number)

    def do_restart(self, thread: Thread) -> None:
        """The engine dies under a call and comes back with weights it had; the client asks again.

        Nothing of the call is left, or what it had said so far.
        """
        new = user(self.word())
        if self.chance.random() < 0.5:
            self.talk.conversation.place([*thread.history, new], TOOLS)
        else:
            history = [*thread.history, new]
            self.partial.add(self.call(history, finish="abort", whole=False)[0])
        self.talk.version = self.chance.randrange(1, self.talk.version + 1)
        self.go_on(thread, new)

    def do_together(self, thread: Thread) -> None:
        """All threads ask before any is answered; the answers come in another order."""
        asked = []
        for one in self.threads:
            one.history.append(user(self.word()))
            asked.append((one, self.talk.conversation.place(one.history, TOOLS)))
        self.chance.shuffle(asked)
        placed = set(self.known)
        for one, placement in asked:
            number, history = len(self.talk.prompts), list(one.history)
            answer = self.talk.answer(placement, self.sample(True))
            self.know(number, history, answer, one.last, placed)
            one.history.append(answer)
            one.last = number

    def do_twin(self, thread: Thread) -> None:
        """An earlier call is sampled again: other tokens, which read as the answer it had."""
        answers = [at for at, m in enumerate(thread.history) if m.role == "assistant"]
        if not answers:
            return
        at = self.chance.choice(answers)
        was = thread.history[at]
        thought = f"<think>{was.reasoning}</think>" if was.reasoning else ""
        text = thought + was.content
        ids = (*(i for letter in text for i in TOKENIZER.encode(letter)), RENDERER.stop_id)
        if likeness(was, RENDERER.parse(ids, "stop")):
            number, history = len(self.talk.prompts), thread.history[:at]
            self.know(number, history, self.talk.call(history, ids, TOOLS))

    # -- calls beside the work -------------------------------------------------------------------

    def do_title(self, thread: Thread) -> None:
        del thread
        self.call([system("title"), user(self.word())], beside=True)

    def do_aux(self, thread: Thread) -> None:
        number = len(self.talk.prompts)
        history = [*thread.history, user(self.word())]
        self.know(number, history, self.talk.call(history, self.sample(True), TOOLS, kind="aux"))
        self.beside.add(number)

    def do_adopt(self, thread: Thread) -> None:
        """The agent goes on from a call beside the work: it was work after all."""
        number = len(self.talk.prompts)
        thread.history.append(user(self.word()))
        answer = self.talk.call(thread.history, self.sample(True), TOOLS, kind="aux")
        self.know(number, thread.history, answer, thread.last)
        thread.history.append(answer)
        thread.last = number
        self.go_on(thread, user(self.word()))

    # -- asking ----------------------------------------------------------------------------------

    def word(self) -> str:
        """Return a word that nobody said before, often with space around it."""
        self.words += 1
        return self.chance.choice(["w{}", " w{}", "w{}\n"]).format(self.words)

    def sample(self, whole: bool) -> tuple[int, ...]:
        """Return ids as a policy could draw them: any tokens, also such as no text encodes to."""
        self.words += 1
        thought = f"<think>t{self.words}</think>" if self.chance.random() < 0.5 else ""
        ids = [*TOKENIZER.encode(f"{thought}a{self.words} ")]
        free = [i for i in range(TOKENIZER.vocab_size + 3) if i != RENDERER.stop_id]
        ids += self.chance.choices(free, k=self.chance.randrange(4))
        return (*ids, RENDERER.stop_id) if whole else tuple(ids)

    def go_on(self, thread: Thread, *messages: Message) -> None:
        """Continue a history."""
        thread.history += messages
        self.ask(thread)

    def know(
        self,
        number: int,
        history: list[Message],
        answer: Message,
        last: int | None = None,
        placed: set[int] | None = None,
    ) -> None:
        """Its prompt must be the tokens of the longest history that reads as this one begins.

        Args:
            number: of the call.
            history: what it was sent with.
            answer: what it got.
            last: the call whose answer ends the history, where the client changed nothing.
            placed: the calls that were known when it was placed; all of them by default.
        """
        fits = {
            n: len(self.known[n])
            for n in (self.known if placed is None else placed)
            if len(self.known[n]) <= len(history)
            and all(map(likeness, self.known[n], history))  # of the length of the shorter
        }
        longest = [n for n, size in fits.items() if size == max(fits.values())]
        prompt = self.talk.prompts[number]
        parents = [n for n in longest if prompt[: len(self.talk.full(n))] == self.talk.full(n)]
        assert bool(parents) == bool(longest)
        if last is not None:
            assert fits.get(last) == max(fits.values())
            assert any(likeness(self.known[n][-1], self.known[last][-1]) for n in parents)
            self.used.add(max(parents))
        above = self.known[max(parents)] if parents else []
        self.known[number] = [*above, *history[len(above) :], answer]

    def ask(self, thread: Thread, finish: str = "stop") -> int:
        last, thread.last = thread.last, None
        whole = finish == "stop"
        number, answer = self.call(thread.history, finish=finish, whole=whole, last=last)
        thread.history.append(answer)
        thread.last = number
        return number

    def call(
        self, history, *, beside=False, finish="stop", whole=True, last=None
    ) -> tuple[int, Message]:
        number = len(self.talk.prompts)
        if beside:
            self.beside.add(number)
        history, tools = list(history), () if beside else TOOLS
        answer = self.talk.call(history, self.sample(whole), tools, finish=finish)
        if not beside:  # other tools: another prompt
            self.know(number, history, answer, last)
        return number, answer


def left_behind(turns: list[tuple[int, Turn]]) -> set[int]:
    """Work out the abandoned calls by comparing whole prompts: slow and plain."""
    full = {n: t.prompt_ids + t.completion.token_ids for n, t in turns}
    parent: dict[int, int] = {}
    for n, turn in turns:
        fits = [
            m for m in full if m < n and turn.prompt_ids[: len(full[m])] == full[m]
        ]  # fmt: skip
        if fits:
            parent[n] = max(fits, key=lambda m: (len(full[m]), m))

    def latest(n: int) -> int:
        return max([n, *(latest(m) for m in parent if parent[m] == n)])

    found = set()
    for n, turn in turns:
        if n in parent.values():
            continue
        others = [m for m, other in turns if m != n and other.prompt_ids == turn.prompt_ids]
        later = any(m in parent.values() and latest(m) > n for m in others)
        if turn.completion.finish_reason == "abort" or later:
            found.add(n)
    return found


def check(client: Client) -> Counter[str]:
    talk = client.talk
    turns = talk.conversation.turns()
    assert [turn.prompt_ids for turn in turns] == talk.prompts
    assert [turn.completion for turn in turns] == talk.completions
    aux = {n for n, turn in enumerate(turns) if turn.kind == "aux"}
    if any(n not in client.beside for n in range(len(turns))):
        assert aux == client.beside
    work = [(n, t) for n, t in enumerate(turns) if n not in aux and t.completion.token_ids]
    abandoned = left_behind(work)
    assert not abandoned & client.used, "what the agent went on from is trained"
    sampled = {n for n in client.partial if talk.completions[n].token_ids}
    assert sampled <= abandoned, "what nobody saw is not"

    member = trajectory(1, *turns)
    rows = make_rows(member.episode)
    trained = talk.trained()
    assert trained == talk.names(*(n for n, _ in work if n not in abandoned)), "each of them once"
    assert talk.trained(abandoned="train") == talk.names(
        *(n for n, t in work if t.completion.finish_reason != "abort" or n not in abandoned)
    )
    check_rows(talk, rows)
    check_ledger(talk, member, rows)
    return Counter(rows.forks_by_cause)


def check_rows(talk: Talk, rows) -> None:
    """Behind its own context, with its own version, in arrays of one length."""
    place = {
        name: (number, at)
        for number, completion in enumerate(talk.completions)
        for at, name in enumerate(completion.logprobs)
    }
    for row in rows.sequences:
        arrays = (row.token_ids, row.mask, row.behavior_logprobs, row.weight_versions)
        assert len({len(array) for array in arrays}) == 1
        idle = row.mask == 0
        assert (row.behavior_logprobs[idle] == 0).all() and (row.weight_versions[idle] == -1).all()
        ids = tuple(row.token_ids.tolist())
        for position in np.flatnonzero(row.mask):
            number, at = place[float(row.behavior_logprobs[position])]
            completion = talk.completions[number]
            assert ids[position] == completion.token_ids[at]
            assert row.weight_versions[position] == completion.weight_versions[at]
            context = talk.prompts[number] + completion.token_ids[:at]
            assert ids[:position] == context


def check_ledger(talk: Talk, member, rows) -> None:
    """Sampled, trained and dropped are counted by three hands and agree."""
    sampled = sum(len(completion.token_ids) for completion in talk.completions)
    other = trajectory(0, index=1)  # a member without tokens has no say in the statistics
    longest = max([len(row.token_ids) for row in rows.sequences], default=1)
    made = assemble(
        [TrajectoryGroup(task_id="t", trajectories=(member, other))],
        objective(),
        row_length=max(2, longest - 1),  # the longest rows are overlong
        micro_rows=1,
        updates=1,
        seed=0,
        skip_zero=False,
    )
    Ledger().sample(sampled).train(made.trained).drop_all(made.dropped).check_closed()


@settings(max_examples=2500)
@given(st.lists(st.sampled_from(MOVES), max_size=9), st.integers(0, 2**32))
def test_every_sampled_token_is_trained_once_or_counted(moves, seed) -> None:
    client = Client(random.Random(seed))
    for move in moves:
        client.play(move)
    check(client)


def test_long_sessions_see_every_cause() -> None:
    causes: Counter[str] = Counter()
    for seed in range(25):
        chance = random.Random(seed)
        client = Client(chance)
        for _ in range(50):
            client.play(chance.choice(MOVES))
        causes += check(client)
    assert set(causes) >= {"branch", "compaction", "content", "edit", "new", "retry", "system"}
