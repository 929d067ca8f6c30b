"""What a verification is made of: named parts, run in a fresh clone, each held or not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What `make` exports for this checkout; the clone has its own.
_OURS = ("VENV", "MAKEFLAGS", "JAX_COMPILATION_CACHE_DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a part found. ``held`` is the promise's yes or no; ``figures`` are what was measured."""

    held: bool
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One promise of an issue's "Done when" list.

    ``run`` gets the fresh clone and the figures of the parts before it, by name.
    Example: ``Part(name="tests", promise="make test in 15 min", run=check_tests)``.
    """

    name: str
    promise: str
    run: Callable[[Clone, Mapping[str, Any]], Outcome]


class CommandFailed(Exception):
    """A command of a part ended badly; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clone:
    """A fresh clone of the commit under test, with ``shared`` beside it as a developer has it."""

    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, argv: list[str], *, log: str, timeout_s: float, check: bool = True) -> Run:
        """Run a command in the clone; its output goes to ``logs/LOG`` and its closing lines here.

        Raises:
            CommandFailed: it did not end in time, or (with ``check``) not with status 0.
        """
        path = self.root.parent / "logs" / log
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if k not in _OURS}
        environment |= {"CI": "true", **self.environment}
        began = time.monotonic()
        with path.open("wb") as file:
            process = subprocess.Popen(
                argv,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout=timeout_s)
            except BaseException as error:
                _end_group(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise CommandFailed(
                    f"{argv[:3]} did not end in {timeout_s:.0f} s: {_tail(path)}"
                ) from None
        seconds = time.monotonic() - began
        if check and status != 0:
            raise CommandFailed(f"{argv[:3]} ended with status {status}: {_tail(path)}")
        return Run(status=status, seconds=seconds, output=path.read_text(errors="replace"))

    def json(self, path: str) -> dict[str, Any]:
        """Read a JSON object the run wrote."""
        return json.loads((self.root / path).read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A command that ended."""

    status: int
    seconds: float
    output: str


def tree_fingerprint() -> str:
    """Name the code under test: the committed tree without what only tells of it.

    Docs, text pages and results may be committed between two sessions of one verification without
    making its parts stale.
    """
    listing = _git("ls-tree", "-r", "HEAD").splitlines()
    rows = [row for row in listing if not _tells_only(row.split("\t", 1)[1])]
    command = ["git", "hash-object", "--stdin"]
    text = "\n".join(rows)
    return subprocess.run(
        command, cwd=ROOT, input=text, capture_output=True, text=True, check=True
    ).stdout.strip()


def changed_files() -> list[str]:
    """Return files whose working copy differs from HEAD and that matter to the result."""
    rows = _git("status", "--porcelain", "--untracked-files=all").splitlines()
    return [row[3:] for row in rows if not _tells_only(row[3:])]


def commit() -> str:
    """Return the commit under test."""
    return _git("rev-parse", "HEAD").strip()


def fresh_clone(fingerprint: str, shared: Path) -> Clone:
    """Clone HEAD beside a link to ``shared``; the clone of the same code is used again."""
    folder = ROOT / ".cache" / "verify" / fingerprint[:12]
    root = folder / "main"
    if not (folder / "cloned").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _git("clone", "--quiet", "--no-hardlinks", str(ROOT), str(root))
        (folder / "shared").symlink_to(shared.resolve())
        (folder / "cloned").touch()
    return Clone(root=root)


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def _tells_only(path: str) -> bool:
    return path.startswith("docs/") or path.endswith(".md")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for sign, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=patience_s)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _tail(path: Path, characters: int = 1500) -> str:
    return path.read_text(errors="replace")[-characters:]
