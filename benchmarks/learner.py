"""Measure the learner's train step on this machine, alone or in turns with a peer.

Command: ``python benchmarks/learner.py --shape=small [--dtype=bfloat16] [--peer=torch]
[--rounds=5] [--hugepages] [--at_least=1.0] [--remat=dots] [--micro_rows=4]``

Prints one JSON line. Rates are medians over rounds; each round's figures stand in "rounds".

tokens_per_s      tokens of the batch / wall seconds of an update (prompt tokens count: all sides
                  compute them)
tokens_per_cpu_s  the same over CPU seconds of all threads: moves less with a machine's other load
mfu               model FLOPs (learner/flops.py) / (seconds x roof); the roof is the rate of a
                  large matmul in the same dtype, measured in the same round
peak_bytes        "peak_of" says of what
load              processes that wanted a core when the rounds began (1-minute mean): on a machine
                  that does other work ratios mean little, since a peer whose threads spin at
                  barriers (OpenMP) loses more than its share
peer_...          the same of the peer; "ratio" = tokens_per_s / peer_tokens_per_s

An update is forward, backward, clip by global norm and AdamW of a GRPO step: clipped loss against
given log-probs, one advantage a row, on every side the same rows x tokens and fp32 masters. Each
side keeps its own way: the peers take all rows at once and recompute nothing, ours cuts the batch
and recomputes as "micro_rows" and "remat" of the result say. Ours is the job's own step (scanned
layers, packed rows, log-probs in chunks, entropies and diagnostics included). The peer runs in its
own virtual environment, made where absent from benchmarks/peers/PEER.txt under
.cache/lanes/bench-PEER. Both sides use the C library's default malloc; with --hugepages a second
set of rounds follows with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 on both sides, reported under
"hugepages".
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import Worker, WorkerFailed, play

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "peers"
OURS = "ours"
# With a peer: fewer rounds say little about a machine that drifts.
MIN_ROUNDS = 5
HUGEPAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# What would give one side another allocator, thread count or compiler than its default.
_TUNING = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_", "OMP_", "MKL_", "OPENBLAS_", "XLA_FLAGS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tied Qwen3 and a batch of ``rows`` sequences of ``prompt + completion`` tokens."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rows: int
    prompt: int
    completion: int
    # Of our step alone: how it cuts the batch, and what the backward pass keeps. Small pieces keep
    # little between forward and backward: most of what a CPU loses beside its matmuls is writing
    # fresh pages for that. A chunk of all tokens of a piece computes the logits once, not twice.
    micro_rows: int
    logprob_chunk: int
    remat: str = "none"
    steps: int  # updates in a turn
    roof_size: int = 2048

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.rows * (self.prompt + self.completion)


SHAPES: dict[str, Shape] = {
    # For the tests: seconds.
    "tiny": Shape(
        layers=2, dim=32, heads=2, kv_heads=1, head_dim=16, ffn=64, vocab=64, rows=2, prompt=4,
        completion=12, micro_rows=2, logprob_chunk=32, steps=2, roof_size=64,
    ),
    "small": Shape(
        layers=4, dim=256, heads=4, kv_heads=2, head_dim=64, ffn=768, vocab=4096, rows=8,
        prompt=64, completion=192, micro_rows=2, logprob_chunk=2048, remat="dots", steps=6,
    ),
    "medium": Shape(
        layers=8, dim=512, heads=8, kv_heads=4, head_dim=64, ffn=1536, vocab=16384, rows=4,
        prompt=128, completion=384, micro_rows=4, logprob_chunk=512, steps=2,
    ),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and print; 1 when the ratio is under ``--at_least``, 2 when a side failed."""
    options = parse(argv)
    try:
        result = run(options)
    except (WorkerFailed, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result), flush=True)
    if options.at_least is not None and result["ratio"] < options.at_least:
        print(
            f"{options.shape} {options.dtype}: {result['ratio']:.2f} x {options.peer} is under "
            f"{options.at_least:g}",
            file=sys.stderr,
        )
        return 1
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ends the program with status 2 and a reason where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peer", choices=sorted(p.stem for p in PEERS.glob("*.txt")))
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--remat", choices=["none", "full", "attn_out", "dots"], help="of our step")
    parser.add_argument("--micro_rows", type=int, help="rows of a micro-batch of our step")
    parser.add_argument("--hugepages", action="store_true", help="measure again with big pages")
    parser.add_argument("--at_least", type=float, help="exit code 1 where the ratio is smaller")
    options = parser.parse_args(argv)
    least = MIN_ROUNDS if options.peer else 1
    if options.rounds < least:
        parser.error(f"--rounds is {options.rounds}; at least {least} are needed")
    if options.at_least is not None and not options.peer:
        parser.error("--at_least compares with a peer: name one by --peer")
    rows = SHAPES[options.shape].rows
    if options.micro_rows is not None and (options.micro_rows < 1 or rows % options.micro_rows):
        parser.error(f"--micro_rows is {options.micro_rows}; it must divide the {rows} rows")
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of one call of the command."""
    ours = {"remat": options.remat, "micro_rows": options.micro_rows}
    ours = {key: value for key, value in ours.items() if value is not None}
    shape = dataclasses.replace(SHAPES[options.shape], **ours)
    pythons = {OURS: Path(sys.executable)}
    if options.peer:
        pythons[options.peer] = peer_python(options.peer)
    result = {"shape": options.shape, "dtype": options.dtype, "malloc": "default"}
    result |= {"remat": shape.remat, "micro_rows": shape.micro_rows}
    result |= measure(shape, options.dtype, pythons, options.rounds)
    if options.hugepages:
        again = measure(shape, options.dtype, pythons, options.rounds, HUGEPAGES)
        result["hugepages"] = {"malloc": HUGEPAGES["GLIBC_TUNABLES"]} | again
    return result


def measure(
    shape: Shape,
    dtype: str,
    pythons: Mapping[str, Path],
    rounds: int,
    extra_env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start the sides, let them take turns and return the figures (module docstring).

    Args:
        shape: what every side computes.
        dtype: of the computation.
        pythons: interpreter of each side; ours comes first.
        rounds: turns of each side.
        extra_env: variables added to the environment of every side.
    """
    job = dataclasses.asdict(shape) | {"dtype": dtype}
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        sides: dict[str, Worker] = {}
        for name, python in pythons.items():
            script = PEERS / ("skyrl_step.py" if name == OURS else f"{name}_step.py")
            env = worker_env(os.environ, name, alone=len(pythons) == 1) | dict(extra_env or {})
            sides[name] = stack.enter_context(Worker(name, python, script, job, env))
        played = play(sides, rounds=rounds, steps=shape.steps)
        about = {name: side.about | side.ask({"do": "peak"}) for name, side in sides.items()}
    return {"load": round(load, 2)} | summary(shape.tokens, played, about)


