"""The worker's side of a benchmark in turns: prepare once, then compute only when told to.

A worker is a script that calls ``serve``; benchmarks/rounds.py starts it with the job as JSON in
its first argument. It answers one JSON line to each request on its standard input:

    (once prepared)             {...what it says of itself, "first_step_s": s}
    {"do": "steps", "count": n} {"seconds": [s, ...], "cpu_seconds": [s, ...]}
    {"do": "roof"}              {"flops_per_s": r}
    {"do": "peak"}              {"peak_bytes": n, "peak_of": what}

and ends at the end of its input. Standard library only: each worker has an interpreter of its own.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

# Steps before the first turn, beside the one that compiles: allocators and caches settle.
WARM_UP = 2


def resident_peak() -> dict[str, Any]:
    """Return the largest resident set of this process so far."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_bytes": kibibytes * 1024, "peak_of": "resident set of the measuring process"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a side can do.

    ``step`` takes one whole optimizer update, waits for all of its results and returns the loss;
    ``about`` is told once; ``roof`` measures the matmul rate in FLOP/s.
    """

    step: Callable[[], float]
    about: Mapping[str, Any]
    roof: Callable[[], float] | None = None
    peak: Callable[[], dict[str, Any]] = resident_peak


def serve(prepare: Callable[[Mapping[str, Any]], Prepared]) -> None:
    """Answer requests until the input ends; ``prepare`` gets the job."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints goes to the log, never among the answers
    side = prepare(json.loads(sys.argv[1]))
    first = _timed(side.step, 1)
    _timed(side.step, WARM_UP)
    _tell(answers, {**side.about, "first_step_s": first["seconds"][0]})
    for line in sys.stdin:
        _tell(answers, _answer(side, json.loads(line)))


def _answer(side: Prepared, request: Mapping[str, Any]) -> dict[str, Any]:
    if request["do"] == "steps":
        return _timed(side.step, int(request["count"]))
    if request["do"] == "peak":
        return side.peak()
    if request["do"] == "roof" and side.roof is not None:
        return {"flops_per_s": side.roof()}
    raise ValueError(f"no such request: {dict(request)}; known: steps, roof, peak")


def _timed(step: Callable[[], float], count: int) -> dict[str, list[float]]:
    """Run steps; return the wall and the CPU seconds (all threads) of each.

    Raises:
        ValueError: a loss is not finite, so what was timed is no training.
    """
    seconds, cpu_seconds = [], []
    for _ in range(count):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
        if not math.isfinite(loss):
            raise ValueError(f"the loss of a benchmark step is {loss}: nothing was trained")
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def _tell(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(dict(answer)) + "\n")
    answers.flush()
