"""The foreign scaffold of a run: its program, the gateway that records it, and its agents."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skyrl_jax.agents.external import ExternalAgent, Program, ProgramProvider
from skyrl_jax.agents.parsing import parse_assistant
from skyrl_jax.agents.scaffolds import EXTERNAL, scaffold
from skyrl_jax.agents.tools import specs_of
from skyrl_jax.core.config import RolloutConfig, RunConfig
from skyrl_jax.core.protocols import Generator
from skyrl_jax.core.types import Message, SamplingParams, ToolDef
from skyrl_jax.gateway.app import Gateway
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.generation.renderer import AnyRenderer, ChatMLRenderer, TemplateRenderer
from skyrl_jax.sandbox.factory import resolve_image
from skyrl_jax.tasks.swe.repo import WORKDIR


@dataclass(frozen=True, kw_only=True)
class Scaffold:
    """What the agents of a run with a foreign scaffold share; lives as long as its gateway."""

    config: RunConfig
    provider: ProgramProvider
    program: Program
    gateway: Gateway
    image: str
    stop_token_ids: tuple[int, ...]

    def agent(self, rollout: RolloutConfig, phase: str, temperature: float | None) -> ExternalAgent:
        """Return the agent of one phase; ``temperature`` overrides the rollout's (0 = greedy)."""
        return ExternalAgent(
            program=self.program,
            gateway=self.gateway,
            provider=self.provider,
            image=self.image,
            sampling=SamplingParams(
                temperature=rollout.temperature if temperature is None else temperature,
                max_new_tokens=rollout.max_new_tokens,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                stop_token_ids=self.stop_token_ids,
            ),
            budget=Budget(turns=rollout.max_turns, context=rollout.max_episode_tokens),
            time_limit_s=rollout.run_timeout_s,
            seed=self.config.seed,
            phase=phase,
            best_effort=self.config.sandbox.best_effort,
        )


@asynccontextmanager
async def open_scaffold(
    config: RunConfig,
    cache: Path,
    provider: ProgramProvider,
    renderer: AnyRenderer,
    generator: Generator,
) -> AsyncIterator[Scaffold | None]:
    """Install and open what ``agent.kind`` names; ``None`` where that is our own loop.

    Raises:
        ImageError: the scaffold's packages cannot be installed.
    """
    if config.agent.kind not in EXTERNAL:
        yield None
        return
    program = await asyncio.to_thread(
        scaffold,
        config.agent,
        cache,
        command_timeout_s=config.sandbox.command_timeout_s,
        cwd=f"/{WORKDIR}",
    )
    image = await asyncio.to_thread(resolve_image, config.sandbox, cache)
    async with Gateway(
        generator=generator,
        renderer_for=tools_renderer(renderer),
        api_key=secrets.token_hex(),  # no session by its name alone: other users share a loopback
    ) as gateway:
        yield Scaffold(
            config=config,
            provider=provider,
            program=program,
            gateway=gateway,
            image=image,
            stop_token_ids=renderer.stop_token_ids,
        )


def tools_renderer(renderer: AnyRenderer) -> Callable[[tuple[ToolDef, ...]], AnyRenderer]:
    """Return what gives a renderer the tools of a client: its parser then knows these alone."""
    if isinstance(renderer, TemplateRenderer):
        return renderer.with_tools

    def with_tools(tools: tuple[ToolDef, ...]) -> ChatMLRenderer:
        # without tools nothing but text can be meant, as in a call for a title
        parse = partial(parse_assistant, tools=specs_of(tools)) if tools else _text_alone
        return ChatMLRenderer(renderer.tokenizer, parse)

    return with_tools


def _text_alone(text: str, length_cut: bool) -> Message:
    del length_cut
    return Message(role="assistant", content=text)
