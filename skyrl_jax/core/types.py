"""The nouns of the system: frozen, slotted, keyword-only values.

    Task -> Episode -> Trajectory -> TrajectoryGroup -> Sequence -> Batch -> (TrainState)
         -> WeightVersion

Everything here is stdlib + numpy, so that a rollout host needs no accelerator library.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
RoutingArray = NDArray[np.int16]  # numbers of experts; -1 = not known

# What a sampled token's log-prob can be, in nats: FLOOR < x <= CEILING. Nothing can be drawn at
# e^-1000 (fp32 softmax ends near e^-104; engines put -9999 where they have no log-prob), and 0
# plus the rounding of a log-softmax is the most.
LOGPROB_FLOOR = -1000.0
LOGPROB_CEILING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem for an agent.

    Example: ``Task(task_id="toolz-3", prompt="mean() is off by one ...", payload={"row": {...}})``.
    ``payload`` belongs to the task suite (hidden tests live there, on the host only).
    """

    task_id: str
    prompt: str
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToolCall:
    """A call the model asked for.

    ``arguments`` are JSON values (the text forms of calls give strings only). ``id`` is what a
    client calls it by; two calls that differ in nothing else are equal. Arguments compare as JSON:
    1 is 1.0 and is not true.
    Example: ``ToolCall(name="bash", arguments={"command": "ls"})``.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    def __eq__(self, other: object) -> bool:
        """Compare names and JSON values."""
        if not isinstance(other, ToolCall):
            return NotImplemented
        return self.name == other.name and _json_equal(self.arguments, other.arguments)

    def __hash__(self) -> int:
        """Hash the name: arguments are mappings."""
        return hash(self.name)


def _json_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same; for Python alone True == 1 as well.

    A model nests as deep as it likes: no recursion.
    """
    todo = [(one, other)]
    while todo:
        left, right = todo.pop()
        if left is right:
            continue
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            if left.keys() != right.keys():
                return False
            todo += [(value, right[name]) for name, value in left.items()]
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            if len(left) != len(right):
                return False
            todo += zip(left, right, strict=True)
        elif isinstance(left, bool) != isinstance(right, bool) or left != right:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDef:
    """A tool as a client offers it to the model; ``parameters`` is a JSON schema.

    Example: ``ToolDef(name="bash", description="Run it.", parameters={"type": "object",
    "properties": {"command": {"type": "string"}}, "required": ["command"]})``.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message; ``role`` is system, user, assistant or tool.

    ``error`` is set on an assistant message whose tool call could not be parsed: the text says
    what was wrong, and the agent loop feeds it back to the model. ``reasoning`` is an assistant's
    thinking where it was told apart from the content (``None``: it was not, or a client left it
    out). ``tool_call_id`` names the call that a tool message answers; like the ids of calls it does
    not count when messages are compared.
    Example: ``Message(role="user", content="Fix the bug.")``.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    reasoning: str | None = None
    tool_call_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn.

    The seed fixes the draw: same (prompt ids, seed, weight version), same tokens. ``forced_ids``
    are taken as the completion's first ids, with the log-probs that the policy really gives them
    (the embedded engine alone can do it): for replays and tests.
    Example: ``SamplingParams(temperature=1.0, max_new_tokens=32, stop_token_ids=(2,), seed=7)``.
    """

    temperature: float = 1.0
    max_new_tokens: int = 128
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    forced_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled for one call.

    ``logprobs`` are nats of the behaviour policy at the sampling temperature; ``weight_versions``
    says for each token which policy drew it. The stop token, when sampled, is part of the ids.
    ``routed_experts`` [P + n - 1, L, k], where the engine was asked for it: the experts that each
    fed token was sent through in each layer, the P of the prompt first (the last sampled token was
    not fed).
    Example: ``Completion(token_ids=(5, 2), logprobs=(-0.1, -0.2), weight_versions=(3, 3),
    finish_reason="stop")``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: str  # "stop" | "length" | "abort"
    routed_experts: RoutingArray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a completion whose three lists do not belong together."""
        lengths = {len(self.token_ids), len(self.logprobs), len(self.weight_versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"completion lists differ in length: ids {len(self.token_ids)}, logprobs "
                f"{len(self.logprobs)}, versions {len(self.weight_versions)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation call of an episode: the exact prompt ids and what came back.

    ``kind``: "agent", or "aux" for a call beside the work (a title, a summary), never trained.
    ``fork``: why a training row begins here ("" where the prompt goes on from the end of an earlier
    turn, and for the first turn); counted by cause.
    Example: ``Turn(prompt_ids=(1, 9), completion=completion, timings={"generate_s": 0.2})``.
    """

    prompt_ids: tuple[int, ...]
    completion: Completion
    timings: Mapping[str, float] = field(default_factory=dict)
    kind: str = "agent"
    fork: str = ""