def worker_env(environ: Mapping[str, str], name: str, *, alone: bool) -> dict[str, str]:
    """Return a side's environment: defaults of every library, and the CPU where sides compare."""
    env = {key: value for key, value in environ.items() if not key.startswith(_TUNING)}
    env.pop("PYTHONPATH", None)
    if name == OURS:
        env["PYTHONPATH"] = str(ROOT)
    if not alone:
        env["JAX_PLATFORMS"] = "cpu"
    return env | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def summary(
    tokens: int,
    played: Sequence[Mapping[str, Mapping[str, float]]],
    about: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Turn the rounds into the result: medians over rounds, ratio of the medians.

    Args:
        tokens: of the batch.
        played: what ``rounds.play`` returns.
        about: what each side says of itself; ours comes first.
    """
    peer = next((name for name in about if name != OURS), None)
    flops = about[OURS]["step_flops"]
    rows = []
    for figures in played:
        ours = figures[OURS]
        row = {"first": next(iter(figures))} | _rates(tokens, ours)
        row |= {"roof_gflops": ours["roof"] / 1e9, "mfu": flops / (ours["step_s"] * ours["roof"])}
        if peer:
            row |= {f"peer_{k}": v for k, v in _rates(tokens, figures[peer]).items()}
        rows.append(row)
    names = [name for name in rows[0] if name != "first"]
    result: dict[str, Any] = {n: statistics.median(row[n] for row in rows) for n in names}
    result |= _rest(about[OURS])
    if peer:
        result["peer"] = peer
        result |= {f"peer_{key}": value for key, value in _rest(about[peer]).items()}
        result["ratio"] = result["tokens_per_s"] / result["peer_tokens_per_s"]
        result["cpu_ratio"] = result["tokens_per_cpu_s"] / result["peer_tokens_per_cpu_s"]
    return _rounded(result | {"rounds": rows})


def _rates(tokens: int, figures: Mapping[str, float]) -> dict[str, float]:
    return {
        "tokens_per_s": tokens / figures["step_s"],
        "tokens_per_cpu_s": tokens / figures["cpu_s"],
    }


def _rest(about: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in about.items() if key != "step_flops"}


def _rounded(value: Any) -> Any:
    """Keep 4 digits: the rest is noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def peer_python(
    peer: str, *, pins: Path | None = None, lanes: Path = ROOT / ".cache" / "lanes"
) -> Path:
    """Return the interpreter of a peer's virtual environment; made where absent or outdated.

    Args:
        peer: its name.
        pins: its requirements; benchmarks/peers/PEER.txt by default.
        lanes: where environments of lanes are kept.

    Raises:
        CalledProcessError: it could not be made.
    """
    wanted = (pins or PEERS / f"{peer}.txt").read_text()
    folder = lanes / f"bench-{peer}"
    stamp, python = folder / "pins.txt", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making {folder} ...", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    pinned_for = shutil.which("python3.11") or sys.executable
    # The one line on standard output is the result.
    subprocess.run([pinned_for, "-m", "venv", str(folder)], check=True, stdout=sys.stderr)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r"]
    listed = folder / "requirements.txt"
    listed.write_text(wanted)
    subprocess.run([*install, str(listed)], check=True, stdout=sys.stderr)
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
