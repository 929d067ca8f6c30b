"""Small real worlds for the SWE tests: one suite over bwrap, and configurations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from skyrl_jax.core.config import AgentConfig, SandboxConfig
from skyrl_jax.core.types import Task, ToolCall
from skyrl_jax.sandbox.bwrap import BwrapProvider, prepare_layer
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.suite import SweSuite
from skyrl_jax.tasks.swe.synthesize import make_splits

CACHE = Path(__file__).resolve().parents[2] / ".cache"
SANDBOX = SandboxConfig(
    backend="bwrap",
    image="",
    cpus=1.0,
    memory_mb=256,
    pids=64,
    disk_mb=64,
    command_timeout_s=20.0,
    lifetime_s=300.0,
    best_effort=True,
    warm=0,
    warm_creates=1,
    docker_runtime="",
    docker_read_only=False,
    docker_connections=16,
    docker_timeout_s=60.0,
)


def agent(style: str = "compact") -> AgentConfig:
    return AgentConfig(kind="codeact", prompt_style=style, observation_tokens=64)


def rows(count: int = 2, seed: int = 5) -> list[SweRow]:
    return make_splits(count, 0, 0, seed)["train"]


def make_suite(cache: Path, *, style: str = "compact", image: str = "", **splits: Any) -> SweSuite:
    return SweSuite(
        splits or {"train": rows()},
        agent=agent(style),
        sandbox=SANDBOX,
        image=image or str(base_image(CACHE)),
        cache=cache,
        prepare=prepare_layer,
    )


def in_bwrap(work: Callable[[BwrapProvider], Awaitable[Any]], timeout_s: float = 120.0) -> Any:
    """Run ``work(provider)`` and check that it leaves no sandbox."""

    async def run() -> Any:
        async with asyncio.timeout(timeout_s):
            async with BwrapProvider(run_id="swe-tests", cache_dir=CACHE) as provider:
                result = await work(provider)
                assert provider.live == 0
                return result

    return asyncio.run(run())


def edit(task: Task, new: str | None = None) -> ToolCall:
    payload = task.payload
    return ToolCall(
        name="str_replace_editor",
        arguments={
            "path": payload["path"],
            "old_str": payload["buggy_line"],
            "new_str": payload["fixed_line"] if new is None else new,
        },
    )


def bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})
