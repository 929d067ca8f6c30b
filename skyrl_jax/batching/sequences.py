"""Episode -> Sequences: every sampled token the agent used, in exactly one row, verbatim.

A turn whose prompt begins with everything of an earlier turn (its prompt + its completion, by
token) continues that turn. If the earlier turn is the end of its row, the row grows; otherwise, or
where the prompt was rewritten, a new row begins, in which only this turn's own tokens are trained.
The longest match wins. A completion that was sampled again from the same prompt and left behind
(its sibling was continued, it was not) is abandoned: not trained.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one episode. ``sampled_tokens`` = tokens with mask 1 + ``abandoned_tokens``."""

    sequences: tuple[Sequence, ...]
    abandoned_tokens: int = 0
    forks: int = 0  # rows beyond the first


@dataclass(slots=True, kw_only=True)
class _Node:
    """One turn: where it ends in its row, and whether it was continued."""

    row: _Row
    turn: Turn
    full: tuple[int, ...]
    start: int  # of the completion in the row
    continued: bool = False


@dataclass(slots=True, kw_only=True)
class _Row:
    """A row in the making; its lists grow only together, in ``append``."""

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


def rollout_id(episode: Episode) -> str:
    """Return the name of an episode in a batch: "<task_id>/<sample_index>"."""
    return f"{episode.task_id}/{episode.sample_index}"


def make_rows(episode: Episode) -> Rows:
    """Build the training rows of an episode.

    Raises:
        DataError: a completion has log-probs that are missing, NaN, positive or filler, or a
            negative token id; the message names the turn and the token.
    """
    nodes: list[_Node] = []
    rows: list[_Row] = []
    for index, turn in enumerate(episode.turns):
        _check(turn.completion, f"{rollout_id(episode)} turn {index}")
        if turn.completion.token_ids:  # an empty answer has nothing to train and nothing to show
            nodes.append(_place(turn, nodes, rows))
    abandoned = _drop_abandoned(nodes)
    sequences = tuple(_sequence(episode, row) for row in rows if any(row.mask))
    return Rows(sequences=sequences, abandoned_tokens=abandoned, forks=max(0, len(sequences) - 1))


def _place(turn: Turn, nodes: list[_Node], rows: list[_Row]) -> _Node:
    """Continue the longest turn that this prompt extends, or begin a row."""
    prompt = turn.prompt_ids
    parent: _Node | None = None
    for node in reversed(nodes):  # the latest of equal length: a retry replaces what it repeats
        size = len(node.full)
        longer = parent is None or size > len(parent.full)
        if longer and size <= len(prompt) and prompt[:size] == node.full:
            parent = node
    known = 0
    if parent is not None:
        parent.continued = True
        if len(parent.row.ids) == len(parent.full):
            known = len(parent.full)
    row = parent.row if parent is not None and known else _Row()
    if not known:
        rows.append(row)
    start = row.append(prompt[known:], turn.completion)
    return _Node(row=row, turn=turn, full=(*prompt, *turn.completion.token_ids), start=start)


def _drop_abandoned(nodes: list[_Node]) -> int:
    """Take the mask off completions that a sibling of the same prompt replaced; count them."""
    went_on = {node.turn.prompt_ids for node in nodes if node.continued}
    tokens = 0
    for node in nodes:
        if not node.continued and node.turn.prompt_ids in went_on:
            size = len(node.turn.completion.token_ids)
            end = node.start + size
            node.row.mask[node.start : end] = [0.0] * size
            node.row.logprobs[node.start : end] = [0.0] * size
            node.row.versions[node.start : end] = [-1] * size
            tokens += size
    return tokens


def _check(completion: Completion, name: str) -> None:
    for position, value in enumerate(completion.logprobs):
        if value is None or not LOGPROB_FLOOR < value <= LOGPROB_CEILING:  # true for NaN too
            raise DataError(
                f"{name}: log-prob of token {position} is {value}; it must be finite, <= 0 and "
                f"> {LOGPROB_FLOOR:g} nats (the engine must return one for every sampled token)"
            )
    if any(token < 0 for token in completion.token_ids):
        raise DataError(f"{name}: a sampled token id is negative")


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
