"""Which tokens does a client's history stand for? Those it was sampled as, and a rendered rest.

    place(messages, tools) -> prompt ids = stored ids of the longest known history + rendered delta
    record(placement, completion, message) -> the call is a node of the graph
    turns() -> core Turns, from which batching/sequences.py makes rows

A history is known by its messages (gateway/matching.py), never by rendering it again: what a client
merely replays goes on from the stored ids. Where it really changed, the new prompt shares the
stored ids up to the change, and a row of its own begins, whose cause is counted
(gateway/forks.py).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_jax.batching.sequences import AGENT, AUX, check_completion
from skyrl_jax.core.errors import ConfigError, DataError
from skyrl_jax.core.protocols import Renderer
from skyrl_jax.core.types import Completion, Message, ToolDef, Turn
from skyrl_jax.gateway.forks import cause
from skyrl_jax.gateway.graph import Call, Graph, Match
from skyrl_jax.gateway.matching import EXACT, likeness

LACKING = "lacking"  # kind of a call that cannot be trained: context alone, whoever uses it
_RECENT = 8  # ends that are found without a walk from the root: sub-agents take turns

RendererFor = Callable[[tuple[ToolDef, ...]], Renderer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a history stands, and the prompt that it is.

    Args:
        prompt_ids: what the engine is asked to continue (a copy: nobody else changes it).
        parent: number of the call whose tokens the prompt begins with; ``None``: of none.
        fork: why a row begins here; "" where the parent's row goes on, and for the first call.
        how: how the parent's answer came back.
        messages: the whole history. ``tools``: what it offers to the model.
        known: tokens of ``prompt_ids`` that are the parent's.
        same: numbers of the calls of exactly this history.
        uses: number of a call with other tools whose answer stands in this history.
    """

    prompt_ids: array[int]
    parent: int | None
    fork: str
    how: str
    messages: tuple[Message, ...]
    tools: tuple[ToolDef, ...]
    known: int
    same: tuple[int, ...]
    uses: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A recorded answer: the number of its call, the tokens and the message."""

    node: int
    completion: Completion
    message: Message


@dataclass(slots=True, kw_only=True, eq=False)
class _Family:
    """The calls that offer the same tools: they alone can share a prompt."""

    tools: tuple[ToolDef, ...]
    renderer: Renderer
    roots: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _End:
    """A call that is likely continued next: the history it was sent with and all its tokens."""

    call: Call
    family: _Family
    sent: tuple[Message, ...]
    ids: array[int]


class Conversation:
    """The calls of one session. Not for several threads: one event loop owns it.

    Args:
        renderer_for: makes the renderer of a set of tools. Its ``stop_token_ids``, where it has
            them, say which last token closed an answer; else the finish reason does.
        aux_without_tools: a call that offers no tools, in a session whose other calls do, is no
            work of the agent (a title, a summary), unless one of them replays its answer.

    Example::

        placement = conversation.place(messages, tools)
        answer = conversation.retry(placement)
        if answer is None:
            completion = await generator.generate(placement.prompt_ids, sampling, session)
            message = renderer.parse(completion.token_ids, completion.finish_reason)
            conversation.record(placement, completion, message)
    """

    def __init__(self, renderer_for: RendererFor, *, aux_without_tools: bool = True) -> None:
        self._renderer_for = renderer_for
        self._aux_without_tools = aux_without_tools
        self._graph = Graph()
        self._families: list[_Family] = []
        self._ends: list[_End] = []  # the latest last
        self._ambiguous = False  # whether a history can stand below two calls of one parent
        self._replays: Counter[str] = Counter()

    def place(self, messages: Sequence[Message], tools: Sequence[ToolDef] = ()) -> Placement:
        """Find where a history continues and render what is new in it. Records nothing.

        Raises:
            DataError: there is no message, or the model's template has no such history or tools.
        """
        history = tuple(messages)
        if not history:
            raise DataError("the history is empty: a call needs at least one message")
        family = self._family(tuple(tools))
        match = self._find(family, history)
        known_answers = self._graph.goes_on(match) and not _answered(history, match)
        other = Match() if known_answers else self._elsewhere(family, history)
        prompt, known = self._prompt(family, history, match)
        return Placement(
            prompt_ids=prompt,
            parent=match.call.number if match.call else None,
            fork=self._fork(family, history, match, other),
            how=match.how,
            messages=history,
            tools=family.tools,
            known=known,
            same=tuple(call.number for call in match.same),
            uses=other.call.number if other.call else None,
        )

    def retry(self, placement: Placement) -> Answer | None:
        """Return the recorded answer where the same call is sent again, else ``None``.

        It is the same call while none of its answers was continued; an answer whose caller left
        before its end is not handed out.
        """
        same = [self._graph.calls[number] for number in placement.same]
        whole = [call for call in same if call.completion.finish_reason != "abort"]
        if not whole or any(call.children for call in same):
            return None
        self._replays["retries"] += 1
        call = whole[-1]
        return Answer(node=call.number, completion=call.completion, message=call.answer)

    def record(
        self,
        placement: Placement,
        completion: Completion,
        message: Message,
        *,
        kind: str = AGENT,
        timings: Mapping[str, float] | None = None,
    ) -> int:
        """Keep an answered call and return its number.

        Args:
            placement: of this conversation.
            completion: the engine's answer to ``placement.prompt_ids``.
            message: what it was parsed to, as the client will get it.
            kind: AUX marks a call that is no work of the agent, unless one of its work goes on from
                it; LACKING one that can never be trained.
            timings: seconds, for the Turn.

        Raises:
            DataError: the completion cannot be trained, or ``kind`` is unknown.
        """
        number = len(self._graph.calls)
        if kind not in (AGENT, AUX, LACKING):
            raise DataError(f"call {number}: kind {kind!r} is neither {AGENT!r} nor {AUX!r}")
        check_completion(completion, f"call {number}")
        family = self._family(placement.tools)
        above = None if placement.parent is None else self._graph.calls[placement.parent]
        call = Call(
            number=number,
            parent=placement.parent,
            added=placement.messages[above.depth if above else 0 :],
            delta=placement.prompt_ids[placement.known :],
            completion=completion,
            answer=message,
            depth=len(placement.messages) + 1,
            with_tools=bool(placement.tools),
            mark=kind,
            fork=placement.fork or self._late_fork(above),
            timings=dict(timings or {}),
        )
        siblings = family.roots if above is None else above.children
        self._ambiguous = self._ambiguous or self._graph.ambiguous(siblings, call)
        self._graph.calls.append(call)
        siblings.append(number)
        if placement.how not in ("", EXACT):
            self._replays[f"replayed_{placement.how}"] += 1
        if placement.uses is not None:
            for used in self._graph.path(self._graph.calls[placement.uses]):
                used.used = True
        if kind == AGENT and above is not None:
            self._claim(above)
        self._remember(call, family, placement)
        return number

    def claim(self, number: int) -> None:
        """Make a marked call, and those that it continues, work of the agent after all."""
        self._claim(self._graph.calls[number])

    def _claim(self, call: Call) -> None:
        at: Call | None = call
        while at is not None and at.mark != AGENT:
            above = None if at.parent is None else self._graph.calls[at.parent]
            if at.mark == AUX:
                at.mark, at.fork = AGENT, at.fork or self._late_fork(above)
            at = above

    def turns(self) -> tuple[Turn, ...]:
        """Return all calls as Turns, in the order of their answers, with their whole prompts."""
        turns: list[Turn] = []
        begun = False
        for call, kind in zip(self._graph.calls, self._kinds(), strict=True):
            prompt = tuple(call.delta)
            if call.parent is not None:
                before = turns[call.parent]
                # the long part is copied once
                prompt = before.prompt_ids + (before.completion.token_ids + prompt)
            fork = call.fork if kind == AGENT and begun else ""
            begun = begun or kind == AGENT
            turns.append(
                Turn(
                    prompt_ids=prompt,
                    completion=call.completion,
                    timings=call.timings,
                    kind=kind,
                    fork=fork,
                )
            )
        return tuple(turns)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how many calls there were, and of which sort.

        calls; aux; aborted (their caller left); forks, and ``forks_<cause>``; retries (recorded
        answers handed out again); replayed_trimmed and replayed_unreasoned (answers that came back
        without their outer whitespace, without their reasoning, and went on from the stored ids).
        """
        calls, kinds = self._graph.calls, self._kinds()
        work = [call for call, kind in zip(calls, kinds, strict=True) if kind == AGENT]
        forks = Counter(f"forks_{call.fork}" for call in work[1:] if call.fork)
        return {
            "calls": len(calls),
            "aux": len(calls) - len(work),
            "aborted": sum(call.completion.finish_reason == "abort" for call in calls),
            "forks": forks.total(),
            **forks,
            **self._replays,
        }

    # -- finding ---------------------------------------------------------------------------------

    def _family(self, tools: tuple[ToolDef, ...]) -> _Family:
        for family in self._families:
            if family.tools == tools:
                return family
        try:
            renderer = self._renderer_for(tools)
        except ConfigError as error:
            raise DataError(str(error)) from error
        family = _Family(tools=tools, renderer=renderer)
        self._families.append(family)
        return family

    def _find(self, family: _Family, history: tuple[Message, ...]) -> Match:
        """Look at the latest ends first: a history that only grew is not walked from its root.

        Where it could stand below two calls, an end below one of them may not be the longest match.
        """
        for end in () if self._ambiguous else reversed(self._ends):
            size = len(end.sent)
            if end.family is family and size < len(history) and history[:size] == end.sent:
                how = likeness(end.call.answer, history[size])
                if how:
                    match = self._graph.find((), history, end.call)
                    match.how = match.how or how
                    return match
        return self._graph.find(family.roots, history)

    def _elsewhere(self, family: _Family, history: tuple[Message, ...]) -> Match:
        """Return the longest match among the calls that offer other tools."""
        best = Match()
        for other in self._families:
            if other is not family:
                match = self._graph.find(other.roots, history)
                best = max(best, match, key=lambda m: (m.call.depth if m.call else 0, m.shared))
        return best

    # -- rendering -------------------------------------------------------------------------------

    def _prompt(
        self, family: _Family, history: tuple[Message, ...], match: Match
    ) -> tuple[array[int], int]:
        """Return the prompt and how many of its tokens are those of the call it continues."""
        above = match.call
        ids = array("i") if above is None else self._ids(above)[:]
        known = len(ids)
        parent = None if above is None else above.number
        twins = [call for call in match.same if call.parent == parent]
        if twins:
            ids.extend(twins[-1].delta)
        elif above is None:
            ids.extend(family.renderer.initial(history))
        else:
            stopped = _stopped(family.renderer, above.completion)
            new = history[above.depth :]
            ids.extend(family.renderer.delta(new, stopped=stopped, after=above.answer))
        return ids, known

    def _ids(self, call: Call) -> array[int]:
        """Return all tokens of a call, its completion included. Not to be changed."""
        for end in () if self._ambiguous else reversed(self._ends):
            if end.call is call:
                return end.ids
        ids = array("i")
        for part in self._graph.path(call):
            ids.extend(part.delta)
            ids.extend(part.completion.token_ids)
        return ids

    def _remember(self, call: Call, family: _Family, placement: Placement) -> None:
        """Keep the call as an end; one of the work stands in for the end that it continues."""
        above = next((end for end in self._ends if end.call.number == call.parent), None)
        if above is None or call.mark != AGENT:
            ids = placement.prompt_ids[:]
        else:
            self._ends.remove(above)
            ids = above.ids  # nobody else has it: grown in place, at the cost of what is new
            ids.extend(call.delta)
        ids.extend(call.completion.token_ids)
        made = _End(call=call, family=family, sent=placement.messages, ids=ids)
        self._ends = [*self._ends, made][-_RECENT:]

    # -- telling apart ---------------------------------------------------------------------------

    def _fork(
        self, family: _Family, history: tuple[Message, ...], match: Match, other: Match
    ) -> str:
        """Return why a row begins here, "" where none does."""
        if not self._graph.calls or self._graph.goes_on(match):
            return ""
        openings = (self._graph.calls[number] for number in family.roots)
        return cause(history, match, other, openings)

    def _late_fork(self, above: Call | None) -> str:
        """Return why a row begins here after all: what was answered since the call was placed."""
        if above is None:
            return "new" if self._graph.calls else ""
        went_on = any(self._graph.calls[number].mark == AGENT for number in above.children)
        return "branch" if went_on else ""

    def _kinds(self) -> list[str]:
        """Return the kind of every call: by its mark, or by its lack of tools."""
        calls = self._graph.calls
        tools_expected = self._aux_without_tools and any(
            call.with_tools for call in calls if call.mark == AGENT
        )

        def beside(call: Call) -> bool:
            untold = tools_expected and not call.with_tools and not call.used
            return call.mark != AGENT or untold

        return [AUX if beside(call) else AGENT for call in calls]


def _answered(history: Sequence[Message], match: Match) -> bool:
    """Return whether what is new in a history holds answers, which may be of other calls."""
    start = match.call.depth if match.call else 0
    return any(message.role == "assistant" for message in history[start:])


def _stopped(renderer: Renderer, completion: Completion) -> bool:
    """Return whether an answer's last token closed it.

    By the token: an engine may say "length" of an answer whose last allowed token closed it.
    """
    if not completion.token_ids:
        return False
    stops = getattr(renderer, "stop_token_ids", None)
    if stops is None:
        return completion.finish_reason == "stop"
    return completion.token_ids[-1] in stops
