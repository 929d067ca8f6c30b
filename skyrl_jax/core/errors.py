"""One error tree. The branch says who is to blame, and blame decides an episode's status.

    SkyrlError
    ├── ConfigError            the user's configuration or command line is wrong
    ├── DataError              a task row, checkpoint, trace or weight file is wrong
    │   ├── CheckpointError    a checkpoint is missing, corrupt or belongs to another run
    │   └── WeightsError       a weight version is missing, corrupt or does not fit the model
    ├── HostError              blame: the host side -> FAILED(infra:<cause>)
    │   ├── GenerationError    the generation server refused, died or answered nonsense
    │   ├── InfraError         daemon, kernel, disk or network under a sandbox
    │   ├── CapacityError      no room for another sandbox; try again later
    │   ├── ImageError         an image or root filesystem is missing or broken
    │   ├── PeerError          another process of the learner is missing, late, dead or disagrees
    │   └── BreakerOpen        too many host failures in a row: the run stops, first cause kept
    ├── LedgerError            sampled tokens are not all accounted for: the run stops
    ├── TrainingError          updates that cannot be: not one gradient of a step was finite
    └── AgentCausedError       blame: the agent's commands -> reward 0, inside the group
        ├── SandboxGone        PID 1 killed, supervisor killed, sandbox emptied from inside
        └── SandboxTimeout     a command or the grading ran past its limit

Every message names the thing that is wrong and what would be right.
"""


class SkyrlError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(SkyrlError):
    """The configuration or command line is wrong; the message names the dotted key."""


class DataError(SkyrlError):
    """Input data (rows, files, traces) does not have the form it must have."""


class CheckpointError(DataError):
    """A checkpoint cannot be used; the message names the step and the file."""


class WeightsError(DataError):
    """A published weight version cannot be used."""


class HostError(SkyrlError):
    """The host side failed; an episode that meets this is FAILED, never reward 0.

    Args:
        cause: short machine-readable cause, e.g. ``"engine"``; becomes ``infra:<cause>``.
        message: text for a person.
    """

    cause = "host"

    def __init__(self, message: str, *, cause: str | None = None) -> None:
        """Store the message and the optional finer cause."""
        super().__init__(message)
        if cause is not None:
            self.cause = cause


class GenerationError(HostError):
    """The generation server refused, died, or its answer breaks the contract."""

    cause = "engine"


class InfraError(HostError):
    """Something under the sandbox broke: daemon, kernel, disk, network."""

    cause = "sandbox"


class CapacityError(HostError):
    """There is no room for another sandbox now."""

    cause = "capacity"


class ImageError(HostError):
    """An image or root filesystem is missing or broken."""

    cause = "image"


class PeerError(HostError):
    """Another process of the learner is missing, late or dead; the message names it."""

    cause = "peer"


class BreakerOpen(HostError):
    """Too many host failures in a row; the first cause is in the message."""

    cause = "breaker"


class LedgerError(SkyrlError):
    """Sampled tokens differ from trained + dropped + pending; the message has the figures."""


class TrainingError(SkyrlError):
    """The learner cannot go on; the parameters are those of the step before."""


class AgentCausedError(SkyrlError):
    """The agent's own commands caused this; the episode keeps its place in the group.

    Args:
        message: text for a person.
        certain: False when the cause could not be told: the episode is run once more in a fresh
            sandbox, and only a second time is the agent's.
    """

    cause = "unknown"

    def __init__(self, message: str, *, certain: bool = True) -> None:
        """Store the message and how sure the blame is."""
        super().__init__(message)
        self.certain = certain


class SandboxGone(AgentCausedError):
    """The sandbox ended because of what ran inside it."""

    cause = "gone"


class SandboxTimeout(AgentCausedError):
    """A command inside the sandbox ran past its limit."""

    cause = "timeout"
