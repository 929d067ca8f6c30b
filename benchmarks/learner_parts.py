"""How the learner's promises are measured: each function returns a part's ``run`` (checks.py)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import scaling
import section_d
from checks import ROOT, Clone, Outcome, Run
from main_job import junit

from skyrl_jax.plan.chips import ladder

Check = Callable[[Clone, Mapping[str, Any]], Outcome]

PYTHON = ".venv/bin/python"
GIB = 2**30
COMPILE_LIMIT_S = 90.0
SEARCH_LIMIT_S = 15 * 60
# A patient end of a command that hangs; no promise.
PATIENCE_S = 3600.0


def script(clone: Clone, *argv: str, log: str) -> tuple[Run, dict[str, Any]]:
    """Run a script with the clone's Python; return the run and the last JSON object it printed.

    Raises:
        CommandFailed: it hangs.
        ValueError: it printed no object; says how the output ends.
    """
    ran = clone.run([PYTHON, *argv], log=log, timeout_s=PATIENCE_S, check=False)
    return ran, last_object(ran.output)


def last_object(output: str) -> dict[str, Any]:
    """Return the JSON object on the last line that begins one.

    Raises:
        ValueError: there is none.
    """
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError(f"no JSON object was printed; the output ends with: {output[-1500:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def proved(*nodes: str) -> Check:
    """Return a check that tests ran and passed in the part ``tests``.

    Args:
        nodes: "tests/a/test_b.py::test_c" (with all its parameters), or a file: all its tests.
    """

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        found = states(junit(clone)[1], nodes)
        return Outcome(held=passed(found), figures=found)

    return run


def states(cases: Mapping[str, str], nodes: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return for each node how many of its cases passed, failed or were skipped.

    Args:
        cases: {"tests.a.test_b::test_c[x]": "passed"}, as ``main_job.junit`` returns them.
        nodes: as in ``proved``; one without a case has no counts.
    """
    found: dict[str, dict[str, int]] = {}
    for node in nodes:
        path, _, name = node.partition("::")
        start = f"{path.removesuffix('.py').replace('/', '.')}::{name}"
        begin = f"{start}[" if name else start
        hits = [state for case, state in cases.items() if case == start or case.startswith(begin)]
        found[node] = dict(Counter(hits))
    return found


def passed(found: Mapping[str, Mapping[str, int]]) -> bool:
    """Tell whether every node has cases and all of them passed."""
    return bool(found) and all(set(counts) == {"passed"} for counts in found.values())


