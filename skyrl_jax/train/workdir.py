"""The run folder: who owns it, which configuration it belongs to, and where each file lies.

WORKDIR/config.json   the configuration of the run (a changed one is refused)
        clock.json    time spent, over all starts
        lock          held while a process uses the folder
        tasks.json    the validated tasks of the run     tokenizer.json
        cache/        config of the served model (may be deleted)
        checkpoints/  full training states      weights/  published versions
        rollouts/     every episode             eval/     evaluations
        metrics.jsonl summary.json report.html tensorboard/ profile/
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from skyrl_jax.core.config import RunConfig, diff_config, flatten_config, unknown_key_message
from skyrl_jax.core.errors import ConfigError, DataError

# Keys that say where or how long to run, never what is computed.
# What may lie in a folder that belongs to no run yet.
_FREE_FOLDER = {"lock", "exchange", ".DS_Store"}
_FREE_KEYS = ("train.steps", "train.time_limit_s", "train.keep_checkpoints")


class Workdir:
    """Owns a run folder while the ``with`` block lasts.

    Args:
        root: the folder; made if absent.
        config: the run's configuration.
        allow_change: dotted keys whose change on resume is accepted (and logged).

    Raises:
        ConfigError: another process uses the folder, or the configuration differs.
    """

    def __init__(self, root: Path, config: RunConfig, allow_change: Iterable[str] = ()) -> None:
        """Remember the arguments; nothing is touched before ``__enter__``."""
        self.root = root.absolute()
        self._config = config
        self._allow = tuple(allow_change)
        self._lock: int | None = None
        self._changed: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> Workdir:
        """Lock the folder and compare the configuration."""
        unknown = sorted(set(self._allow) - set(flatten_config(self._config)))
        if unknown:
            raise ConfigError(f"--allow_change: {unknown_key_message(unknown[0])}")
        tasks = sorted(key for key in self._allow if key.startswith("tasks."))
        if tasks:
            raise ConfigError(
                f"--allow_change={tasks[0]}: the tasks of a run are made once; name a new --workdir"
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"--workdir={self.root} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            self._lock = None
            raise ConfigError(
                f"{self.root} is in use by another process; choose another --workdir or stop it"
            ) from error
        try:
            self._compare_config()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        for name in ("cache", "checkpoints", "weights", "rollouts", "eval"):
            (self.root / name).mkdir(exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _started(self) -> Path:
        """The configuration of a start that has not made its tasks yet (``pin``)."""
        return self.root / "started.json"

    def _refuse_foreign(self) -> None:
        """Refuse a folder of somebody's files: a run writes into its folder and deletes there."""
        if (self.root / "config.json").exists() or self._started.exists():
            return
        foreign = sorted({path.name for path in self.root.iterdir()} - _FREE_FOLDER)
        if foreign:
            raise ConfigError(
                f"--workdir={self.root} holds {foreign[0]!r} and no config.json of a run; name a "
                "new folder, or that of a run to continue (bring its config.json back if it is "
                "lost)"
            )

    def _begin(self) -> None:
        """Mark a folder that belongs to no configuration yet; forget another start's tasks."""
        now = json.loads(json.dumps(flatten_config(self._config)))
        if self._started.exists() and read_json(self._started) != now:
            for name in ("tasks.json", "tokenizer.json"):
                (self.root / name).unlink(missing_ok=True)
        write_json(self._started, now)

    def _compare_config(self) -> None:
        path = self.root / "config.json"
        now = flatten_config(self._config)
        if path.exists():
            before = read_json(path)
            if not isinstance(before, dict):
                raise DataError(f"{path} is damaged; bring it back or use another --workdir")
            changed = {k: v for k, v in diff_config(before, now).items() if k not in _FREE_KEYS}
            refused = {k: v for k, v in changed.items() if k not in self._allow}
            if refused:
                lines = [f"  {k}: {old!r} -> {new!r}" for k, (old, new) in refused.items()]
                raise ConfigError(
                    f"the configuration differs from the one {self.root} was started with:\n"
                    + "\n".join(lines)
                    + f"\nuse another --workdir, or --allow_change={','.join(refused)}"
                )
            self._changed = changed
        else:
            self._begin()

    def pin(self) -> None:
        """Let the folder belong to this configuration from now on: its tasks have been made.

        A start that fails before (a missing program, a refused value) leaves it free.
        """
        path = self.root / "config.json"
        if not path.exists():
            write_json(path, flatten_config(self._config))
        self._started.unlink(missing_ok=True)

    def commit(self) -> None:
        """Take the allowed changes over: call it when the run has begun with them and it works."""
        for key, (old, new) in self._changed.items():
            print(f"allowed change of {key}: {old!r} -> {new!r}", flush=True)
            with open(self.root / "changes.log", "a") as file:
                file.write(f"{key}: {old!r} -> {new!r}\n")
        self._changed = {}
        write_json(self.root / "config.json", flatten_config(self._config))


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is either the old or the new one, whole, after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    """Return the JSON value in ``path``, or ``None`` when there is no such file.

    Raises:
        DataError: the file holds no JSON.
    """
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error