class Status(enum.StrEnum):
    """How an episode ended; blame decides (see core/errors.py)."""

    FINISHED = "finished"  # the agent ended it
    TRUNCATED = "truncated"  # a budget or the agent's own doing ended it; still graded or reward 0
    FAILED = "failed"  # the host side broke; never a reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt of an agent at a task.

    ``reason``: "submit" when FINISHED; "turns", "context", "time", "loop" or "agent:<cause>" when
    TRUNCATED; "infra:<cause>" when FAILED. ``submission`` is the diff (``None``: none was made).
    Example: ``Episode(task_id="t", sample_index=0, messages=(), turns=(), status=Status.FINISHED,
    reason="submit", submission="diff --git ...", temperature=1.0)``.
    """

    task_id: str
    sample_index: int
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    status: Status
    reason: str
    submission: str | None
    temperature: float
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A graded submission.

    ``verdict``: "resolved", "unresolved", "empty", "no_apply", "tampered", "timeout", "agent".
    Example: ``Score(value=1.0, verdict="resolved", breakdown={"f2p_passed": 2})``.

    Raises:
        ValueError: ``value`` is not finite (one NaN would make a whole group's advantages NaN).
    """

    value: float
    verdict: str
    breakdown: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a reward that is no number."""
        if not math.isfinite(self.value):
            raise ValueError(f"score {self.value!r} ({self.verdict}): a reward must be finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """An episode and its score; ``score is None`` exactly when the episode is FAILED.

    Example: ``Trajectory(episode=episode, score=Score(value=1.0, verdict="resolved"))``.
    """

    episode: Episode
    score: Score | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All samples of one task in one batch: the unit of group statistics.

    Example: ``TrajectoryGroup(task_id="t", trajectories=(a, b))``.
    """

    task_id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One training row before packing. All arrays have shape [T].

    ``mask`` is 1 exactly on sampled tokens that are to be trained. ``behavior_logprobs`` (nats)
    and ``weight_versions`` are read only where mask is 1 (0 and -1 elsewhere). ``routed_experts``
    [T, L, k], where the engine told it: -1 for tokens that it did not feed.
    Example: a two-turn row ``token_ids=[1,2,3,4,5]``, ``mask=[0,0,1,0,1]``.
    """

    rollout_id: str  # "<task_id>/<sample_index>"
    token_ids: IntArray
    mask: FloatArray
    behavior_logprobs: FloatArray
    weight_versions: IntArray
    temperature: float
    routed_experts: RoutingArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A packed batch; every array is [B, T] (channel ``routed_experts``: [B, T, L, k]).

    ``segment_ids`` 0 = padding, 1.. = sequences of the row; ``positions`` restart in each segment.
    All per-token arrays are aligned to the *predicted* token: entry t describes tokens[t], whose
    log-prob comes from the hidden state at t-1. ``loss_weights`` carry every reduction, so the loss
    is ``sum(loss_weights * per_token_loss)``; 0 means the token is not trained.
    """

    tokens: IntArray
    segment_ids: IntArray
    positions: IntArray
    behavior_logprobs: FloatArray
    advantages: FloatArray
    loss_weights: FloatArray
    temperature: FloatArray
    channels: Mapping[str, FloatArray | RoutingArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A published set of weights. Example: ``WeightVersion(number=3, path=Path("v000003"))``."""

    number: int
    path: Path
