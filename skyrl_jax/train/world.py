"""Everything outside the learner that a run needs, opened in order and closed in reverse.

base image -> sandbox provider -> tasks (validated) -> tokenizer, renderer
weight store -> engine server (or the servers of the config) -> client -> bridge
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_jax.actor.episodes import EpisodeRunner, run_episode
from skyrl_jax.actor.ray_workers import RayWorkers
from skyrl_jax.agents.loop import make_codeact
from skyrl_jax.agents.parsing import LENGTH_CUT, NO_CALL
from skyrl_jax.agents.scripted import words_of
from skyrl_jax.core.config import OWN_LOOP, ModelConfig, RunConfig
from skyrl_jax.core.errors import ConfigError, DataError, GenerationError, HostError
from skyrl_jax.core.protocols import Agent
from skyrl_jax.core.types import Task
from skyrl_jax.generation.renderer import AnyRenderer
from skyrl_jax.generation.sglang import SGLangGenerator
from skyrl_jax.generation.tokenizer import Tokenizer, load_or_train
from skyrl_jax.models import hf
from skyrl_jax.sandbox.bwrap import prepare_layer
from skyrl_jax.sandbox.factory import AnyProvider, make_provider, resolve_image
from skyrl_jax.sandbox.ray_hosts import RayProvider
from skyrl_jax.serve.child import ServerChild
from skyrl_jax.serve.process import ServeOptions
from skyrl_jax.sync.bridge import Bridge
from skyrl_jax.sync.publish import Publisher
from skyrl_jax.tasks.swe.environment import PASSED
from skyrl_jax.tasks.swe.rows import SweRow
from skyrl_jax.tasks.swe.suite import SweSuite, row_digest, synthetic_splits, task_row
from skyrl_jax.train.chat import keep_template, log_check, open_chat, template_files
from skyrl_jax.train.pretrained import TOKENIZER, pretrained_tokenizer
from skyrl_jax.train.scaffold import Scaffold, open_scaffold
from skyrl_jax.train.workdir import read_json, write_json
from skyrl_jax.weights.store import FolderStore

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class World:
    """The parts of a run; they live as long as ``open_world``'s block."""

    config: RunConfig
    workdir: Path
    provider: AnyProvider
    suite: SweSuite
    tokenizer: Tokenizer
    renderer: AnyRenderer
    generator: SGLangGenerator
    store: FolderStore
    publisher: Publisher
    bridge: Bridge
    scaffold: Scaffold | None
    run: EpisodeRunner

    def agent(
        self, phase: str, *, temperature: float | None = None, max_turns: int | None = None
    ) -> Agent:
        """Return the scaffold for one phase; the phase is part of every sampling seed."""
        rollout = self.config.rollout
        if max_turns is not None:
            rollout = replace(rollout, max_turns=max_turns)
        if self.scaffold is not None:
            return self.scaffold.agent(rollout, phase, temperature)
        return make_codeact(
            rollout,
            self.config.agent,
            self.renderer,
            self.tokenizer,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=self.config.seed,
            phase=phase,
            temperature=temperature,
        )

    async def serve(self, params: Any, number: int) -> dict[str, float]:
        """Publish params as version ``number``; return when the server has proved to serve it.

        Returns:
            How fast the version went from the learner's devices to the server: GB on disk over the
            seconds of all of it (cast, write, check, export, load, probe).

        Raises:
            WeightsError, GenerationError: see sync/bridge.py; the gate stays shut.
        """
        began, write = time.monotonic(), self.publisher.publish
        version = await asyncio.to_thread(write, params, number, self.probe_ids())
        await self.bridge.update(version)
        seconds = time.monotonic() - began
        size = sum(path.stat().st_size for path in version.path.rglob("*") if path.is_file())
        return {"publish_gb_per_s": size / 1e9 / seconds}

    def probe_ids(self) -> tuple[int, ...]:
        """Return the prompt by which a server proves that it serves the published weights."""
        prompt = self.suite.tasks("train")[0].prompt
        return tuple(self.tokenizer.encode(prompt))[: self.config.rollout.max_prompt_tokens]


