"""Say whether a job fits a TPU slice, and what a step costs, without the slice.

python launchers/plan.py --config=configs/swe.py:qwen3_8b --topology=v5e:4x4
       [--mesh=data=1,fsdp=16,tensor=1,context=1] [--seq_len=2048] [--rows=16]
       [--remat=none|dots|attn_out|full|all] [--search] [--json]

The job's own train step is compiled for the topology (a minute or two). Rows are per micro-batch
over the whole mesh. --search takes a kind of chip (--topology=v5p) and finds its smallest slice.
--json prints one object last, of a plan; what is refused has none.
Exit code: 0 it fits, 1 it does not, 2 something is wrong (also a search that had no time to say).
Meshes of GPUs (--topology=gpu:8xH100-80GB) are estimated. How to read it: docs/scaling.md.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

# a machine that plans may have an accelerator that belongs to somebody else
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags

from launchers.common import define_config_flag, read_config, run_main
from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.plan.child import compile_job, require_libtpu
from skyrl_jax.plan.chips import ladder, parse_topology
from skyrl_jax.plan.job import REMAT_POLICIES, check_job, make_job, parse_mesh
from skyrl_jax.plan.search import LIMIT_S, search
from skyrl_jax.plan.table import Summary, render, render_policies, summarize

_CONFIG = define_config_flag()
_TOPOLOGY = flags.DEFINE_string("topology", "", "v5e:4x4, gpu:8xH100-80GB; with --search also v5p")
_MESH = flags.DEFINE_string("mesh", "", "axes that differ from the preset's, e.g. fsdp=8,tensor=2")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 0, "tokens of a row; 0 = the preset's", lower_bound=0)
_ROWS = flags.DEFINE_integer("rows", 0, "rows of a micro-batch; 0 = the preset's", lower_bound=0)
_REMAT = flags.DEFINE_enum("remat", "", ["", *REMAT_POLICIES, "all"], "'' = the preset's")
_SEARCH = flags.DEFINE_boolean("search", False, "find the smallest topology and mesh that fit")
_LIMIT_S = flags.DEFINE_float("limit_s", LIMIT_S, "seconds that a search may take")
_JSON = flags.DEFINE_boolean("json", False, "print one JSON object last")


def main(argv: list[str]) -> int:
    """Compile, print, and return 0 exactly when the job fits."""
    del argv
    config = read_config(_CONFIG)
    if not _TOPOLOGY.value:
        raise ConfigError("--topology is missing; try --topology=v5e:4x4, or v5p with --search")
    summary = _search(config) if _SEARCH.value else _plan(config)
    if _JSON.value:
        print(json.dumps(summary), flush=True)
    return 0 if summary["fits"] else 1


def _plan(config: RunConfig) -> Summary:
    """Compile one plan, or one per remat policy; return that with the least recomputation."""
    topology = parse_topology(_TOPOLOGY.value)
    policies = REMAT_POLICIES if _REMAT.value == "all" else (_REMAT.value,)
    jobs = [
        make_job(
            config,
            topology,
            rows=_ROWS.value,
            seq_len=_SEQ_LEN.value,
            remat=remat,
            mesh=parse_mesh(_MESH.value),
        )
        for remat in policies
    ]
    check_job(jobs[0])
    summaries = [summarize(job, compile_job(job)) for job in jobs]
    best = next((s for s in summaries if s["fits"]), summaries[-1])
    print(render(config.name, best), flush=True)
    if len(summaries) > 1:
        print(f"\n{render_policies(summaries)}", flush=True)
        best = best | {"policies": summaries}
    return best


def _search(config: RunConfig) -> Summary:
    """Try topologies and meshes until one fits; ``{"fits": False}`` where none does."""
    if not 0 < _LIMIT_S.value < math.inf:
        raise ConfigError(f"--limit_s={_LIMIT_S.value:g}: give the search a number of seconds")
    if _MESH.value:
        raise ConfigError("--search chooses the mesh: leave --mesh out")
    topologies = list(ladder(_TOPOLOGY.value))
    if topologies[0].is_tpu:
        require_libtpu()
    from skyrl_jax.plan.params import count_params  # jax: only once the flags are right

    job = make_job(config, topologies[0], rows=_ROWS.value, seq_len=_SEQ_LEN.value)
    policies = (_REMAT.value,) if _REMAT.value not in ("", "all") else REMAT_POLICIES
    found = search(
        job,
        topologies,
        count_params(config.model),
        compile_job,
        policies=policies,
        limit_s=_LIMIT_S.value,
        tell=lambda line: print(line, flush=True),
    )
    if found is None:
        print(f"nothing that was tried of {_TOPOLOGY.value} fits", flush=True)
        last = topologies[-1].text
        return {"fits": False, "topology": last} | dict.fromkeys(
            ("peak_bytes", "hbm_bytes", "mesh", "remat", "step_time_s")
        )
    summary = summarize(found.job, found.compiled)
    print(f"\n{render(config.name, summary)}", flush=True)
    return summary


if __name__ == "__main__":
    run_main(main)
