"""Find the smallest topology and the mesh on it that fit, with the least recomputation.

Topologies come smallest first. On each one, meshes are tried with the remat policy that needs the
least memory until one fits; that topology is the answer, and the policies that compute less again
are tried on it, the least first. A try whose floor alone is over the memory is not compiled:

    floor of a device = (params 4 + gradient 4 + moments 8, 6 or 0 bytes) x params / devices that
                        share them + the frozen reference + what the backward pass keeps

No program can be below that: all of it is alive when the backward pass of the layers begins.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from skyrl_jax.core.config import MeshConfig
from skyrl_jax.core.errors import SkyrlError
from skyrl_jax.plan.chips import GIB, Topology
from skyrl_jax.plan.job import REMAT_POLICIES, Compiled, PlanJob, check_job, reference_bytes

Compile = Callable[[PlanJob, float], Compiled]
LIMIT_S = 900.0
# Meshes with ever smaller parts differ little in memory and cost more transfers.
MESHES_PER_TOPOLOGY = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that was compiled, whether it fits or not."""

    job: PlanJob
    compiled: Compiled


class OutOfTime(SkyrlError):
    """The search used up its time; what it had found by then stands."""


def search(
    job: PlanJob,
    topologies: Iterable[Topology],
    num_params: int,
    compile_job: Compile,
    *,
    policies: Sequence[str] = REMAT_POLICIES,
    limit_s: float = LIMIT_S,
    tell: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> Found | None:
    """Return the best plan, or ``None`` where nothing fits.

    Args:
        job: what to train; its mesh, topology and remat policy are replaced.
        topologies: smallest first.
        num_params: parameters of the model.
        compile_job: (job, seconds it may take) -> answer.
        policies: remat policies allowed, from the least recomputation to the most.
        limit_s: seconds in all.
        tell: gets a line about each try.
        clock: seconds.

    Raises:
        OutOfTime: nothing that was tried by then fits.
    """
    tries = _Tries(num_params, compile_job, tell, clock, clock() + limit_s)
    best: Found | None = None
    try:
        for topology in topologies:
            meshes = list(candidate_meshes(job, topology))
            if not meshes:
                tell(f"{topology.text}: no mesh divides the rows, heads and tokens")
            jobs = [_with(job, topology, mesh, policies[-1]) for mesh in meshes]
            best = _first(tries, jobs)
            if best is None:
                continue
            rest = jobs[jobs.index(best.job) :]  # those before it do not fit with any policy
            for policy in policies[:-1]:
                lighter = _first(tries, [_with(one, topology, one.mesh, policy) for one in rest])
                if lighter is not None:
                    return lighter
            return best
    except OutOfTime as late:
        if best is None:
            raise
        tell(str(late))
    return best


def candidate_meshes(job: PlanJob, topology: Topology) -> Iterator[MeshConfig]:
    """Return the first few meshes that divide rows, heads and tokens, the least split first.

    ``data`` stays 1: replicas need the most memory. What fsdp cannot take, since it divides the
    rows, goes to tensor (it divides the key/value heads), then to context.
    """
    model, learner = job.model, job.learner
    one = {field.name: 1 for field in dataclasses.fields(MeshConfig)}
    found: list[tuple[int, int, MeshConfig]] = []
    for tensor in _divisors(math.gcd(model.num_kv_heads, topology.num_devices)):
        for context in _divisors(topology.num_devices // tensor):
            fsdp = topology.num_devices // (tensor * context)
            halves = 2 * context if context > 1 else 1  # balanced chunks: two per device
            if learner.micro_rows % fsdp or learner.row_length % halves:
                continue
            sizes = one | {"fsdp": fsdp, "tensor": tensor, "context": context}
            found.append((tensor * context, context, MeshConfig(**sizes)))
    ordered = sorted(found, key=lambda item: item[:2])
    return (mesh for *_, mesh in ordered[:MESHES_PER_TOPOLOGY])


def floor_bytes(job: PlanJob, num_params: int) -> int:
    """Return bytes of one device that no program of the job can do without.

    The state is alive throughout; the gradients and what the layers keep are when the backward
    pass of the layers begins. Kept of a token and layer, in the compute dtype: its input ("full"),
    also the attention's output ("attn_out"), or the results of the projections ("dots"; "none"
    keeps these and more). All of it is taken as spread over as many devices as could share it.
    """
    mesh = check_job(job)
    model, learner = job.model, job.learner
    share = math.prod(n for axis, n in mesh.items() if axis not in ("data", "context"))
    moments = 6 if learner.moment_dtype == "bfloat16" else 8
    if learner.offload_optimizer:
        moments = 0  # they lie on the host
    state = num_params * (4 + 4 + moments) / share
    reference = reference_bytes(learner, job.objective, num_params * 4 / share)
    heads, groups = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    ffn = 0 if model.num_experts else 2 * model.intermediate_size
    projections = heads + 2 * groups + ffn
    extra = {"full": 0, "attn_out": heads, "dots": projections, "none": projections}
    width = model.hidden_size + extra[learner.remat]
    tokens = learner.micro_rows * learner.row_length / math.prod(mesh.values())
    size = 2 if learner.compute_dtype == "bfloat16" else 4
    return int(state + reference + model.num_layers * tokens * width * size)


@dataclass(frozen=True, slots=True)
class _Tries:
    """Compiles jobs one by one, tells of each, and ends at the deadline."""

    num_params: int
    compile_job: Compile
    tell: Callable[[str], None]
    clock: Callable[[], float]
    deadline: float

    def run(self, job: PlanJob) -> Compiled | None:
        """Return the answer; ``None`` where the job was not compiled or the compiler failed."""
        usable = job.topology.chip.usable_gib / job.topology.chip.devices
        floor = floor_bytes(job, self.num_params) / GIB
        if floor > usable:
            self._tell(job, f"not tried: needs at least {floor:.1f} of {usable:.1f} GiB a device")
            return None
        left = self.deadline - self.clock()
        if left <= 0:
            raise OutOfTime("the time for the search is over; --limit_s gives it more")
        try:
            compiled = self.compile_job(job, left)
        except SkyrlError as error:
            self._tell(job, f"refused: {error}")
            return None
        verdict = "fits" if compiled.fits else "does not fit"
        peak = f"{compiled.peak / GIB:.2f} of {usable:.2f} GiB a device"
        self._tell(job, f"{verdict}: {peak}, {compiled.seconds:.0f} s")
        return compiled

    def _tell(self, job: PlanJob, text: str) -> None:
        mesh = ",".join(f"{axis}={n}" for axis, n in check_job(job).items())
        self.tell(f"{job.topology.text} {mesh} remat={job.learner.remat} {text}")


def _first(tries: _Tries, jobs: Sequence[PlanJob]) -> Found | None:
    for job in jobs:
        compiled = tries.run(job)
        if compiled is not None and compiled.fits:
            return Found(job=job, compiled=compiled)
    return None


def _with(job: PlanJob, topology: Topology, mesh: MeshConfig, remat: str) -> PlanJob:
    return dataclasses.replace(
        job,
        topology=topology,
        mesh=mesh,
        learner=dataclasses.replace(job.learner, remat=remat),
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