@asynccontextmanager
async def open_world(
    config: RunConfig,
    workdir: Path,
    cache: Path,
    say: Say,
    make_publisher: Callable[..., Publisher] = Publisher,
) -> AsyncIterator[World]:
    """Open everything a run needs.

    Args:
        config: the run's configuration.
        workdir: the run folder.
        cache: shared over runs: base image, task trees, validation results.
        say: tells a person what is happening.
        make_publisher: takes what ``Publisher`` takes.
    """
    for url in config.engine.servers:
        await check_server(url)  # now, not after a warm start of minutes
    async with AsyncExitStack() as stack:
        run_id = hashlib.sha256(str(workdir).encode()).hexdigest()[:12]
        provider = make_provider(config.sandbox, run_id=run_id, cache_dir=cache, actor=config.actor)
        await stack.enter_async_context(provider)
        suite = await _open_suite(config, workdir, cache, provider, say)
        tokenizer = _open_tokenizer(config, workdir, cache, suite)
        renderer = open_chat(workdir, tokenizer, config.agent.kind)
        say(log_check(renderer, workdir))
        store = FolderStore(workdir / "weights", keep=config.train.keep_weight_versions)
        store.sweep()
        publisher = make_publisher(config.model, store, dtype=config.learner.compute_dtype)
        stack.enter_context(publisher)
        url = await _open_server(config, workdir, renderer, stack)
        generator = SGLangGenerator(
            url,
            timeout_s=config.engine.request_timeout_s,
            gate_open=False,
            routing=_routing(config),
        )
        await stack.enter_async_context(generator)
        scaffold = await stack.enter_async_context(
            open_scaffold(config, cache, provider, renderer, generator)
        )
        # the tokenizer beside the weights: another run can start from such a folder
        bridge = Bridge(
            store,
            [generator],
            workdir / "weights" / "hf",
            hf_config=hf_extra(renderer),
            files=hf_files(workdir),
        )
        await stack.enter_async_context(bridge)
        yield World(
            config=config,
            workdir=workdir,
            provider=provider,
            suite=suite,
            tokenizer=tokenizer,
            renderer=renderer,
            generator=generator,
            store=store,
            publisher=publisher,
            bridge=bridge,
            scaffold=scaffold,
            run=await stack.enter_async_context(_open_runner(config, provider, url)),
        )


@asynccontextmanager
async def _open_runner(
    config: RunConfig, provider: AnyProvider, url: str
) -> AsyncIterator[EpisodeRunner]:
    """Yield what plays an episode: this process, or workers over the Ray cluster.

    A worker's own client of the server has no gate: episodes are asked for while ours is open.
    """
    if not config.actor.ray_workers:
        yield run_episode
        return
    provider = getattr(provider, "inner", provider)  # below a warm pool
    if not isinstance(provider, RayProvider):
        raise ConfigError("actor.ray_workers needs sandbox hosts over Ray (actor.runtime = 'ray')")
    client = functools.partial(
        SGLangGenerator,
        url,
        timeout_s=config.engine.request_timeout_s,
        routing=_routing(config),
    )
    async with RayWorkers(config.actor.ray_workers, provider, client) as workers:
        yield workers.run


def hf_extra(renderer: AnyRenderer) -> dict[str, int]:
    """Return what config.json of this run's Hugging Face folders says beside the model."""
    return {"eos_token_id": renderer.stop_id}


def hf_files(workdir: Path) -> dict[str, bytes]:
    """Return the files that this run's Hugging Face folders hold beside the model."""
    return {TOKENIZER: (workdir / TOKENIZER).read_bytes(), **template_files(workdir)}


def warm_start_corpus(tasks: Iterable[Task], kind: str = OWN_LOOP) -> Iterable[str]:
    """Yield the texts a tokenizer is trained on: prompts and the repairs, as they are written."""
    words = words_of(kind)
    for task in tasks:
        payload = task.payload
        yield f"{task.prompt}\n{payload['new_str']}\n"
    yield words.edit("a.py", "x", "y") + words.submit
    yield from (PASSED, NO_CALL, LENGTH_CUT)


async def _open_suite(
    config: RunConfig, workdir: Path, cache: Path, provider: AnyProvider, say: Say
) -> SweSuite:
    """Make the tasks; the first start of a run validates them and pins the list."""
    image = await asyncio.to_thread(resolve_image, config.sandbox, cache, config.actor)
    splits = await asyncio.to_thread(synthetic_splits, config.tasks)
    pinned = read_json(workdir / "tasks.json")
    if pinned is None and any((workdir / "checkpoints").glob("[0-9]*")):
        raise DataError(
            f"{workdir / 'tasks.json'} is gone but the run has checkpoints: bring it back from a "
            "copy, or start a new --workdir"
        )
    if pinned is not None:
        check_pinned(pinned)
        splits = pinned_rows(splits, pinned)
    suite = SweSuite(
        splits,
        agent=config.agent,
        sandbox=config.sandbox,
        image=image,
        cache=cache / "swe",
        prepare=prepare_layer,
    )
    if pinned is not None:
        say(f"tasks: {sum(map(len, pinned.values()))}, as the run began")
        return suite
    checked = await suite.validate(provider, concurrency=config.rollout.grade_concurrency)
    write_json(
        workdir / "tasks.json",
        {  # lists, since their order decides which tasks a step draws
            name: [[task.task_id, row_digest(task_row(task))] for task in suite.tasks(name)]
            for name in splits
        },
    )
    say(
        f"tasks: {checked.valid} valid ({checked.cached} known from before), "
        f"{len(checked.invalid)} dropped"
    )
    return suite


def check_pinned(pinned: Any) -> None:
    """Refuse a tasks.json of the wrong form.

    Raises:
        DataError: it is not {split: [[task id, digest], ...]} with a training task.
    """
    whole = isinstance(pinned, dict) and all(
        isinstance(entries, list)
        and all(isinstance(e, list) and [type(x) for x in e] == [str, str] for e in entries)
        for entries in pinned.values()
    )
    if not whole or not pinned.get("train"):
        raise DataError("tasks.json of the run is damaged: bring it back from a copy")


