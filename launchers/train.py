"""Train an agent: python launchers/train.py --config=configs/swe.py[:PRESET] [--workdir=FOLDER].

Running it again on the same folder resumes. The last line printed is the path of the report.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from absl import flags, logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launchers.common import define_config_flag, read_config, run_main

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", "", "run folder; default runs/<name>-seed<seed>-<time>")
_CACHE = flags.DEFINE_string("cache_dir", ".cache", "folder shared over runs (images, task trees)")
_ALLOW = flags.DEFINE_list("allow_change", [], "config keys that may differ on resume")
_PROFILE = flags.DEFINE_list(
    "profile_steps", [], "steps whose learner part is traced into WORKDIR/profile, e.g. 3,7"
)


def main(argv: list[str]) -> int:
    """Parse, open the run folder, train."""
    logging.set_verbosity(logging.ERROR)  # Orbax tells of every file it writes
    config = read_config(_CONFIG)
    from skyrl_jax.train.loop import run  # jax: only once the config is right
    from skyrl_jax.train.tracing import parse_steps
    from skyrl_jax.train.workdir import Workdir

    profile = parse_steps(_PROFILE.value)

    stamp = time.strftime("%Y%m%d-%H%M%S")
    root = Path(_WORKDIR.value or f"runs/{config.name}-seed{config.seed}-{stamp}")
    cache = Path(_CACHE.value).absolute()
    with Workdir(root, config, _ALLOW.value) as workdir:
        print(f"run folder: {workdir.root}", flush=True)
        job = run(
            config,
            workdir.root,
            cache,
            setup_s=_setup_seconds(),
            profile=profile,
            opened=workdir.commit,
        )
        try:
            report = asyncio.run(job)
        except (KeyboardInterrupt, asyncio.CancelledError):
            print(f"stopped; continue with --workdir={workdir.root}", file=sys.stderr, flush=True)
            return 130
    print(report)
    return 0


def _setup_seconds() -> float:
    """Return what `make setup` took, if it made the environment that runs this."""
    path = Path(sys.prefix) / "setup_s"
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0


if __name__ == "__main__":
    run_main(main)
