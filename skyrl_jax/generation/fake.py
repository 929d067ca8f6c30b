"""A Generator that answers by a script: for tests and for runs without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from skyrl_jax.core.errors import GenerationError
from skyrl_jax.core.types import Completion, SamplingParams

Script = Callable[[tuple[int, ...], SamplingParams, str], Sequence[int] | Completion]


class FakeGenerator:
    """Answer every call by ``script(prompt_ids, sampling, session)``.

    The script returns a Completion, or token ids: these are cut at the first stop id and at
    ``max_new_tokens`` as a server would cut them, with log-prob -1 each. It may raise
    GenerationError. ``calls`` records what was asked.

    Args:
        script: makes the answers.
        version: weight version of the tokens it makes; may be set between calls.
        gate_open: as in SGLangGenerator.
        gate_timeout_s: how long ``generate`` may wait for the gate.
    """

    def __init__(
        self,
        script: Script,
        *,
        version: int = 0,
        gate_open: bool = True,
        gate_timeout_s: float = 600.0,
    ) -> None:
        self._script = script
        self._gate = asyncio.Event()
        self._gate_timeout_s = gate_timeout_s
        if gate_open:
            self._gate.set()
        self.version = version
        self.calls: list[tuple[tuple[int, ...], SamplingParams, str]] = []

    async def __aenter__(self) -> FakeGenerator:
        """Nothing to open."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nothing to close."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Answer by the script; waits while the gate is closed."""
        try:
            async with asyncio.timeout(self._gate_timeout_s):
                await self._gate.wait()
        except TimeoutError:
            raise GenerationError("the fake's gate stayed shut", cause="engine_gate") from None
        prompt = tuple(prompt_ids)
        if not prompt:
            raise GenerationError("input_ids must not be empty", cause="engine_http_400")
        self.calls.append((prompt, sampling, session))
        answer = self._script(prompt, sampling, session)
        if isinstance(answer, Completion):
            return answer
        return self._cut(tuple(answer), sampling)

    def close_gate(self) -> None:
        """Keep new ``generate`` calls waiting."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Let ``generate`` calls through."""
        self._gate.set()

    def _cut(self, ids: tuple[int, ...], sampling: SamplingParams) -> Completion:
        finish = "length"
        ids = ids[: sampling.max_new_tokens]
        for index, token in enumerate(ids):
            if token in sampling.stop_token_ids:
                ids, finish = ids[: index + 1], "stop"
                break
        return Completion(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            weight_versions=(self.version,) * len(ids),
            finish_reason=finish,
        )