def faults_of_section_d(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Check that each row of section D of faults.md names tests, and that these ran and passed."""
    text = (clone.root.parent / "shared" / "reference" / "faults.md").read_text()
    code = "import json; from tests.test_faults_d import ROWS; print(json.dumps(ROWS))"
    tests = script(clone, "-c", code, log="faults-d.log")[1]
    cases = junit(clone)[1]
    told: dict[str, Any] = {}
    for row, symptoms in section_d.symptoms_of_rows(text).items():
        nodes = [node for symptom in symptoms for node in tests[symptom]]
        told[row] = states(cases, nodes)
    return Outcome(held=bool(told) and all(map(passed, told.values())), figures=told)


def plan_fits(
    preset: str, topology: str, rows: int, seq_len: int, *, peak_gib: float, mesh: str = ""
) -> Check:
    """Return a check that a job's step fits with remat full, in so much memory and compile time."""

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        ran, found = _plan(clone, preset, topology, rows, seq_len, mesh)
        told = plan_figures(ran, found, preset)
        held = (
            ran.status == 0
            and found["fits"]
            and found["remat"] == "full"
            and told["peak_gib"] <= peak_gib
            and told["compile_s"] < COMPILE_LIMIT_S
        )
        return Outcome(held=held, figures=told | {"limit_gib": peak_gib})

    return run


def plan_too_large(preset: str, topology: str, rows: int, seq_len: int, *, larger: str) -> Check:
    """Return a check that a plan says what is over and by how much.

    Args:
        preset: of configs/swe.py.
        topology: which is too small.
        rows: of a micro-batch.
        seq_len: their tokens.
        larger: a topology of as many larger chips; the stated total is within 10 % of its peak.
    """

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        ran, found = _plan(clone, preset, topology, rows, seq_len)
        told = plan_figures(ran, found, preset)
        verdict = [line for line in ran.output.splitlines() if line.startswith("does not fit: ")]
        _, fitting = _plan(clone, preset, larger, rows, seq_len)
        total = found["peak_bytes"] / fitting["peak_bytes"]
        held = (
            ran.status == 1
            and not found["fits"]
            and len(verdict) == 1
            and f"{found['over_bytes'] / GIB:.2f} GiB too much" in verdict[0]
            and "exceeds available HBM" in verdict[0]
            and told["over_gib"] > 0
            and told["compile_s"] < COMPILE_LIMIT_S
            and fitting["mesh"] == found["mesh"]
            and abs(total - 1) <= 0.10
        )
        more = {"verdict": verdict, "larger": larger, "total_over_larger_chips_peak": total}
        return Outcome(held=held, figures=told | more)

    return run


def plan_search(preset: str, kind: str, seq_len: int) -> Check:
    """Return a check that a search finds a fit in time, every smaller slice tried or ruled out."""

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        argv = ["launchers/plan.py", f"--config=configs/swe.py:{preset}", f"--topology={kind}"]
        argv += [f"--seq_len={seq_len}", "--search", "--json"]
        ran, found = script(clone, *argv, log=f"search-{preset}-{kind}.log")
        tries = read_tries(ran.output, kind)
        smaller = smaller_slices(kind, found["topology"])
        # tried, or why not
        told_of = set(re.findall(rf"^({kind}:[\dx]+)[: ]", ran.output, re.MULTILINE))
        held = (
            ran.status == 0
            and found["fits"]
            and found["seq_len"] == seq_len
            and ran.seconds <= SEARCH_LIMIT_S
            and told_of >= set(smaller)
            and not any(one["fits"] for one in tries if one["topology"] in smaller)
        )
        told = plan_figures(ran, found, preset) if found["fits"] else {"exit": ran.status}
        return Outcome(held=held, figures=told | {"tries": [one["line"] for one in tries]})

    return run


def smaller_slices(kind: str, topology: str) -> list[str]:
    """Return the slices of a kind that a search goes through before ``topology``."""
    names = [slice_.text for slice_ in ladder(kind)]
    return names[: names.index(topology)] if topology in names else names


def read_tries(output: str, kind: str) -> list[dict[str, Any]]:
    """Return the tries that a search printed: {"topology", "fits", "line"}."""
    lines = [line for line in output.splitlines() if re.match(rf"{kind}:\w+ .*remat=", line)]
    return [
        {"topology": line.split(" ")[0], "fits": " fits: " in line, "line": line} for line in lines
    ]


def _plan(
    clone: Clone, preset: str, topology: str, rows: int, seq_len: int, mesh: str = ""
) -> tuple[Run, dict[str, Any]]:
    argv = ["launchers/plan.py", f"--config=configs/swe.py:{preset}", f"--topology={topology}"]
    argv += [f"--rows={rows}", f"--seq_len={seq_len}", f"--mesh={mesh}", "--remat=full", "--json"]
    return script(clone, *argv, log=f"plan-{preset}-{topology.replace(':', '-')}.log")


def plan_figures(ran: Run, found: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """Return what a plan said, in GiB of a chip and seconds (``compile_s``: the compiler alone)."""
    sizes = ("peak", "hbm", "over", "argument", "temporary", "reference")
    copied = ("fits", "topology", "mesh", "rows", "seq_len", "remat", "compile_s", "step_time_s")
    return {
        "exit": ran.status,
        "wall_s": round(ran.seconds, 1),
        "preset": preset,
        **{name: found[name] for name in copied},
        **{f"{name}_gib": round(found[f"{name}_bytes"] / GIB, 3) for name in sizes},
    }


PRESETS = """
import json
from configs.swe import get_config
try:
    get_config("?")
except ValueError as error:
    print(json.dumps({"known": str(error).split("known: ")[1].split(", ")}))
"""
# Its policy is no real model: made from scratch, with a vocabulary of 512.
TINY = "quickstart"


def plan_table(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Check that docs/scaling.md has a row for every preset of a real model, as measured here.

    The page of this checkout, not the clone's: it may be filled after the clone was made.
    """
    known = script(clone, "-c", PRESETS, log="presets.log")[1]["known"]
    presets = [name for name in known if name != TINY]
    measured = [figure for name, figure in figures.items() if name.startswith("plan-")]
    page = (ROOT / "docs" / "scaling.md").read_text()
    gaps = table_gaps(page, scaling.PLANS, presets, measured)
    return Outcome(held=bool(presets) and not gaps, figures={"presets": presets, "gaps": gaps})


def table_gaps(
    page: str,
    plans: Sequence[scaling.Plan],
    presets: Sequence[str],
    measured: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Return what is missing or wrong in the table of docs/scaling.md.

    Args:
        page: its text.
        plans: one for each row of the table.
        presets: which must all have a row.
        measured: figures of ``plan_figures``; rows of the same plan must agree with them in 1 %.
    """
    table = page.partition(scaling.BEGIN)[2].partition(scaling.END)[0]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]
    rows = {int(row[0]): row[1:] for row in cells if row[0].isdigit()}
    planned = {plan.preset for plan in plans}
    gaps = [f"no plan of preset {name}" for name in presets if name not in planned]
    for number, plan in enumerate(plans, 1):
        row = [*rows.get(number, ()), *[""] * 9]
        name = f"row {number} ({plan.preset} on {plan.topology})"
        wanted = (plan.preset, plan.topology, _shape(plan.rows, plan.seq_len))
        if (row[0], row[1], row[3]) != wanted:
            gaps.append(f"{name} is missing")
        elif not re.match(r"\d", row[5]):
            gaps.append(f"{name}: {row[5] or 'no figures'}")
        else:
            gaps += [f"{name} {wrong}" for one in measured if (wrong := _differs(row, one))]
    return gaps


def _shape(rows: int, seq_len: int) -> str:
    return f"{rows} x {seq_len:,}"


def _differs(row: Sequence[str], one: Mapping[str, Any]) -> str:
    """Return how a row differs from a measured plan; "" where it is another's or does not."""
    if "peak_gib" not in one:
        return ""
    mesh = ", ".join(f"{axis} {n}" for axis, n in one["mesh"].items() if n > 1) or "1"
    shape = _shape(one["rows"], one["seq_len"])
    if tuple(row[:5]) != (one["preset"], one["topology"], mesh, shape, one["remat"]):
        return ""
    stated = float(row[5].split(",")[0])
    close = abs(stated - one["peak_gib"]) <= 0.01 * one["peak_gib"]
    return "" if close else f"says {stated} GiB, measured {one['peak_gib']}"


def moe_flops(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Compile a layer of Qwen3-30B-A3B for one v5e chip and spread over four, both ways."""
    told: dict[str, Any] = {}
    ratios: list[float] = []
    for mesh in ("", "fsdp=4", "expert=4"):
        argv = ["benchmarks/moe_flops.py", "--topology=v5e:2x2", f"--mesh={mesh}"]
        found = script(clone, *argv, log=f"moe-{mesh or 'one'}.log")[1]
        for part in ("forward", "backward"):
            ratios.append(found[part]["ratio"])
            told[f"{part}, {mesh or 'one device'}"] = {
                name: found[part][name] for name in ("ratio", "flops", "active_flops")
            }
    return Outcome(held=all(1.0 <= ratio <= 1.5 for ratio in ratios), figures=told)


def load_memory(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Load a model of 2 GB: the host holds the shards of its devices and at most 300 MB more."""
    told: dict[str, Any] = {}
    for devices in ("1", "8"):
        argv = ["benchmarks/load_memory.py", "--gb=2", f"--devices={devices}", "--dtype=stored"]
        told[f"{devices} devices"] = script(clone, *argv, log=f"load-memory-{devices}.log")[1]
    held = all(
        found["files_bytes"] >= 1.95e9 and found["beside_bytes"] <= 300e6 for found in told.values()
    )
    return Outcome(held=held, figures=told)


def bench(
    peer: str, *, dtype: str = "float32", at_least: float = 0.0, target: float = 0.0
) -> Check:
    """Return a check of our train step's speed against a peer's, the small shape.

    Args:
        peer: of benchmarks/peers.
        dtype: of the computation.
        at_least: ratio that holds the promise; 0 = the ratio is reported.
        target: ratio that is aimed at; whether it was met is reported.
    """

    def run(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
        made = not (clone.root / ".cache" / "lanes" / f"bench-{peer}" / "pins.txt").exists()
        argv = ["benchmarks/learner.py", "--shape=small", f"--peer={peer}", f"--dtype={dtype}"]
        argv += ["--rounds=9", "--hugepages"] if at_least else []
        ran, found = script(clone, *argv, log=f"bench-{peer}-{dtype}.log")
        held = (
            ran.status == 0
            and found["malloc"] == "default"
            and len(found["rounds"]) >= 5
            and found["ratio"] > 0
            and found["ratio"] >= at_least
        )
        told = bench_figures(found)
        if at_least:
            told["hugepages"] = bench_figures(found["hugepages"])
            told |= {"at_least": at_least, "target": target, "met": found["ratio"] >= target}
        return Outcome(held=held, figures=told | {"environment_made": made})

    return run


def bench_figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the medians of a benchmark, and of its rounds the ratio of each."""
    ratios = [round(row["tokens_per_s"] / row["peer_tokens_per_s"], 3) for row in found["rounds"]]
    medians = {name: value for name, value in found.items() if name not in ("rounds", "hugepages")}
    return medians | {"round_ratios": ratios}


def flattened(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Compare the v5e programs of the step with flattened and with unflattened layers."""
    found = script(clone, "benchmarks/flattened.py", log="flattened.log")[1]
    return Outcome(held=no_worse(found["meshes"]), figures=found)


# The sum of temporaries counts buffers that are never alive at once: told, not judged.
JUDGED = ("peak_bytes", "sent_bytes", "flops")


def no_worse(meshes: Mapping[str, Mapping[str, Mapping[str, float]]], slack: float = 0.01) -> bool:
    """Tell whether the flattened program needs no more than the other one, within ``slack``.

    Args:
        meshes: {mesh: {"ratio": {figure: flattened / unflattened}, ...}}.
        slack: share by which a figure may be larger.
    """
    ratios = [one["ratio"][name] for one in meshes.values() for name in JUDGED]
    return bool(ratios) and all(0 < ratio <= 1 + slack for ratio in ratios)


def parity_lane(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Run every family against transformers; report how far apart they are at most."""
    report = clone.root / ".cache" / "parity.xml"
    report.unlink(missing_ok=True)
    command = ["make", "lane-parity", "TESTS=--junitxml=.cache/parity.xml"]
    ran = clone.run(command, log="parity.log", timeout_s=PATIENCE_S, check=False)
    counts = junit(clone, report.name)[0]
    largest = largest_differences(ran.output)
    held = (
        ran.status == 0
        and counts["tests"] > 0
        and counts["failed"] == counts["skipped"] == 0
        and bool(largest)
    )
    told = {**counts, "seconds": round(ran.seconds, 1), "largest_differences": largest}
    return Outcome(held=held, figures=told)


def largest_differences(output: str) -> dict[str, float]:
    """Return what the lane prints under "largest differences" (tests/lanes/parity/conftest.py)."""
    found: dict[str, float] = {}
    _, _, rest = output.partition(" largest differences ")
    for line in rest.splitlines()[1:]:
        name, _, value = line.rpartition(": ")
        if not name or line.startswith("="):
            break
        found[name] = float(value)
    return found


def refusals(clone: Clone, figures: Mapping[str, Any]) -> Outcome:
    """Start the launchers on what they cannot use (benchmarks/refusals.py judges each case)."""
    ran, found = script(clone, "benchmarks/refusals.py", log="refusals.log")
    return Outcome(held=ran.status == 0 and bool(found), figures=found)
