"""Train an agent: python launchers/train.py --config=configs/swe.py[:PRESET] [--workdir=FOLDER].

Running it again on the same folder resumes. The last line printed is the path of the report.

Several processes: start it once in each with the same --config and the same --workdir, on a file
system they share, and either --distributed alone (TPU pod, Slurm: they find each other) or
--coordinator=HOST:PORT --num_processes=N --process_id=I (HOST:PORT of process 0). Process 0 plays
the episodes, all train. SIGTERM to any of them: all stop after the same step, with a checkpoint.

Exit codes: 0 done · 2 something is wrong, as the last line says · 69 another process is missing,
late or dead · 75 stopped by SIGTERM to one of several processes, start all again · 130 stopped
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags, logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launchers.common import define_config_flag, read_config, run_main, unknown_host
from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import ConfigError, PeerError, SkyrlError

if TYPE_CHECKING:
    from skyrl_jax.learner.distributed import Rendezvous
    from skyrl_jax.train.together import Lead
    from skyrl_jax.train.workdir import Workdir

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", "", "run folder; default runs/<name>-seed<seed>-<time>")
_CACHE = flags.DEFINE_string("cache_dir", ".cache", "folder shared over runs (images, task trees)")
_ALLOW = flags.DEFINE_list("allow_change", [], "config keys that may differ on resume")
_PROFILE = flags.DEFINE_list(
    "profile_steps", [], "steps whose learner part is traced into WORKDIR/profile, e.g. 3,7"
)
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "one of several processes, found by JAX")
_COORDINATOR = flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "how many processes there are")
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "which one this is: 0, 1, ...")


def main(argv: list[str]) -> int:
    """Parse, open the run folder, train."""
    logging.set_verbosity(logging.ERROR)  # Orbax tells of every file it writes
    config = read_config(_CONFIG)
    # jax: only once the config is right
    from skyrl_jax.learner.distributed import leave, rendezvous_from_flags

    where = rendezvous_from_flags(
        distributed=_DISTRIBUTED.value,
        coordinator=_COORDINATOR.value,
        num_processes=_NUM_PROCESSES.value,
        process_id=_PROCESS_ID.value,
    )
    if where is None:
        return _alone(config)
    leave(_one_of_several(config, where))


def _alone(config: RunConfig) -> int:
    from skyrl_jax.train.loop import run
    from skyrl_jax.train.tracing import parse_steps
    from skyrl_jax.train.trainable import check_trainable
    from skyrl_jax.train.workdir import Workdir

    check_trainable(config)  # before a folder is made
    profile = parse_steps(_PROFILE.value, config.train.steps)

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
            made=workdir.pin,
            opened=workdir.commit,
        )
        try:
            report = asyncio.run(job)
        except (KeyboardInterrupt, asyncio.CancelledError):
            print(f"stopped; continue with --workdir={workdir.root}", file=sys.stderr, flush=True)
            return 130
    print(report)
    return 0


def _one_of_several(config: RunConfig, where: Rendezvous) -> int:
    """Play a part in a run of several processes; return the exit code, whatever happens."""
    from skyrl_jax.learner.distributed import EXIT_PEER_LOST

    try:
        return _together(config, where)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PEER_LOST
    except (SkyrlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1


def _together(config: RunConfig, where: Rendezvous) -> int:
    from skyrl_jax.learner.distributed import ProcessGroup
    from skyrl_jax.train.follow import follow, make_follower
    from skyrl_jax.train.together import EXCHANGE, Lead, check_same_config, check_together
    from skyrl_jax.train.workdir import Workdir

    check_together(config)
    if _PROFILE.value:
        raise ConfigError("--profile_steps traces a run of one process")
    if not _WORKDIR.value:
        raise ConfigError("several processes need --workdir: one folder that all of them see")
    root = Path(_WORKDIR.value).absolute()
    where = dataclasses.replace(where, folder=str(root / EXCHANGE), unknown_host=unknown_host)
    with ProcessGroup(where) as peers:
        check_same_config(peers, config)
        if peers.index:
            with make_follower(config, root, peers) as follower:
                return follow(peers, follower)
        with Workdir(root, config, _ALLOW.value) as workdir:
            print(f"run folder: {workdir.root}, {peers.count} processes", flush=True)
            return _lead(config, workdir, Lead(peers, workdir.root))


def _lead(config: RunConfig, workdir: Workdir, lead: Lead) -> int:
    from skyrl_jax.learner.distributed import EXIT_PREEMPTED
    from skyrl_jax.train.loop import run

    cache = Path(_CACHE.value).absolute()
    options = {"setup_s": _setup_seconds(), "made": workdir.pin, "lead": lead}
    options["opened"] = workdir.commit
    code = 0
    try:
        print(asyncio.run(run(config, workdir.root, cache, **options)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"stopped; continue with --workdir={workdir.root}", file=sys.stderr, flush=True)
        code = EXIT_PREEMPTED if lead.stop else 130
    lead.end(code)
    return code


def _setup_seconds() -> float:
    """Return what `make setup` took, if it made the environment that runs this."""
    path = Path(sys.prefix) / "setup_s"
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0


if __name__ == "__main__":
    run_main(main)
