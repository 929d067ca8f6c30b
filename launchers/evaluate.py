"""Grade SWE-bench rows through the real sandbox and grader.

Command    python launchers/evaluate.py --config=configs/swe.py --tasks=FILE --agent=gold|noop
           [--ids=a,b] [--cache_dir=.cache] [--images]

FILE is JSON, JSONL or parquet. "gold" submits each row's own patch, "noop" changes nothing.
--images takes each row's tree from its own container image (docker), pulled where it is not here,
in place of a near release from PyPI. The last line printed is one JSON object
{"resolved", "total", "infra_failures", "rows": [...]}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from absl import flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launchers.common import define_config_flag, read_config, run_async, run_main
from skyrl_jax.core.config import RunConfig, SandboxConfig
from skyrl_jax.core.errors import ConfigError
from skyrl_jax.sandbox.bwrap import prepare_layer
from skyrl_jax.sandbox.factory import make_provider, resolve_image
from skyrl_jax.tasks.swe.rows_suite import rows_suite, select_rows
from skyrl_jax.tasks.swe.suite import HARNESS_TIMEOUT_S
from skyrl_jax.train.evaluate_rows import AGENTS, evaluate_rows
from skyrl_jax.train.row_images import ready_images

_CONFIG = define_config_flag()
_TASKS = flags.DEFINE_string("tasks", None, "file of SWE-bench rows (JSON, JSONL or parquet)")
_AGENT = flags.DEFINE_enum("agent", "gold", AGENTS, "what is submitted")
_IDS = flags.DEFINE_list("ids", [], "only these instances")
_CACHE = flags.DEFINE_string("cache_dir", ".cache", "folder shared over runs (images, trees)")
_IMAGES = flags.DEFINE_boolean("images", False, "use each row's own container image (docker)")

# Real test suites need more than the tiny repositories that a preset may be sized for.
_LEAST_MEMORY_MB = 2048
_LEAST_DISK_MB = 512
_LEAST_TIMEOUT_S = 120.0
_MARGIN_S = 120.0  # a sandbox outlives the longest test run by this


def main(argv: list[str]) -> int:
    """Grade and print the result; 0 unless a host failure kept a row from being graded."""
    del argv
    config = read_config(_CONFIG)
    if not _TASKS.value:
        raise ConfigError("--tasks is missing; name a file of SWE-bench rows")
    result = run_async(_evaluate(config, Path(_TASKS.value), _AGENT.value, tuple(_IDS.value)))
    for row in result["rows"]:
        print(_line(row), flush=True)
    print(json.dumps(result), flush=True)
    return 1 if result["infra_failures"] else 0


async def _evaluate(
    config: RunConfig, path: Path, agent: str, ids: tuple[str, ...]
) -> dict[str, Any]:
    rows = select_rows(path, ids)
    cache = Path(_CACHE.value).absolute()
    sandbox = _roomy(config.sandbox)
    image = await asyncio.to_thread(resolve_image, sandbox, cache, config.actor)
    async with make_provider(
        sandbox, run_id="evaluate", cache_dir=cache, actor=config.actor
    ) as provider:
        suite = await asyncio.to_thread(
            rows_suite,
            rows,
            agent=replace(config.agent, prompt_style="full"),
            sandbox=sandbox,
            image=image,
            cache=cache / "swe",
            prepare=prepare_layer,
            images=await ready_images(rows, provider) if _IMAGES.value else None,
        )
        return await evaluate_rows(
            suite,
            suite.tasks("all"),
            provider,
            agent=agent,
            concurrency=config.rollout.grade_concurrency,
        )


def _line(row: Mapping[str, Any]) -> str:
    text = f"{row['instance_id']}: {row['verdict']}"
    if row.get("approximate"):
        text += f" (approximate tree, {row['p2p_excluded']} PASS_TO_PASS tests excluded)"
    return text


def _roomy(sandbox: SandboxConfig) -> SandboxConfig:
    return replace(
        sandbox,
        memory_mb=max(sandbox.memory_mb, _LEAST_MEMORY_MB),
        disk_mb=max(sandbox.disk_mb, _LEAST_DISK_MB),
        command_timeout_s=max(sandbox.command_timeout_s, _LEAST_TIMEOUT_S),
        lifetime_s=max(sandbox.lifetime_s, HARNESS_TIMEOUT_S + _MARGIN_S),
    )


if __name__ == "__main__":
    run_main(main)
