"""What an episode of the lane needs: a real row, a small policy in the real engine, its log."""

import contextlib
from dataclasses import dataclass, replace

import jax
import numpy as np
from aiohttp import web

from skyrl_jax.agents.external import ExternalAgent
from skyrl_jax.agents.scripted import ForcedGenerator
from skyrl_jax.agents.tools import format_call
from skyrl_jax.core.config import ModelConfig
from skyrl_jax.core.types import SamplingParams
from skyrl_jax.engine.engine import Engine, EngineShape
from skyrl_jax.gateway.app import Gateway
from skyrl_jax.gateway.budget import Budget
from skyrl_jax.generation.sglang import SGLangGenerator
from skyrl_jax.models import decoder
from skyrl_jax.sandbox.bwrap import BwrapProvider, prepare_layer
from skyrl_jax.sandbox.images import base_image
from skyrl_jax.serve.app import Server
from skyrl_jax.serve.requests import Limits
from skyrl_jax.serve.worker import Worker
from skyrl_jax.tasks.swe.rows_suite import rows_suite, select_rows
from skyrl_jax.tasks.swe.suite import task_row
from skyrl_jax.train.scaffold import tools_renderer
from tests.tasks.worlds import SANDBOX, agent

ROW = "sympy__sympy-20916"
CONTEXT = 8192
VERSION = 7


class LoggedEngine(Engine):
    """The engine, with a log of every result before it leaves the engine's thread."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.log = []

    def step(self):
        ended = super().step()
        self.log += ended
        return ended


def policy(vocab_size):
    """A small random policy."""
    cfg = ModelConfig(
        family="qwen3", vocab_size=vocab_size, hidden_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, intermediate_size=64, rope_theta=10000.0, rms_norm_eps=1e-6,
        tie_embeddings=True, max_position=CONTEXT, checkpoint="",
    )  # fmt: skip
    params = decoder.init_params(cfg, jax.random.key(0))
    params["embed"]["embedding"] = params["embed"]["embedding"] * 2.0
    return cfg, params


@contextlib.asynccontextmanager
async def served(engine, stop_id):
    """Serve the engine over HTTP in this process; yield a client."""
    async with Worker(engine, lambda error: None) as worker:
        limits = Limits(vocab_size=engine.cfg.vocab_size, max_context=CONTEXT, eos_ids=(stop_id,))
        server = Server(
            worker, engine.cfg, limits, model_path="", version=engine.version,
            load_weights=lambda path, cfg: None, info={},
        )  # fmt: skip
        runner = web.AppRunner(server.application(), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with SGLangGenerator(f"http://127.0.0.1:{port}", timeout_s=280.0) as client:
                yield client
        finally:
            await runner.cleanup()


@dataclass(frozen=True)
class Parts:
    """What the tests share: the row's suite, the words of the policy, the engine."""

    suite: object
    renderer: object
    engine: LoggedEngine
    cache: object

    def task(self):
        (task,) = self.suite.tasks("all")
        return task

    async def play(self, program, lines=None, *, turns=8, new_tokens=1500):
        """Play the row; ``lines``: what the policy is made to say. Return (episode, log, score)."""
        self.engine.log.clear()
        task = self.task()
        async with (
            served(self.engine, self.renderer.stop_id) as client,
            BwrapProvider(run_id="lane-agents", cache_dir=self.cache) as provider,
            Gateway(generator=client, renderer_for=tools_renderer(self.renderer)) as gateway,
        ):
            generator = client
            if lines is not None:
                texts = [self.renderer.assistant_ids(line) for line in lines]
                generator = ForcedGenerator(client, texts)
            player = ExternalAgent(
                program=program,
                gateway=gateway,
                provider=provider,
                image=str(base_image(self.cache)),
                sampling=SamplingParams(
                    temperature=1.0,
                    max_new_tokens=new_tokens,
                    stop_token_ids=self.renderer.stop_token_ids,
                ),
                budget=Budget(turns=turns, context=CONTEXT),
                time_limit_s=280.0,
                seed=0,
                phase="lane",
                best_effort=True,
            )
            world = self.suite.environment(task, provider)
            try:
                episode = await player.run(task, world, generator, sample_index=0)
            finally:
                await world.close()
            score = await self.suite.reward(task, episode.submission, provider)
            assert provider.live == 0
        return episode, list(self.engine.log), score


def call(name, **arguments):
    return format_call(name, arguments)


def repair(task, submit):
    """Five turns on a real row: look, apply the gold patch, test it, look at the diff, submit."""
    row = task_row(task)
    path = row.patch.split("+++ b/", 1)[1].split("\n", 1)[0]
    return [
        "Let me look.\n" + call("bash", command=f"ls && wc -l {path}"),
        call("bash", command=f"git apply -C2 - <<'EOF'\n{row.patch}EOF"),
        call("bash", command="python3 -c 'import sympy; print(sympy.__version__)'"),
        call("bash", command=f"git diff --stat -- {path}"),
        submit,
    ]


def make_suite(path, cache):
    rows = select_rows(path, [ROW])
    roomy = replace(SANDBOX, memory_mb=2048, disk_mb=512, command_timeout_s=60.0, lifetime_s=1020.0)
    return rows_suite(
        rows,
        agent=agent("full"),
        sandbox=roomy,
        image=str(base_image(cache)),
        cache=cache / "swe",
        prepare=prepare_layer,
    )


def make_engine(vocab_size):
    cfg, params = policy(vocab_size)
    shape = EngineShape(
        slots=2, max_context=CONTEXT, prefill_rows=4, prefill_chunk=64, decode_steps=8
    )
    return LoggedEngine(cfg, shape, params, str(VERSION))


def tokens(results):
    return np.array([x for r in results for x in r.token_ids], np.int32).tobytes()


def logprobs(results):
    return np.array([x for r in results for x in r.logprobs], np.float32).tobytes()
