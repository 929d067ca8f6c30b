"""What the host must remember beside the train state, so that a resumed run is the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from skyrl_jax.batching.ledger import Ledger
from skyrl_jax.core.errors import CheckpointError
from skyrl_jax.train.curriculum import Curriculum


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Counters of a run after ``step`` finished steps.

    Every seed follows from (run seed, step), and the tasks of a step from these and ``curriculum``.

    Args:
        step: finished RL steps (0: the warm start is done).
        version: the weight version that belongs to the state (one a step).
        ledger: the token ledger.
        curriculum: which tasks were played, and how they went.
        episodes: episodes played in RL. ``failed``: those that the host side broke.
        mismatch_max: largest ``mismatch_abs_mean`` of any step, nats.
        wall_s: wall time spent, over all processes of the run.
        sft: what the warm start reached.
        row: the metrics of ``step``, so that a kill between checkpoint and metrics loses none.
    """

    step: int = 0
    version: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    curriculum: Curriculum = field(default_factory=Curriculum)
    episodes: int = 0
    failed: int = 0
    mismatch_max: float = 0.0
    wall_s: float = 0.0
    sft: Mapping[str, float] = field(default_factory=dict)
    row: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {
            "ledger": self.ledger.to_json(),
            "curriculum": self.curriculum.to_json(),
            "sft": dict(self.sft),
            "row": dict(self.row),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HostState:
        """Read what ``to_json`` wrote.

        Raises:
            CheckpointError: a field is missing or unknown.
        """
        try:
            parts = {
                "ledger": Ledger.from_json(values["ledger"]),
                "curriculum": Curriculum.from_json(values["curriculum"]),
            }
            found = cls(**{**values, **parts})
            if not 0 <= found.wall_s < float("inf"):
                raise ValueError(f"wall_s is {found.wall_s}")
            return found
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"the host state of a checkpoint is not ours ({type(error).__name__}: {error}): "
                "another version of this program wrote it; start a new --workdir"
            ) from error
