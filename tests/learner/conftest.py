"""Shape checks on for everything numeric, and small configs."""

from jaxtyping import install_import_hook

install_import_hook(["skyrl_jax.rl", "skyrl_jax.learner", "skyrl_jax.models"], "beartype.beartype")

import dataclasses  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from skyrl_jax.core.types import Batch  # noqa: E402
from tests.learner import configs  # noqa: E402


@pytest.fixture
def model_cfg():
    return configs.MODEL


@pytest.fixture
def learner_cfg():
    return configs.LEARNER


@pytest.fixture
def objective():
    return configs.OBJECTIVE


@pytest.fixture
def sequences():
    """Five sequences: ids, which tokens are trained, log-probs, advantages (all deterministic)."""
    rng = np.random.default_rng(5)
    made = []
    for length in (7, 11, 5, 9, 12):
        mask = np.zeros(length, np.float32)
        mask[length // 2 :] = 1
        mask[-2] = 0  # a tool's token between two sampled ones
        made.append(
            {
                "tokens": rng.integers(0, 40, length).astype(np.int32),
                "mask": mask,
                "behavior": np.where(mask, -rng.uniform(2, 5, length), 0).astype(np.float32),
                "advantage": float(rng.normal()),
                "temperature": float(rng.choice([0.6, 1.0])),
            }
        )
    return made


@pytest.fixture
def pack():
    """Return pack(sequences, rows, row_length): rows = lists of sequence indices."""

    def build(sequences, rows, row_length):
        total = sum(float(s["mask"].sum()) for s in sequences)
        shape = (len(rows), row_length)
        fields = {
            name: np.zeros(shape, kind)
            for name, kind in (
                ("tokens", np.int32),
                ("segment_ids", np.int32),
                ("positions", np.int32),
                ("behavior_logprobs", np.float32),
                ("advantages", np.float32),
                ("loss_weights", np.float32),
            )
        }
        fields["temperature"] = np.ones(shape, np.float32)
        for r, row in enumerate(rows):
            at = 0
            for number, index in enumerate(row):
                s = sequences[index]
                where = (r, slice(at, at + len(s["tokens"])))
                fields["tokens"][where] = s["tokens"]
                fields["segment_ids"][where] = number + 1
                fields["positions"][where] = np.arange(len(s["tokens"]))
                fields["behavior_logprobs"][where] = s["behavior"]
                fields["advantages"][where] = s["advantage"]
                fields["loss_weights"][where] = s["mask"] / total
                fields["temperature"][where] = s["temperature"]
                at += len(s["tokens"])
        return Batch(**fields)

    return build


@pytest.fixture
def replace():
    return dataclasses.replace


@pytest.fixture
def host():
    """Return host(tree): a numpy copy that outlives donation."""
    return lambda tree: jax.tree.map(lambda x: np.array(x), tree)
