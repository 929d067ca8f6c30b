"""Episode -> Sequences: every sampled token the agent used, in exactly one row, verbatim.

A turn whose prompt begins with everything of an earlier turn (its prompt + its completion, by
token) continues that turn. If the earlier turn is the end of its row, the row grows; otherwise, or
where the prompt was rewritten, a new row begins, in which only this turn's own tokens are trained.
The longest match wins.

Not trained, and counted:
    aux        calls beside the agent's work (titles, summaries), by their mark
    abandoned  a completion that nobody continued, though the agent went on from another one of the
               same prompt after it was sampled; and a partial one, whose caller left before its end
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import (
    LOGPROB_CEILING,
    LOGPROB_FLOOR,
    Completion,
    Episode,
    RoutingArray,
    Sequence,
    Turn,
)

AGENT, AUX = "agent", "aux"  # kinds of a Turn
POLICIES = ("drop", "train")  # what becomes of abandoned samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one episode.

    ``sampled_tokens`` = tokens with mask 1 + ``abandoned_tokens`` + ``aux_tokens``.
    ``forks_by_cause`` counts the rows beyond the first by why they began (``Turn.fork``; where that
    is not told, "branch": an earlier turn went on elsewhere, or "rewrite": none has this history).
    """

    sequences: tuple[Sequence, ...]
    abandoned_tokens: int = 0
    aux_tokens: int = 0
    forks_by_cause: Mapping[str, int] = field(default_factory=dict)

    @property
    def forks(self) -> int:
        """Return the number of rows beyond the first."""
        return sum(self.forks_by_cause.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Return the tokens that are in no row's mask, by the ledger's causes; no zeros."""
        counts = {"abandoned": self.abandoned_tokens, "aux": self.aux_tokens}
        return {cause: tokens for cause, tokens in counts.items() if tokens}


@dataclass(slots=True, kw_only=True)
class _Row:
    """A row in the making; its lists grow only together, in ``append``."""

    cause: str = ""  # why it began
    ids: list[int] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed: list[RoutingArray] = field(default_factory=list)  # what each turn added

    def append(self, prompt: Seq[int], completion: Completion) -> int:
        """Add context (mask 0) and a completion (mask 1); return where the completion starts."""
        self.ids += [*prompt, *completion.token_ids]
        self.mask += [0.0] * len(prompt) + [1.0] * len(completion.token_ids)
        self.logprobs += [0.0] * len(prompt) + list(completion.logprobs)
        self.versions += [-1] * len(prompt) + list(completion.weight_versions)
        if completion.routed_experts is not None:
            # A call tells the routing of all that it fed, and what stands in the row is what it
            # fed. Of tokens that an earlier call fed the earlier answer stays: it made the sample.
            told = sum(len(part) for part in self.routed)
            self.routed.append(completion.routed_experts[told:])
        return len(self.ids) - len(completion.token_ids)

    def mask_out(self, start: int, size: int) -> None:
        """Make context of a completion that shall not be trained."""
        end = start + size
        self.mask[start:end] = [0.0] * size
        self.logprobs[start:end] = [0.0] * size
        self.versions[start:end] = [-1] * size


@dataclass(slots=True, kw_only=True)
class _Node:
    """One turn: where it ends in its row, what it continues, and whether it was continued."""

    row: _Row
    turn: Turn
    index: int  # of the turn; rising in time
    start: int  # of the completion in the row
    parent: _Node | None
    latest: int  # index of the latest turn that continues it, directly or not; its own if none does

    @property
    def sampled(self) -> int:
        return len(self.turn.completion.token_ids)

    @property
    def size(self) -> int:
        return len(self.turn.prompt_ids) + self.sampled

    def is_prefix_of(self, prompt: tuple[int, ...]) -> bool:
        """Compare the sampled part first: it is short, and where it differs the rest is not read.

        ``prompt`` must be at least as long.
        """
        start, ids = len(self.turn.prompt_ids), self.turn.completion.token_ids
        end = start + len(ids)
        return (
            prompt[end - 1] == ids[-1]
            and prompt[start:end] == ids
            and prompt[:start] == self.turn.prompt_ids
        )


@dataclass(slots=True, kw_only=True)
class _Ends:
    """The ends of all turns so far by length, so that the longest is tried first.

    A prompt that only grows is compared once with the turn before it: an episode costs the sum of
    its prompts, not turns x that.
    """

    sizes: list[int] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)

    def add(self, node: _Node) -> None:
        at = bisect_right(self.sizes, node.size)  # behind its equals: the latest of them is tried
        self.sizes.insert(at, node.size)  # first, so that a retry replaces what it repeats
        self.nodes.insert(at, node)

    def longest(self, prompt: tuple[int, ...]) -> _Node | None:
        for at in range(bisect_right(self.sizes, len(prompt)) - 1, -1, -1):
            if self.nodes[at].is_prefix_of(prompt):
                return self.nodes[at]
        return None


def rollout_id(episode: Episode) -> str:
    """Return the name of an episode in a batch: "<task_id>/<sample_index>"."""
    return f"{episode.task_id}/{episode.sample_index}"


def make_rows(episode: Episode, *, abandoned: str = "drop", routing: bool = False) -> Rows:
    """Build the training rows of an episode.

    Args:
        episode: its turns in the order in which they were answered.
        abandoned: "drop" or "train" what was sampled and left for another sample of the same
            prompt. Partial completions that nobody continued are always dropped: their end is the
            caller's, not the policy's.
        routing: refuse a completion that does not tell which experts its tokens went through.

    Raises:
        DataError: a completion has log-probs that are missing, NaN, positive or filler, a negative
            token id, or no routing where it is needed; a turn is of no known kind; the message
            names the turn and the token.
    """
    if abandoned not in POLICIES:
        raise DataError(f"abandoned samples: {abandoned!r} is none of {', '.join(POLICIES)}")
    ends, rows, nodes, aux = _Ends(), list[_Row](), list[_Node](), 0
    for index, turn in enumerate(episode.turns):
        name = f"{rollout_id(episode)} turn {index}"
        if turn.kind == AUX:
            aux += len(turn.completion.token_ids)
            continue
        if turn.kind != AGENT:
            raise DataError(f"{name}: kind {turn.kind!r} is neither {AGENT!r} nor {AUX!r}")
        check_completion(turn.completion, name, routing=routing)
        if turn.completion.token_ids:  # an empty answer has nothing to train and nothing to show
            nodes.append(_place(turn, index, ends, rows))
            ends.add(nodes[-1])
    left = _abandoned(nodes, drop_replaced=abandoned == "drop")
    for node in left:
        node.row.mask_out(node.start, node.sampled)
    kept = [row for row in rows if any(row.mask)]
    return Rows(
        sequences=tuple(_sequence(episode, row) for row in kept),
        abandoned_tokens=sum(node.sampled for node in left),
        aux_tokens=aux,
        forks_by_cause=dict(Counter(row.cause for row in kept[1:])),
    )


def check_completion(completion: Completion, name: str, *, routing: bool = False) -> None:
    """Refuse a completion that cannot be trained; ``name`` says whose it is.

    Raises:
        DataError: see ``make_rows``.
    """
    for position, value in enumerate(completion.logprobs):
        if value is None or not LOGPROB_FLOOR < value <= LOGPROB_CEILING:  # true for NaN too
            raise DataError(
                f"{name}: log-prob of token {position} is {value}; it must be finite, <= 0 and "
                f"> {LOGPROB_FLOOR:g} nats (the engine must return one for every sampled token)"
            )
    if any(token < 0 for token in completion.token_ids):
        raise DataError(f"{name}: a sampled token id is negative")
    if routing and completion.token_ids and completion.routed_experts is None:
        raise DataError(
            f"{name}: the completion has no routed_experts; start the server with "
            "--enable-return-routed-experts, or set rollout.replay_routing to False"
        )


def _place(turn: Turn, index: int, ends: _Ends, rows: list[_Row]) -> _Node:
    """Continue the longest turn that this prompt extends, or begin a row."""
    parent = ends.longest(turn.prompt_ids)
    if parent is not None and len(parent.row.ids) == parent.size:
        row, known = parent.row, parent.size
    else:
        cause = turn.fork or ("rewrite" if parent is None else "branch")
        row, known = _Row(cause=cause), 0
        rows.append(row)
    start = row.append(turn.prompt_ids[known:], turn.completion)
    return _Node(row=row, turn=turn, index=index, start=start, parent=parent, latest=index)


def _abandoned(nodes: list[_Node], *, drop_replaced: bool) -> list[_Node]:
    """Return the turns whose completions the agent left behind."""
    went_on: dict[int, list[_Node]] = defaultdict(list)  # continued turns, by length of prompt
    for node in reversed(nodes):  # a turn comes after what it continues
        if node.latest > node.index:
            went_on[len(node.turn.prompt_ids)].append(node)
        if node.parent is not None:
            node.parent.latest = max(node.parent.latest, node.latest)

    def replaced(node: _Node) -> bool:
        prompt = node.turn.prompt_ids
        return any(
            other.latest > node.index and other.turn.prompt_ids == prompt
            for other in went_on[len(prompt)]
        )

    return [
        node
        for node in nodes
        if node.latest == node.index
        and (node.turn.completion.finish_reason == "abort" or (drop_replaced and replaced(node)))
    ]


def _routing(row: _Row) -> RoutingArray | None:
    """Return the experts of the row's tokens, -1 for the last ones that no call fed."""
    if not row.routed:
        return None
    told = np.concatenate(row.routed)
    rest = np.full((len(row.ids) - len(told), *told.shape[1:]), -1, np.int16)
    return np.concatenate([told, rest])


def _sequence(episode: Episode, row: _Row) -> Sequence:
    if row.mask[0]:
        raise DataError(f"{rollout_id(episode)}: a row begins with a sampled token (empty prompt)")
    return Sequence(
        rollout_id=rollout_id(episode),
        token_ids=np.asarray(row.ids, np.int32),
        mask=np.asarray(row.mask, np.float32),
        behavior_logprobs=np.minimum(np.asarray(row.logprobs, np.float32), np.float32(0.0)),
        weight_versions=np.asarray(row.versions, np.int32),
        temperature=episode.temperature,
        routed_experts=_routing(row),
    )
