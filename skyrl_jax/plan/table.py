"""The plan as one object (``--json``) and as a table for a person. Everything is per chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_jax.plan.chips import GIB
from skyrl_jax.plan.cost import MFUS, TYPICAL_MFU, hardware_flops, model_flops, step_time
from skyrl_jax.plan.hlo import bytes_by_kind
from skyrl_jax.plan.job import Compiled, PlanJob, check_job

Summary = dict[str, Any]


def summarize(job: PlanJob, compiled: Compiled) -> Summary:
    """Return the plan's figures; bytes and seconds, of one chip and one step.

    A step is one update over one micro-batch. ``peak_bytes`` of a program that was refused is the
    total that the compiler states; its transfers and its time are unknown (``None``).
    """
    topology, learner = job.topology, job.learner
    per_chip = compiled.devices_per_chip
    hbm = compiled.hbm * per_chip or int(topology.chip.usable_gib * GIB)
    peak, reference = compiled.peak * per_chip, compiled.reference * per_chip
    rows, tokens = learner.micro_rows, learner.row_length
    flops = model_flops(job.model, rows, tokens)
    again = hardware_flops(job.model, rows, tokens, learner.remat) - flops
    collectives = {
        kind: {"runs": runs, "bytes": sent * per_chip}
        for kind, (runs, sent) in bytes_by_kind(compiled.collectives).items()
    }
    summary: Summary = {
        "fits": compiled.fits,
        "estimate": not topology.is_tpu,
        "peak_bytes": peak,
        "hbm_bytes": hbm,
        "over_bytes": 0 if compiled.fits else max(0, peak + reference - hbm),
        "topology": topology.text,
        "chips": topology.num_chips,
        "devices_per_chip": per_chip,
        "mesh": check_job(job) | compiled.mesh,
        "remat": learner.remat,
        "rows": rows,
        "seq_len": tokens,
        "params_bytes": compiled.params * per_chip,
        "optimizer_bytes": compiled.optimizer * per_chip,
        "reference_bytes": reference,
        "argument_bytes": compiled.arguments * per_chip,
        "temporary_bytes": compiled.temporaries * per_chip,
        "compiler": compiled.message,
        "compile_s": round(compiled.seconds, 1),
        "flops": flops,
        "recomputed_fraction": again / flops,
        "recompute_s": step_time(again, 0, topology).compute_s[TYPICAL_MFU],
    }
    return summary | _times(job, compiled, flops, collectives)


def _times(
    job: PlanJob, compiled: Compiled, flops: float, collectives: Mapping[str, Mapping[str, int]]
) -> Summary:
    """Return transfers and times; none of a program that was refused without being compiled."""
    if compiled.message:
        unknown = ("collectives", "link_s", "step_time_s", "step_time_by_mfu", "binds")
        return dict.fromkeys((*unknown, "tokens_per_s"))
    times = step_time(flops, sum(c["bytes"] for c in collectives.values()), job.topology)
    return {
        "collectives": collectives,
        "link_s": times.link_s,
        "step_time_s": times.step_s[TYPICAL_MFU],
        "step_time_by_mfu": {str(mfu): times.step_s[mfu] for mfu in MFUS},
        "binds": {str(mfu): times.binds(mfu) for mfu in MFUS},
        "tokens_per_s": _tokens(job) / times.step_s[TYPICAL_MFU],
    }


def _tokens(job: PlanJob) -> int:
    return job.learner.micro_rows * job.learner.row_length


def render(name: str, s: Summary) -> str:
    """Return the table of one plan.

    Args:
        name: of the run's configuration.
        s: from ``summarize``.
    """
    mesh = " ".join(f"{axis}={n}" for axis, n in s["mesh"].items())
    lines = [
        f"{name} on {s['topology']}: {s['chips']} chips, mesh {mesh}, "
        f"{s['rows']} rows x {s['seq_len']} tokens a micro-batch, remat {s['remat']}",
    ]
    if s["estimate"]:
        lines.append("estimate: compiled for CPU devices in the place of the GPUs")
    if s["devices_per_chip"] > 1:
        lines.append(f"a chip is {s['devices_per_chip']} JAX devices; figures are of the chip")
    lines += ["", "GiB per chip"]
    rows = (
        ("parameters", "params_bytes"),
        ("optimizer state", "optimizer_bytes"),
        ("temporaries", "temporary_bytes"),
        ("peak" if not s["compiler"] else "total", "peak_bytes"),
        ("frozen reference", "reference_bytes"),
        ("HBM available", "hbm_bytes"),
    )
    lines += [f"  {label:<18}{s[key] / GIB:>10.2f}" for label, key in rows if s[key]]
    lines += [_verdict(s), ""]
    lines += _transfers(s)
    lines += _durations(s)
    return "\n".join(lines)


def _verdict(s: Summary) -> str:
    if s["fits"]:
        by = "estimated" if s["estimate"] else "the compiler accepted the program"
        return f"fits: {by}, after {s['compile_s']:.0f} s"
    over = f"does not fit: {s['over_bytes'] / GIB:.2f} GiB too much"
    return f"{over}; the compiler: {s['compiler']}" if s["compiler"] else over


def _transfers(s: Summary) -> list[str]:
    if s["collectives"] is None:
        return []
    lines = [f"{'collectives per step':<24}{'runs':>8}{'GB sent per chip':>20}"]
    lines += [
        f"  {kind:<22}{one['runs']:>8}{one['bytes'] / 1e9:>20.3f}"
        for kind, one in s["collectives"].items()
    ]
    return [*lines, ""] if s["collectives"] else ["no collectives", ""]


def _durations(s: Summary) -> list[str]:
    lines = [
        f"model FLOPs per step: {s['flops']:.3e} (remat {s['remat']} computes "
        f"{100 * s['recomputed_fraction']:.0f} % more)"
    ]
    if s["step_time_by_mfu"] is None:
        return lines
    tokens = s["rows"] * s["seq_len"]
    lines.append(f"links: {s['link_s']:.3f} s at the published rate")
    for mfu, seconds in s["step_time_by_mfu"].items():
        lines.append(
            f"step at {100 * float(mfu):.0f} % MFU: {seconds:.3f} s ({s['binds'][mfu]} bind), "
            f"{tokens / seconds:,.0f} tokens/s"
        )
    return lines


def render_policies(summaries: Sequence[Summary]) -> str:
    """Return what each remat policy costs: memory, FLOPs computed again and their seconds."""
    lines = [
        f"{'remat':<10}{'fits':>6}{'peak GiB':>10}{'computed again':>16}{'s at 50 % of peak':>19}"
    ]
    for s in summaries:
        again = s["recomputed_fraction"]
        seconds = s["recompute_s"]
        lines.append(
            f"{s['remat']:<10}{'yes' if s['fits'] else 'no':>6}{s['peak_bytes'] / GIB:>10.2f}"
            f"{100 * again:>14.0f} %{seconds:>19.3f}"
        )
    return "\n".join(lines)
