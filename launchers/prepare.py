"""Get the container images of a file of rows before a job needs them.

Command    python launchers/prepare.py --config=configs/swe.py --tasks=FILE [--ids=a,b]
           [--cache_dir=.cache] --config.sandbox.backend=docker

Pulls each row's image (mirror, logins and disk budget: sandbox.image_*), cuts its history at the
base commit and gives the tree to the agent's uid, once; what is done is only looked up. The last
line printed is one JSON object {"ready", "failed", "images": {...}}. Exit code 1 when one failed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from absl import flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launchers.common import define_config_flag, read_config, run_async, run_main
from skyrl_jax.core.config import RunConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.sandbox.factory import make_provider
from skyrl_jax.sandbox.image_prepare import Prepared
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.rows_suite import select_rows
from skyrl_jax.train.row_images import ready_images

_CONFIG = define_config_flag()
_TASKS = flags.DEFINE_string("tasks", None, "file of SWE-bench rows (JSON, JSONL or parquet)")
_IDS = flags.DEFINE_list("ids", [], "only these instances")
_CACHE = flags.DEFINE_string("cache_dir", ".cache", "folder shared over runs (images, trees)")


def main(argv: list[str]) -> int:
    """Prepare and print what there is now; 0 when every row has its image."""
    del argv
    config = read_config(_CONFIG)
    if not _TASKS.value:
        raise ConfigError("--tasks is missing; name a file of SWE-bench rows")
    rows = select_rows(Path(_TASKS.value), tuple(_IDS.value))
    result = run_async(_prepare(config, rows))
    print(json.dumps(result), flush=True)
    return 1 if result["failed"] else 0


async def _prepare(config: RunConfig, rows: tuple[SweRow, ...]) -> dict[str, Any]:
    cache = Path(_CACHE.value).absolute()
    done = 0

    def tell(name: str, found: Prepared) -> None:
        nonlocal done
        done += 1
        said = found.why_not or f"ready as {found.image}"
        print(f"[{done}/{len(rows)}] {name}: {said}", file=sys.stderr, flush=True)

    async with make_provider(config.sandbox, run_id="prepare", cache_dir=cache) as provider:
        found = await ready_images(rows, provider, tell)
    images = {
        name: {"image": one.image, "commit": one.commit} if one.image else {"why_not": one.why_not}
        for name, one in found.items()
    }
    failed = sum(not one.image for one in found.values())
    return {"ready": len(images) - failed, "failed": failed, "images": images}


if __name__ == "__main__":
    run_main(main)
