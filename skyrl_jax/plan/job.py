"""What is to be planned and what the compiler said of it: plain values, no jax."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_jax.core.config import (
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
)
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.core.validate import check_micro_batch
from skyrl_jax.plan.chips import Topology
from skyrl_jax.plan.hlo import Collective

# From the least recomputation to the most (models/decoder.py says what each keeps).
REMAT_POLICIES = ("none", "dots", "attn_out", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """One train step on one topology.

    ``learner`` already has the rows of a micro-batch over the whole mesh (``micro_rows``), their
    tokens (``row_length``) and the remat policy of this plan.
    """

    model: ModelConfig
    learner: LearnerConfig
    objective: ObjectiveConfig
    mesh: MeshConfig
    topology: Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The compiler's answer, in bytes of one JAX device.

    Args:
        fits: the compiler accepted the program, and there is room for the reference beside it.
        message: its own words when it refused it.
        mesh: devices per mesh axis.
        devices_per_chip: as the devices' own coordinates say.
        params: parameters.
        optimizer: optimizer state (not what lies on the host).
        reference: the frozen policy of a KL term: no part of the step, but on the device beside it.
        arguments: all inputs, batch included.
        temporaries: what the peak holds beside them.
        peak: the most of the step that is alive at once; of a refused one the stated total.
        hbm: what a device has; 0 = not stated.
        collectives: of the program (none when it was refused).
        seconds: the compile took.
    """

    fits: bool
    message: str
    mesh: dict[str, int]
    devices_per_chip: int
    params: int
    optimizer: int
    reference: int
    arguments: int
    temporaries: int
    peak: int
    hbm: int
    collectives: tuple[Collective, ...]
    seconds: float

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Compiled:
        """Return what ``to_json`` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["collectives"] = tuple(
            Collective(kind=c["kind"], sent=c["sent"], loops=tuple(c["loops"]))
            for c in values["collectives"]
        )
        return cls(**values)


def make_job(
    config: RunConfig,
    topology: Topology,
    *,
    rows: int = 0,
    seq_len: int = 0,
    remat: str = "",
    mesh: Mapping[str, int] | None = None,
) -> PlanJob:
    """Return the plan of a run's step on a topology.

    Args:
        config: the run's configuration.
        topology: chips.
        rows: per micro-batch over the whole mesh; 0 = the configuration's.
        seq_len: tokens of a row; 0 = the configuration's.
        remat: the policy; "" = the configuration's.
        mesh: axes that differ from the configuration's.
    """
    learner = dataclasses.replace(
        config.learner,
        micro_rows=rows or config.learner.micro_rows,
        row_length=seq_len or config.learner.row_length,
        remat=remat or config.learner.remat,
    )
    return PlanJob(
        model=config.model,
        learner=learner,
        objective=config.objective,
        mesh=dataclasses.replace(config.mesh, **(mesh or {})),
        topology=topology,
    )


def reference_bytes(learner: LearnerConfig, objective: ObjectiveConfig, params: float) -> int:
    """Return the bytes of the frozen policy that a KL term needs, 0 without one.

    Args:
        learner: may say its dtype.
        objective: has a KL term or not.
        params: bytes of the trained parameters, which are fp32.
    """
    if not objective.kl_coef:
        return 0
    half = learner.reference_dtype == "bfloat16"
    return int(params) // (2 if half else 1)


def parse_mesh(text: str) -> dict[str, int]:
    """Return the axes of ``data=1,fsdp=16``.

    Raises:
        ConfigError: an unknown axis (the known ones are named), one named twice, or a size that
            is neither positive nor -1.
    """
    known = [field.name for field in dataclasses.fields(MeshConfig)]
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"--mesh: no axis is called {name!r}; known: {', '.join(known)}")
        if name in axes:
            raise ConfigError(f"--mesh names the axis {name!r} twice")
        try:
            axes[name] = int(value)
        except ValueError:
            raise ConfigError(f"--mesh: {part!r} needs a whole number, e.g. {name}=4") from None
        if axes[name] == 0 or axes[name] < -1:
            raise ConfigError(f"--mesh: {part!r} must be positive, or -1 = all that remain")
    return axes


def resolve_mesh(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return every axis with its size, -1 replaced by the devices that remain.

    Raises:
        ConfigError: the axes do not multiply to the number of devices.
    """
    sizes: dict[str, int] = dataclasses.asdict(mesh)
    known = math.prod(n for n in sizes.values() if n > 0)
    free = [axis for axis, n in sizes.items() if n < 0]
    if len(free) == 1 and num_devices % known == 0:
        return {axis: n if n > 0 else num_devices // known for axis, n in sizes.items()}
    if free or known != num_devices:
        text = ",".join(f"{axis}={n}" for axis, n in sizes.items())
        raise ConfigError(
            f"the mesh {text} does not divide the {num_devices} devices of the topology: its axes "
            f"must multiply to {num_devices} (one of them may be -1 = all that remain)"
        )
    return sizes


def check_job(job: PlanJob) -> dict[str, int]:
    """Return the job's mesh, every axis with its size.

    Raises:
        ConfigError: adapters are trained, a micro-batch is too large, or the mesh does not divide
            the devices, the rows or the tokens: then the job would run (XLA copies what does not
            divide), but each device would do the work of all.
    """
    if job.learner.lora_rank:
        raise ConfigError(
            f"learner.lora_rank = {job.learner.lora_rank}: a plan is of training in full; use 0"
        )
    rows, tokens = job.learner.micro_rows, job.learner.row_length
    check_micro_batch(rows, tokens)
    mesh = resolve_mesh(job.mesh, job.topology.num_devices)
    spread = math.prod(n for axis, n in mesh.items() if axis not in ("tensor", "context"))
    if rows % spread:
        raise ConfigError(
            f"--rows={rows}: rows (of a preset: learner.micro_rows) are spread over {spread} "
            "devices (data x fsdp x expert), which must divide them; use "
            f"--rows={math.ceil(rows / spread) * spread}, or a mesh with more tensor or context"
        )
    chunks = 2 * mesh["context"] if mesh["context"] > 1 else 1
    if tokens % chunks:
        raise ConfigError(
            f"--seq_len={tokens}: the tokens of a row are spread over context = "
            f"{mesh['context']} devices in two chunks each; use a multiple of {chunks}, e.g. "
            f"--seq_len={math.ceil(tokens / chunks) * chunks}"
        )
    return mesh
