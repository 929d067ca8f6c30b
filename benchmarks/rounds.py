"""Sides of a benchmark that take turns: only one computes at a time, and each goes first as often.

A machine's speed drifts within minutes, so figures of two sides compare only when they were taken
in turns. Every side is a process that has prepared everything (imports, compilation, warm-up)
before the first turn and waits on its input in between (peers/turns.py).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

PREPARE_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 300.0
# Thread pools spin for a while after their work (OpenMP up to 0.2 s): not in the other's turn.
PAUSE_S = 0.3


class WorkerFailed(Exception):
    """A side ended, or did not answer in time; the message holds the end of its log."""


class Side(Protocol):
    """What takes turns: answers one request at a time (peers/turns.py says which)."""

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""


class Worker:
    """A side in a process of its own. Use as a context manager.

    Args:
        name: what errors call it.
        python: its interpreter.
        script: its script, which calls ``turns.serve``.
        job: what it prepares.
        env: its whole environment.

    Attributes:
        about: what it says of itself, known once it has prepared.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        script: Path,
        job: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> None:
        """Nothing runs before the context is entered."""
        self._name, self._env = name, dict(env)
        self._command = [str(python), str(script), json.dumps(dict(job))]
        self.about: dict[str, Any] = {}

    def __enter__(self) -> Worker:
        """Start the process and wait until it has prepared."""
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.about = self._read(PREPARE_TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        self._end()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            WorkerFailed: the process ended or was ended after ``TURN_TIMEOUT_S``.
        """
        try:
            self._process.stdin.write(json.dumps(dict(request)) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: reading says so, with its log
        return self._read(TURN_TIMEOUT_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        watch = threading.Timer(timeout_s, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace")[-3000:]
            raise WorkerFailed(
                f"side {self._name!r} ended with status {status} (-9: no answer within "
                f"{timeout_s:g} s); its log ends with:\n{tail}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # a request may have stayed in the pipe
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


def order(number: int, names: Sequence[str]) -> list[str]:
    """Return who computes in which order in round ``number`` (from 0): every other one reversed."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def play(
    sides: Mapping[str, Side], *, rounds: int, steps: int, pause_s: float = PAUSE_S
) -> list[dict[str, dict[str, float]]]:
    """Let the sides take turns.

    Args:
        sides: by name; the first one also measures the matmul roof, at the end of its turn.
        rounds: turns of each side.
        steps: optimizer updates in a turn.
        pause_s: seconds between turns.

    Returns:
        One dict a round, in the order in which the sides computed: name -> {"step_s" (median wall
        seconds of an update), "cpu_s" (median CPU seconds of one, all threads)}, and of the first
        side "roof" (FLOP/s).
    """
    lead = next(iter(sides))
    played = []
    for number in range(rounds):
        figures: dict[str, dict[str, float]] = {}
        for name in order(number, list(sides)):
            time.sleep(pause_s)
            answer = sides[name].ask({"do": "steps", "count": steps})
            figures[name] = {
                "step_s": statistics.median(answer["seconds"]),
                "cpu_s": statistics.median(answer["cpu_seconds"]),
            }
            if name == lead:
                figures[name]["roof"] = sides[name].ask({"do": "roof"})["flops_per_s"]
        played.append(figures)
    return played
