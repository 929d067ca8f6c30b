"""One episode at the gateway: its requests become generation calls, and its calls a record.

    ChatRequest -> place (which recorded call does it continue?) -> generate by ids -> parse
                -> record -> Answer

Sampling parameters are the session's, whatever a request asks for: log-probs of other ones could
not be compared. Equal requests are one call: while it runs they join it, afterwards they get its
recorded answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_jax.agents.seeds import derive_seed
from skyrl_jax.batching.sequences import AGENT, AUX
from skyrl_jax.core.errors import DataError, GenerationError, HostError, InfraError
from skyrl_jax.core.types import (
    LOGPROB_CEILING,
    LOGPROB_FLOOR,
    Completion,
    Message,
    SamplingParams,
)
from skyrl_jax.gateway.budget import Spent
from skyrl_jax.gateway.calls import (
    Answer,
    ChatRequest,
    Recorded,
    evaluation_only,
)
from skyrl_jax.gateway.conversation import LACKING, Conversation, Placement
from skyrl_jax.gateway.dialects.base import Dialect
from skyrl_jax.gateway.digests import Digests
from skyrl_jax.gateway.flight import Flight, Mark
from skyrl_jax.gateway.memory import Memory
from skyrl_jax.gateway.parts import NOT_NAMED, Listener, Repeat, SessionParts
from skyrl_jax.gateway.refusals import Cause, Refused

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0  # for cancelled calls to end
_NAMES = 1024  # Idempotency-Keys that are remembered, the latest
_VALUES = 8  # distinct values kept of one parameter that was not used
_PINNED = ("temperature", "top_p", "top_k", "min_p")

_Key = tuple[bytes, int | None]


class Session:
    """One episode's door; ``gateway.open`` makes it.

    Attributes:
        session_id: its name, also the generator's routing key.
        key: its secret API key.
        root: base URL without /v1 (what Anthropic clients take).
    """

    def __init__(self, session_id: str, key: str, root: str, parts: SessionParts) -> None:
        """Nothing runs before the first request."""
        self.session_id, self.key, self.root = session_id, key, root
        self._parts = parts
        self._conversation: Conversation = parts.conversation
        self._flights: dict[_Key, Flight] = {}
        self._named: dict[str, tuple[bytes, Flight]] = {}
        self._draws: Counter[_Key] = Counter()  # answers that each call has got
        self._past: dict[str, tuple[Message, ...]] = {}
        self._memories: dict[Dialect, Memory] = {}
        self._digests = Digests()
        self._spent = Spent()
        self._faults: dict[_Key | None, HostError] = {}
        self._counts: Counter[str] = Counter()
        self._asked: dict[str, list[Any]] = {}
        self._lacking = ""
        self._limit = ""
        self._messages: tuple[Message, ...] = ()
        self._listeners: list[Listener] = []
        self._closing: asyncio.Task[Recorded] | None = None

    @property
    def url(self) -> str:
        """Base URL with /v1 (what OpenAI clients take)."""
        return f"{self.root}/v1"

    @property
    def closed(self) -> bool:
        """Whether requests are refused."""
        return self._closing is not None

    # -- requests --------------------------------------------------------------------------------

    async def serve(
        self, chat: ChatRequest, repeat: Repeat = NOT_NAMED, *, aux: bool = False
    ) -> Answer:
        """Answer a request; cancelling it lets its generation go (if nobody else waits for it).

        Raises:
            Refused: closed, over budget, a history that cannot be rendered, or the host failed.
        """
        flight = self._flight(chat, repeat, aux)
        try:
            answer = await flight.join()
        except asyncio.CancelledError:
            self._counts["left"] += 1
            raise
        if answer is None:
            raise self._refuse_closed()
        if chat.carried is not None:
            self._past[answer.ident] = (*chat.carried, answer.message)
        return answer

    def count(self, chat: ChatRequest) -> int:
        """Return how many tokens a history's prompt has; nothing is recorded."""
        self._check_open()
        return len(self._place(chat).prompt_ids)

    def memory(self, dialect: Dialect) -> Memory:
        """Return what is remembered of a dialect's requests, to read the next one by.

        Raises:
            Refused: closed.
        """
        self._check_open()
        if dialect not in self._memories:  # the look-up is the dict's: no cycle holds a session
            self._memories[dialect] = dialect.memory(self._past.get)
        return self._memories[dialect]

    def note(self, name: str) -> None:
        """Count something that happened at this session's door."""
        self._counts[name] += 1

    def note_bug(self, error: Exception) -> None:
        """Remember an error of our own: the episode is FAILED."""
        self._fail(None, InfraError(f"the gateway broke: {error!r}", cause="gateway"))

    def _flight(self, chat: ChatRequest, repeat: Repeat, aux: bool) -> Flight:
        """Return the call that answers a request: one that there was already, or a new one."""
        self._check_open()
        if repeat.key and (found := self._by_name(repeat)) is not None:
            return self._again(found, chat, aux)
        placement = self._place(chat)
        key = (self._digests.of(placement.prompt_ids), chat.max_tokens)
        flight = self._flights.get(key)
        if flight is not None and self._holds(flight, placement):
            self._again(flight, chat, aux)
        else:
            flight = self._begin(key, chat, placement, Mark(kind=AUX if aux else AGENT))
        if repeat.key:
            self._named[repeat.key] = (repeat.digest, flight)
            while len(self._named) > _NAMES:
                del self._named[next(iter(self._named))]
        return flight

    def _by_name(self, repeat: Repeat) -> Flight | None:
        digest, flight = self._named.get(repeat.key, (repeat.digest, None))
        if digest != repeat.digest:
            raise Refused(
                Cause.INVALID,
                "this Idempotency-Key was used for another body; a new request needs a new key",
                param="Idempotency-Key",
            )
        return flight if flight is not None and flight.usable else None

    def _holds(self, flight: Flight, placement: Placement) -> bool:
        """Return whether an equal request gets this flight's answer, or a new sample."""
        if flight.running or not flight.usable:
            return flight.usable
        if flight.replays >= self._parts.max_replays:
            self._counts["resampled"] += 1
            return False
        # None: the answer was continued already, so that the agent came back for another one
        return self._conversation.retry(placement) is not None

    def _again(self, flight: Flight, chat: ChatRequest, aux: bool) -> Flight:
        flight.replays += not flight.running
        self._counts["joined" if flight.running else "replayed"] += 1
        if not aux and flight.mark.kind != AGENT:  # the agent asks as well: its answer is work
            flight.mark.kind = AGENT
            if flight.mark.number is not None:
                self._conversation.claim(flight.mark.number)
                self._messages = (*chat.messages, flight.task.result().message)
        return flight

    def _begin(self, key: _Key, chat: ChatRequest, placement: Placement, mark: Mark) -> Flight:
        limits = (self._parts.sampling.max_new_tokens, chat.max_tokens)
        wanted = min(limit for limit in limits if limit is not None)
        try:
            running = sum(flight.running and flight.usable for flight in self._flights.values())
            size = len(placement.prompt_ids)
            room = self._spent.room(self._parts.budget, size, wanted, running=running)
        except Refused as refused:
            self._limit = refused.limit
            self._counts[f"refused_{refused.limit}"] += 1
            raise
        self._note_asked(chat.asked)
        sampling = replace(self._parts.sampling, max_new_tokens=room, seed=self._seed(key))
        flight = Flight(self._answer(key, chat, placement, sampling, mark), mark)
        self._flights[key] = flight
        return flight

    def _seed(self, key: _Key) -> int | None:
        """Derive a call's seed from what is asked, so that arrival order does not matter."""
        base = self._parts.sampling.seed
        if base is None:
            return None
        return derive_seed(base, key[0].hex(), key[1], self._draws[key])

    # -- one call --------------------------------------------------------------------------------

    async def _answer(
        self,
        key: _Key,
        chat: ChatRequest,
        placement: Placement,
        sampling: SamplingParams,
        mark: Mark,
    ) -> Answer:
        try:
            begun = time.perf_counter()
            completion = await self._generate(placement.prompt_ids, sampling)
            timings = {"generate_s": time.perf_counter() - begun}
            answer = self._record(chat, placement, completion, mark, timings)
        except HostError as error:
            self._fail(key, error)
            text = f"generation failed ({error.cause}); the same request may be sent again"
            raise Refused(Cause.FAULT, text) from None
        except Exception as error:
            _log.exception("session %s: answering broke", self.session_id)
            self.note_bug(error)
            raise Refused(Cause.BUG, "the gateway broke; its log says how") from None
        self._spent.turns += 1
        self._draws[key] += 1
        self._faults.pop(key, None)  # a retry healed it: the agent got what it asked for
        if mark.kind == AGENT:
            self._limit = ""
            self._messages = (*chat.messages, answer.message)
        return answer

    async def _generate(self, ids: Sequence[int], sampling: SamplingParams) -> Completion:
        seconds = self._parts.call_timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await self._parts.generator.generate(ids, sampling, self.session_id)
        except TimeoutError:
            raise GenerationError(
                f"session {self.session_id}: no answer within {seconds:g} s",
                cause="engine_timeout",
            ) from None

    def _record(
        self,
        chat: ChatRequest,
        placement: Placement,
        completion: Completion,
        mark: Mark,
        timings: Mapping[str, float],
    ) -> Answer:
        """Keep what was sampled, whatever it is, and make the answer of it."""
        ids, aborted = completion.token_ids, completion.finish_reason == "abort"
        self._spent.tokens += len(ids)
        lacking = self._check(completion)
        if aborted and not ids:
            raise self._aborted(completion)
        renderer = self._parts.renderer_for(chat.tools)
        message = renderer.parse(ids, "length" if aborted else completion.finish_reason)
        message = _with_call_ids(message)
        kept, kind = completion, mark.kind
        if lacking:  # kept as context that nobody can train by mistake
            self._lacking, kind = lacking, LACKING
            kept = replace(completion, logprobs=(0.0,) * len(ids))
        mark.number = self._conversation.record(
            placement, kept, message, kind=kind, timings=timings
        )
        if aborted:  # its partial tokens are on record, where batching drops them as abandoned
            raise self._aborted(completion)
        return Answer(
            ident=uuid.uuid4().hex,
            created=int(time.time()),
            message=message,
            completion=completion,
            prompt_tokens=len(placement.prompt_ids),
        )

    def _check(self, completion: Completion) -> str:
        """Return what training would miss.

        Raises:
            GenerationError: there is nothing, or the session is for training and something misses.
        """
        lacking = _lacking(completion)
        if lacking == "token ids" or (lacking and self._parts.training):
            raise GenerationError(evaluation_only(lacking), cause="engine_contract")
        return lacking

    def _aborted(self, completion: Completion) -> GenerationError:
        self._counts["aborted"] += 1
        return GenerationError(
            f"session {self.session_id}: the server aborted a call after "
            f"{len(completion.token_ids)} tokens",
            cause="engine_abort",
        )

    def _place(self, chat: ChatRequest) -> Placement:
        try:
            placement = self._conversation.place(chat.messages, chat.tools)
        except DataError as error:
            raise Refused(Cause.INVALID, str(error), param="messages") from None
        return placement

    def _fail(self, key: _Key | None, error: HostError) -> None:
        self._counts["faults"] += 1
        self._faults.setdefault(key, error)

    def _note_asked(self, asked: Mapping[str, Any]) -> None:
        for name, value in asked.items():
            if name in _PINNED and value == getattr(self._parts.sampling, name):
                continue
            self._counts[f"ignored_{name}"] += 1
            values = self._asked.setdefault(name, [])
            if len(values) < _VALUES and value not in values:
                values.append(value)

    # -- its end ---------------------------------------------------------------------------------

    async def socket(self, path: Path | str, *, allow_uid: int, need_key: bool = False) -> Path:
        """Serve this session, and nothing else, on a unix socket.

        Args:
            path: where; its folder is made (0700, the agent's) if it is not there.
            allow_uid: uid of the agent's process as this host sees it. Other peers get 403.
            need_key: refuse requests without the session's key also here.

        Raises:
            ConfigError: the path is too long for a socket, or its folder is open to others.
            InfraError: it cannot be made.
        """
        self._check_open()
        listener = await self._parts.listen(self, Path(path), allow_uid, need_key)
        self._listeners.append(listener)
        return Path(path)

    async def close(self) -> Recorded:
        """Refuse further requests, cancel those under way, and return the record. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        return await asyncio.shield(self._closing)

    async def _close(self) -> Recorded:
        self._parts.forget(self)
        running = {flight.task for flight in self._flights.values() if flight.running}
        for flight in self._flights.values():
            flight.give_up()
        if running:
            await asyncio.wait(running, timeout=_CLOSE_S)
        for listener in self._listeners:
            try:
                await listener.close()
            except OSError:  # its folder is gone: the record must not go with it
                _log.warning("session %s: a socket did not close", self.session_id, exc_info=True)
        self._listeners.clear()  # they know their session: a cycle
        recorded = Recorded(
            turns=self._conversation.turns(),
            counts={**self._conversation.counts, **self._counts},
            messages=self._messages,
            fault=next(iter(self._faults.values()), None),
            limit=self._limit,
            lacking=self._lacking,
            asked={name: tuple(values) for name, values in self._asked.items()},
        )
        self._flights, self._named, self._past, self._memories = {}, {}, {}, {}
        del self._conversation, self._parts, self._digests
        return recorded

    def _check_open(self) -> None:
        if self.closed:
            raise self._refuse_closed()

    def _refuse_closed(self) -> Refused:
        return Refused(Cause.CLOSED, f"session {self.session_id!r} is closed")


def _with_call_ids(message: Message) -> Message:
    """Give every call an id of its own that its dialect's clients can refer to."""
    calls = [replace(call, id=f"call_{uuid.uuid4().hex[:24]}") for call in message.tool_calls]
    return replace(message, tool_calls=tuple(calls)) if calls else message


def _lacking(completion: Completion) -> str:
    if not completion.token_ids and completion.finish_reason != "abort":
        return "token ids"
    known = all(LOGPROB_FLOOR < x <= LOGPROB_CEILING for x in completion.logprobs)
    return "" if known else "log-probs"
