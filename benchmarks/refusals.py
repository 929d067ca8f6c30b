"""Give the launchers models and meshes that they cannot use, and judge what they answer.

Command: ``python benchmarks/refusals.py [--folder=.cache/refusals] [--only=CASE,...]``

Makes a small Hugging Face folder, spoils copies of it, starts the launchers on them and prints one
JSON line: for each case the exit code, the line that says what is wrong, the bytes that jax had on
devices at that moment, and whether all of it is right: exit code 2, one line that names the tensor
or axis and what would be right, no traceback, and nothing on a device but a PRNG key. Exit code 0
when every case is right. Case "whole" is the control: the same folder unspoilt gets past the checks
of its weights, to its missing tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WATCH = "--watch"
# In the quick start's model: 1 key/value head of 32 channels, 96 features.
TENSOR = "model.layers.1.self_attn.k_proj.weight"
KEY_BYTES = 64  # of PRNG keys, which a run may have made by then
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launcher with something that it must refuse.

    Args:
        name: of the case.
        launcher: file of launchers/.
        flags: its arguments.
        says: pattern of the one line that it must answer.
        devices: CPU devices that jax shows.
    """

    name: str
    launcher: str
    flags: tuple[str, ...]
    says: str
    devices: int = 1


# How a folder is spoilt -> what must be said of it.
SPOILT = {
    "missing-tensor": rf"the weights lack tensor '{re.escape(TENSOR)}' of shape \[32, 96\]",
    "wrong-shape": rf"tensor '{re.escape(TENSOR)}' has shape \[96, 32\], .*asks for \[32, 96\]",
    "unknown-architecture": r"model_type 'mamba' .*known families: llama, qwen2, qwen3, qwen3_moe",
    "truncated": r"cannot read \S*model\.safetensors: .*must be copied again",
}
HEADS = (
    r"mesh\.tensor = 2 does not divide model\.num_heads = 3 \(leaf layers\.q\): .*make mesh\.tensor"
)


def cases(folder: Path) -> tuple[Case, ...]:
    """Return all cases; ``folder`` holds what ``make_folders`` makes."""

    def train(name: str, says: str, *flags: str, devices: int = 1) -> Case:
        run = (f"--workdir={folder / 'runs' / name}", f"--cache_dir={folder / 'cache'}")
        flags = ("--config=configs/swe.py:quickstart", *run, *flags)
        return Case(
            name=f"train-{name}", launcher="train.py", flags=flags, says=says, devices=devices
        )

    def start(name: str) -> str:
        return f"--config.model.checkpoint={folder / name}"

    weights = [train(name, says, start(name)) for name, says in SPOILT.items()]
    served = [
        Case(
            name=f"serve-{name}",
            launcher="serve.py",
            flags=(f"--model={folder / name}", "--port=0"),
            says=says,
        )
        for name, says in SPOILT.items()
    ]
    planned = ("--config=configs/swe.py:quickstart", "--topology=v5e:2x2", "--rows=4")
    return (
        train("whole", r"tokenizer\.json is missing", start("whole")),
        *weights,
        *served,
        train("mesh", HEADS, "--config.mesh.tensor=2", devices=4),
        Case(
            name="plan-mesh",
            launcher="plan.py",
            flags=(*planned, "--mesh=fsdp=2,tensor=2"),
            says=HEADS,
        ),
    )


def main(argv: Sequence[str]) -> int:
    """Run the cases; 0 when all are right."""
    if argv[:1] == [WATCH]:
        return watch(*argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "refusals")
    parser.add_argument("--only", default="", help="comma-separated cases")
    options = parser.parse_args(argv)
    folder = options.folder.absolute()
    make_folders(folder)
    wanted = [c for c in cases(folder) if not options.only or c.name in options.only.split(",")]
    found = {case.name: ask(case) for case in wanted}
    print(json.dumps(found))
    return 0 if found and all(answer["right"] for answer in found.values()) else 1


def make_folders(folder: Path) -> None:
    """Write the quick start's model as ``whole``, and a copy for each way to spoil it."""
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from safetensors.numpy import load_file, save_file

    from configs.swe import get_config
    from skyrl_jax.core.config import parse_config
    from skyrl_jax.models import hf
    from skyrl_jax.models.decoder import init_params

    shutil.rmtree(folder, ignore_errors=True)
    (folder / "runs").mkdir(parents=True)
    cfg = parse_config(get_config("quickstart").to_dict()).model
    hf.save_hf(folder / "whole", cfg, init_params(cfg, jax.random.key(0)))
    for name in SPOILT:
        shutil.copytree(folder / "whole", folder / name)
    tensors = load_file(str(folder / "whole" / "model.safetensors"))
    lacking = {name: values for name, values in tensors.items() if name != TENSOR}
    save_file(lacking, str(folder / "missing-tensor" / "model.safetensors"))
    turned = tensors | {TENSOR: tensors[TENSOR].T.copy()}
    save_file(turned, str(folder / "wrong-shape" / "model.safetensors"))
    config = folder / "unknown-architecture" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mamba"}))
    cut = folder / "truncated" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])


def ask(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own and judge the answer."""
    env = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    if case.devices > 1:
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={case.devices}"
    done = subprocess.run(
        [sys.executable, __file__, WATCH, f"launchers/{case.launcher}", *case.flags],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    watched = [line for line in done.stdout.splitlines() if line.startswith("watched ")]
    answer = {
        "exit": done.returncode,
        "errors": [line for line in done.stderr.splitlines() if line.startswith("error: ")],
        "traceback": "Traceback" in done.stdout + done.stderr,
        "device_bytes": json.loads(watched[-1].removeprefix("watched ")) if watched else None,
    }
    return answer | {"right": right(answer, case.says)}


def right(answer: Mapping[str, Any], says: str) -> bool:
    """Tell whether an answer is one clear line, before a device holds anything.

    Args:
        answer: as ``ask`` makes it; ``device_bytes`` is ``None`` where nothing was said.
        says: pattern of the line.
    """
    return (
        answer["exit"] == 2
        and len(answer["errors"]) == 1
        and re.search(says, answer["errors"][0]) is not None
        and not answer["traceback"]
        and answer["device_bytes"] is not None
        and answer["device_bytes"] <= KEY_BYTES
    )


class Witness:
    """Standard error that counts what lies on devices when an error is told.

    The error is still being handled then, so that arrays of the functions it went through are
    alive.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.device_bytes: int | None = None

    def __getattr__(self, name: str) -> Any:
        """Return everything else of the stream."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, and count at the first line that tells an error."""
        if self.device_bytes is None and text.startswith("error: "):
            import jax

            self.device_bytes = sum(array.nbytes for array in jax.live_arrays())
        written: int = self._stream.write(text)
        return written


def watch(launcher: str, *flags: str) -> int:
    """Run a launcher in this process as if it were started itself; return its exit code."""
    sys.path[0] = str((ROOT / launcher).parent)
    sys.argv = [launcher, *flags]
    witness = Witness(sys.stderr)
    sys.stderr = witness  # type: ignore[assignment]
    code: Any = 0
    try:
        runpy.run_path(str(ROOT / launcher), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    print("watched", json.dumps(witness.device_bytes), flush=True)
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
