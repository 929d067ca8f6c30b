"""Sequences -> Batch: first fit, longest first, into rows of one fixed length.

Right padding only; ``segment_ids`` 1.. tell the sequences of a row apart (0 = padding) and
``positions`` restart in each. The number of rows is a multiple of ``micro_rows`` (or fixed), so
that the learner compiles one program; rows of weight 0 fill up. Deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from skyrl_jax.core.errors import DataError
from skyrl_jax.core.types import Batch, FloatArray, Sequence

ROUTED = "routed_experts"  # channel of router replay (learner/step.py), where sequences know it


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A sequence with what it is trained for: loss weights [T] and its rollout's advantage."""

    sequence: Sequence
    weights: FloatArray
    advantage: float


def fits(sequence: Sequence, row_length: int) -> bool:
    """Return whether a sequence fits in a row; one that does not is dropped as overlong."""
    return len(sequence.token_ids) <= row_length


def pack(
    segments: Seq[Segment],
    *,
    row_length: int,
    micro_rows: int,
    total_rows: int | None = None,
    buckets: Seq[int] = (),
) -> Batch:
    """Pack segments into a Batch of [rows, row_length] arrays.

    Args:
        segments: in any order; equal lengths keep their order.
        row_length: tokens per row.
        micro_rows: the number of rows becomes a multiple of this.
        total_rows: the exact number of rows instead (must hold everything).
        buckets: shorter row lengths that may be used instead where the longest segment fits one
            (``bucket_length``): short batches cost less, and there is one program per length.

    Raises:
        DataError: a segment is longer than a row, its arrays differ in length, its first token is
            to be trained, or ``total_rows`` is too small.
    """
    for segment in segments:
        _check(segment, row_length)
    lengths = [len(segment.sequence.token_ids) for segment in segments]
    row_length = bucket_length(lengths, [b for b in (*buckets, row_length) if b <= row_length])
    layout = plan_rows(lengths, row_length)
    rows = -(-max(1, len(layout)) // micro_rows) * micro_rows
    if total_rows is not None:
        if len(layout) > total_rows or total_rows % micro_rows:
            raise DataError(
                f"{len(segments)} sequences need {len(layout)} rows of {row_length} tokens; "
                f"total_rows is {total_rows} (it must hold them and be a multiple of {micro_rows})"
            )
        rows = total_rows
    batch = _blank(rows, row_length, _routing_shape(segments))
    for row, members in enumerate(layout):
        start = 0
        for number, member in enumerate(members, start=1):
            start = _write(batch, row, start, number, segments[member])
    return batch


def bucket_length(lengths: Seq[int], buckets: Seq[int]) -> int:
    """Return the smallest of ``buckets`` (row lengths) that holds the longest sequence.

    Raises:
        DataError: none does, or there is none.
    """
    longest = max(lengths, default=0)
    enough = [bucket for bucket in buckets if bucket >= longest]
    if not enough:
        raise DataError(
            f"no row length of {sorted(buckets)} holds a sequence of {longest} tokens; allow a "
            "longer one, or drop the sequence as overlong"
        )
    return min(enough)


def plan_rows(lengths: Seq[int], row_length: int) -> list[list[int]]:
    """Return which segments go into which row (first fit, longest first)."""
    layout: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        row = next((r for r, free in enumerate(room) if free >= size), len(room))
        if row == len(room):
            layout.append([])
            room.append(row_length)
        layout[row].append(index)
        room[row] -= size
    return layout


def trained_tokens(batch: Batch) -> int:
    """Count the tokens a batch trains: the ledger's own count, from what the learner gets."""
    return int(np.count_nonzero(batch.loss_weights))


def segment_lengths(batch: Batch) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the tokens of every segment of a batch, in row order (for FLOP counts)."""
    rows = [np.bincount(row)[1:] for row in np.asarray(batch.segment_ids)]
    lengths = np.concatenate(rows) if rows else np.zeros(0)
    return lengths[lengths > 0].astype(np.int64)


def _check(segment: Segment, row_length: int) -> None:
    sequence = segment.sequence
    sizes = {
        len(array)
        for array in (
            sequence.token_ids,
            sequence.mask,
            sequence.behavior_logprobs,
            sequence.weight_versions,
            segment.weights,
        )
    }
    if sequence.routed_experts is not None:
        sizes.add(len(sequence.routed_experts))
    if len(sizes) != 1:
        raise DataError(f"{sequence.rollout_id}: arrays of one sequence differ in length: {sizes}")
    if not 0 < len(sequence.token_ids) <= row_length:
        raise DataError(
            f"{sequence.rollout_id}: {len(sequence.token_ids)} tokens do not fit a row of "
            f"{row_length}; drop it as overlong before its weights are made"
        )
    if segment.weights[0] != 0:
        raise DataError(f"{sequence.rollout_id}: the first token of a sequence cannot be trained")


def _routing_shape(segments: Seq[Segment]) -> tuple[int, ...]:
    """Return (layers, experts per token) where a segment knows its routing, else ()."""
    known = [s.sequence.routed_experts for s in segments if s.sequence.routed_experts is not None]
    shapes = {routed.shape[1:] for routed in known}
    if len(shapes) > 1:
        raise DataError(f"sequences of one batch differ in their routed_experts: {shapes}")
    return shapes.pop() if shapes else ()


def _blank(rows: int, length: int, routing: tuple[int, ...] = ()) -> Batch:
    def ints() -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.zeros((rows, length), np.int32)

    def floats(value: float) -> FloatArray:
        return np.full((rows, length), value, np.float32)

    return Batch(
        tokens=ints(),
        segment_ids=ints(),
        positions=ints(),
        behavior_logprobs=floats(0.0),
        advantages=floats(0.0),
        loss_weights=floats(0.0),
        temperature=floats(1.0),  # logits are divided by it, on padding too
        channels={ROUTED: np.full((rows, length, *routing), -1, np.int16)} if routing else {},
    )


def _write(batch: Batch, row: int, start: int, number: int, segment: Segment) -> int:
    """Copy one segment into its place (before anyone else sees the batch); return its end."""
    sequence = segment.sequence
    end = start + len(sequence.token_ids)
    batch.tokens[row, start:end] = sequence.token_ids
    batch.segment_ids[row, start:end] = number
    batch.positions[row, start:end] = np.arange(end - start)
    batch.behavior_logprobs[row, start:end] = np.where(
        sequence.mask > 0, sequence.behavior_logprobs, 0.0
    )
    batch.advantages[row, start:end] = np.where(sequence.mask > 0, segment.advantage, 0.0)
    batch.loss_weights[row, start:end] = segment.weights
    batch.temperature[row, start:end] = sequence.temperature
    if sequence.routed_experts is not None:
        batch.channels[ROUTED][row, start:end] = sequence.routed_experts
    return end
