"""Write the table of docs/scaling.md: what each preset needs on which chips.

Command    python benchmarks/scaling.py [NUMBER ...]

Compiles one plan after the other (launchers/plan.py; a minute or two each) and puts the table
between the page's two marks. With numbers only those rows of it are made anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- table: benchmarks/scaling.py -->", "<!-- end of table -->"
HEAD = (
    "| | preset | chips | mesh | rows x tokens | remat | GiB per chip, of | fits "
    "| step, s | tokens/s |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Plan:
    """One row of the table."""

    preset: str
    topology: str
    rows: int
    seq_len: int
    mesh: str = ""


PLANS = (
    Plan("smollm2_135m", "v5e:2x2", 16, 2048),
    Plan("qwen3_8b", "v5e:4x4", 16, 2048),
    Plan("qwen3_8b", "v5e:2x4", 16, 4096),
    Plan("qwen3_8b", "v4:2x2x4", 16, 8192),
    Plan("qwen3_8b", "v6e:4x4", 16, 32_768),
    Plan("qwen3_8b", "v5p:2x2x4", 16, 32_768),
    Plan("qwen3_8b", "tpu7x:2x2x1", 8, 32_768),
    Plan("qwen3_8b", "gpu:8xH100-80GB", 8, 32_768),
    Plan("qwen3_14b", "v5p:2x2x4", 16, 34_816),
    Plan("qwen3_14b", "gpu:16xH100-80GB", 16, 34_816),
    Plan("qwen3_32b", "v5p:2x4x4", 16, 40_960),
    Plan("qwen3_32b", "gpu:16xH100-80GB", 16, 40_960),
)


def main(argv: list[str]) -> int:
    """Make the rows and write the page; return how many plans could not be compiled."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = [line for line in table.splitlines() if line.startswith("| ") and line[2:3].isdigit()]
    kept = {int(line.split("|")[1]): line for line in rows}
    failed = 0
    for number in [int(n) for n in argv] or range(1, len(PLANS) + 1):
        plan = PLANS[number - 1]
        result = run(plan)
        failed += result is None
        kept[number] = row(number, plan, result)
        print(kept[number], flush=True)
        lines = (*HEAD, *(kept[n] for n in sorted(kept)))
        PAGE.write_text("\n".join((f"{before}{BEGIN}", *lines, f"{END}{after}")))
    return failed


def run(plan: Plan) -> dict[str, Any] | None:
    """Return what the launcher says of a plan; ``None`` where it could not be compiled."""
    command = [
        sys.executable,
        str(ROOT / "launchers" / "plan.py"),
        f"--config={ROOT}/configs/swe.py:{plan.preset}",
        f"--topology={plan.topology}",
        f"--rows={plan.rows}",
        f"--seq_len={plan.seq_len}",
        f"--mesh={plan.mesh}",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        print(done.stderr, file=sys.stderr, flush=True)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(number: int, plan: Plan, result: dict[str, Any] | None) -> str:
    """Return one line of the table."""
    shape = f"{plan.rows} x {plan.seq_len:,}"
    if result is None:
        cells = (plan.preset, plan.topology, plan.mesh, shape, "", "not compiled", "", "", "")
        return f"| {number} | " + " | ".join(cells) + " |"
    mesh = ", ".join(f"{axis} {n}" for axis, n in result["mesh"].items() if n > 1) or "1"
    memory = f"{result['peak_bytes'] / GIB:.2f}, {result['hbm_bytes'] / GIB:.2f}"
    fits = "yes" if result["fits"] else f"no: {result['over_bytes'] / GIB:.2f} too much"
    times = ("", "")
    if result["step_time_s"] is not None and result["fits"]:
        bound = result["binds"]["0.5"]
        times = (f"{result['step_time_s']:.2f} ({bound})", f"{result['tokens_per_s']:,.0f}")
    if result["estimate"]:
        fits += " (estimate)"
    cells = (plan.preset, plan.topology, mesh, shape, result["remat"], memory, fits, *times)
    return f"| {number} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