def pinned_rows(
    splits: Mapping[str, Sequence[SweRow]], pinned: Mapping[str, Sequence[Sequence[str]]]
) -> dict[str, list[SweRow]]:
    """Return the rows that a run began with, in their order.

    Args:
        splits: the rows that the configuration makes now.
        pinned: {split: [[task id, digest], ...]} of the run.

    Raises:
        DataError: a row or the program that judges it is not what it was.
    """
    rows = {row.instance_id: row for split in splits.values() for row in split}
    for name, entries in pinned.items():
        for task_id, digest in entries:
            if task_id not in rows or row_digest(rows[task_id]) != digest:
                raise DataError(
                    f"task {task_id} of split {name} is not what the run began with: the code that "
                    "makes or judges tasks has changed; start a new --workdir"
                )
    return {name: [rows[task_id] for task_id, _ in entries] for name, entries in pinned.items()}


def _open_tokenizer(config: RunConfig, workdir: Path, cache: Path, suite: SweSuite) -> Tokenizer:
    """Take the tokenizer of ``model.checkpoint``, or train one (or take it from the cache).

    It belongs to the run from then on.
    """
    path = workdir / TOKENIZER
    if not path.exists() and any((workdir / "checkpoints").glob("[0-9]*")):
        raise DataError(
            f"{path} is gone but the run has checkpoints, whose policy speaks its tokens: bring it "
            "back from a copy, or start a new --workdir"
        )
    if path.exists():
        return Tokenizer.load(path)
    if config.model.checkpoint:
        tokenizer = pretrained_tokenizer(config.model)
        keep_template(Path(config.model.checkpoint), workdir)  # tokenizer.json last: it is the mark
    else:
        corpus = list(warm_start_corpus(suite.tasks("train"), config.agent.kind))
        tokenizer = load_or_train(corpus, config.model.vocab_size, cache / "tokenizers")
    tokenizer.save(path)
    return tokenizer


async def check_server(url: str, *, timeout_s: float = 10.0) -> None:
    """Make sure that a configured server is there and speaks our contract.

    Raises:
        GenerationError: it does not answer /model_info in time.
    """
    async with SGLangGenerator(url, control_timeout_s=timeout_s) as client:
        try:
            await client.model_info()
        except GenerationError as error:
            raise GenerationError(
                f"engine.servers names {url}, which is not there: {error}. Start it first, or "
                "leave engine.servers empty to use the embedded engine",
                cause=error.cause,
            ) from None


async def _open_server(
    config: RunConfig, workdir: Path, renderer: AnyRenderer, stack: AsyncExitStack
) -> str:
    """Return the URL of a server: the configured one, or the embedded engine as our child."""
    engine = config.engine
    if engine.servers:
        return engine.servers[0]
    folder = _empty_model(config.model, workdir / "cache" / "model", renderer)
    options = ServeOptions(
        model=str(folder),
        slots=engine.slots,
        max_context=engine.max_context,
        prefill_rows=engine.prefill_rows,
        prefill_chunk=engine.prefill_chunk,
        decode_steps=engine.decode_steps,
        wait_for_weights=True,
    )
    child = ServerChild(options, start_timeout_s=engine.start_timeout_s, log=workdir / "server.log")
    await stack.enter_async_context(child)
    await stack.enter_async_context(ends_with(child.died))
    return child.base_url


@asynccontextmanager
async def ends_with(died: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """End the block as soon as something it needs has died, with the reason in the error.

    Args:
        died: waits for that thing's end and says how it ended.

    Raises:
        GenerationError: it died; whatever the block was waiting for was cancelled.
    """
    owner = asyncio.current_task()
    assert owner is not None

    working, cancelled = True, False

    async def watch() -> str:
        nonlocal cancelled
        text = await died()
        if working:
            cancelled = owner.cancel()
        return text

    watcher = asyncio.create_task(watch())
    try:
        yield
    except (asyncio.CancelledError, HostError):  # a call to the dead may have failed first
        working = False
        await asyncio.wait({watcher}, timeout=0.5)
        if watcher.done() and not watcher.cancelled():
            if cancelled:
                owner.uncancel()
            raise GenerationError(watcher.result(), cause="engine_died") from None
        raise
    finally:
        watcher.cancel()


def _empty_model(model: ModelConfig, folder: Path, renderer: AnyRenderer) -> Path:
    """Write a folder with config.json only: the server learns the shape, weights follow."""
    write_json(folder / "config.json", hf.config_to_hf(model, **hf_extra(renderer)))
    return folder


def _routing(config: RunConfig) -> tuple[int, int] | None:
    """Return what every completion must bring for router replay: (layers, experts a token)."""
    model = config.model
    return (model.num_layers, model.experts_per_token) if config.rollout.replay_routing else None
