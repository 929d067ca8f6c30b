"""A record of calls that knows only plain replays: until gateway/conversation.py is there."""

from dataclasses import dataclass, field, replace

from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import Turn


@dataclass
class Place:
    prompt_ids: tuple
    parent: int | None
    messages: tuple


def _bare(message):
    return replace(message, reasoning=None, content=message.content.strip())


@dataclass
class Conversation:
    renderer_for: object
    calls: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)

    def place(self, messages, tools=()):
        for number in reversed(range(len(self.calls))):
            place, completion, answer, *_ = self.calls[number]
            known = (*place.messages, answer)
            sent = tuple(messages[: len(known)])
            if sent and (sent[:-1], _bare(sent[-1])) == (known[:-1], _bare(answer)):
                ids = (*place.prompt_ids, *completion.token_ids)
                new = messages[len(known) :]
                stopped = completion.finish_reason == "stop"
                delta = self.renderer_for(tools).delta(new, stopped=stopped, after=answer)
                return Place((*ids, *delta), number, tuple(messages))
        try:
            ids = self.renderer_for(tools).initial(messages)
        except KeyError as error:
            raise DataError(f"no template for {error}") from None
        return Place(tuple(ids), None, tuple(messages))

    def record(self, placement, completion, message, *, kind="agent", timings=None):
        self.calls.append((placement, completion, message, kind, dict(timings or {})))
        return len(self.calls) - 1

    def retry(self, placement):
        for number, call in enumerate(self.calls):
            if call[0].prompt_ids == placement.prompt_ids:
                if any(other[0].parent == number for other in self.calls):
                    return None
                return call
        return None

    def turns(self):
        return tuple(
            Turn(prompt_ids=p.prompt_ids, completion=c, timings=t, kind=kind)
            for p, c, _, kind, t in self.calls
        )
