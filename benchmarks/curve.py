"""Draw the resolved rate of runs on held-out tasks over the steps: a stand-alone SVG for README.md.

Command: ``python benchmarks/curve.py docs/curve.svg runs/seed-0 runs/seed-1 ...``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_jax.train.charts import HEIGHT, WIDTH, Series, line_chart, text

# Readable on a white and on a dark page.
_STYLE = (
    "svg{--c0:#2f6fdb;--c1:#e08a1e;--c2:#2a9d78;--c3:#b04fc0;--c4:#8a93a3;--c5:#c9503c}"
    "text{fill:#7a8496;font:11px sans-serif}.grid{stroke:#8a93a3;stroke-opacity:.3}"
)


def draw(workdirs: Sequence[Path]) -> str:
    """Return the SVG: each run's rate on sampled held-out episodes, a dot a measurement."""
    series = []
    for workdir in workdirs:
        summary = json.loads((workdir / "summary.json").read_text())
        points = [(step, rate) for step, rate in summary["resolved_curve"]]
        series.append(Series(name=workdir.name, points=points))
    names = "".join(
        f'<text x="{WIDTH - 14}" y="{HEIGHT - 34 - 14 * i}" text-anchor="end" '
        f'style="fill:var(--c{i % 6})">{text(item.name)}</text>'
        for i, item in enumerate(series)
    )
    chart = line_chart(series, smooth=False, dots=True)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = chart.partition(">")[2].removesuffix("</svg>")
    return f"{head}><style>{_STYLE}</style>{body}{names}</svg>\n"


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(draw([Path(name) for name in sys.argv[2:]]))
