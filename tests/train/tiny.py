"""The learner of a small run without the run: its config, and batches made by hand."""

from __future__ import annotations

import jax
import numpy as np

from configs.swe import get_config
from skyrl_jax.batching.packing import Segment, pack
from skyrl_jax.core.config import RunConfig, parse_config
from skyrl_jax.core.types import Batch, Sequence
from tests.train.jobs import SMALL


def config(**changes: object) -> RunConfig:
    """Return the config of a small run; keys of ``changes`` use ``__`` for the dot."""
    values = get_config("quickstart")
    wanted = {key.replace("__", "."): value for key, value in changes.items()}
    values.update_from_flattened_dict(SMALL | {"objective.entropy_coef": 0.0} | wanted)
    return parse_config(values.to_dict())


def batch(advantage: float, ids: tuple[int, ...] = (5, 6, 7, 8, 9), micro_rows: int = 2) -> Batch:
    """Return a batch of one sequence whose ids are trained from the third on."""
    mask = np.asarray([0, 0] + [1] * (len(ids) - 2), np.float32)
    sequence = Sequence(
        rollout_id="t/0",
        token_ids=np.asarray(ids, np.int32),
        mask=mask,
        behavior_logprobs=mask * np.float32(-6.0),
        weight_versions=np.zeros(len(ids), np.int32),
        temperature=1.0,
    )
    segment = Segment(sequence=sequence, weights=mask / mask.sum(), advantage=advantage)
    return pack([segment], row_length=16, micro_rows=micro_rows)


def host(tree: object) -> object:
    """Return numpy copies of a tree's leaves, which outlive donation."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def bits(tree: object) -> dict[str, bytes]:
    """Return the bytes of a tree's leaves by path."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in flat}
