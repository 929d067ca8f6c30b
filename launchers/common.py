"""What every launcher shares: the --config flag, its errors, and one place where errors end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from absl import app, flags
from ml_collections import config_flags

from skyrl_jax.core.config import RunConfig, known_keys, parse_config, unknown_key_message
from skyrl_jax.core.errors import ConfigError, SkyrlError
from skyrl_jax.core.validate import validate_config

T = TypeVar("T")


def define_config_flag() -> flags.FlagHolder:
    """Define ``--config=FILE[:PRESET]`` with ``--config.section.key=value`` overrides."""
    return config_flags.DEFINE_config_file(
        "config", None, "configuration file, e.g. configs/swe.py or configs/swe.py:quickstart"
    )


def read_config(holder: flags.FlagHolder) -> RunConfig:
    """Parse and check the configuration.

    Raises:
        ConfigError: no --config, or a bad value, by dotted path.
    """
    values = holder.value
    if values is None:
        raise ConfigError("--config is missing; try --config=configs/swe.py")
    return validate_config(parse_config(values.to_dict()))


def run_main(main: Callable[[list[str]], int | None]) -> None:
    """Run ``main`` under absl; an expected error becomes one line and exit code 2."""
    sys.argv[1:] = expand_shorthand(sys.argv[1:])
    bad = _unknown_override(sys.argv[1:])
    if bad:
        print(f"error: {bad}", file=sys.stderr)
        sys.exit(2)

    def guarded(argv: list[str]) -> int | None:
        if len(argv) > 1:
            print(f"error: unexpected argument {argv[1]!r}; flags start with --", file=sys.stderr)
            return 2
        try:
            return main(argv)
        except (SkyrlError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130

    app.run(guarded, flags_parser=_parse_flags)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a job to its end; SIGTERM cancels it as Ctrl-C does, so that it closes what it opened.

    Raises:
        KeyboardInterrupt: it was stopped by one of the two, and has closed everything.
    """

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _parse_flags(argv: list[str]) -> list[str]:
    """Parse the flags; a configuration that cannot be made is one line, too."""
    try:
        rest: list[str] = flags.FLAGS(argv)
    except (flags.Error, ValueError, OSError, AttributeError, TypeError) as error:
        known = isinstance(error, flags.Error)  # its words name the flag
        print(f"error: {error if known else _innermost(error)}", file=sys.stderr)
        sys.exit(2)
    return rest


def _innermost(error: BaseException) -> str:
    """Return the words of the first cause: ml_collections wraps what a config file raised."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error) or type(error).__name__


def expand_shorthand(argv: Sequence[str]) -> list[str]:
    """Return the arguments with ``--config.agent=NAME`` written out: it means ``agent.kind``."""
    short = "--config.agent="
    return [
        f"--config.agent.kind={item.removeprefix(short)}" if item.startswith(short) else item
        for item in argv
    ]


def _unknown_override(argv: Sequence[str]) -> str:
    """Find ``--config.a.b`` that names no key: absl's own text does not name the nearest one."""
    known = set(known_keys())
    sections = {key.split(".")[0] for key in known}
    for item in argv:
        if not item.startswith("--config."):
            continue
        path = item[len("--config.") :].split("=")[0]
        if path not in known and path not in sections:
            return unknown_key_message(path)
    return ""


def unknown_host(address: str, look_up: Callable[..., object] = socket.getaddrinfo) -> str:
    """Return why this machine cannot find the host of "host:port"; "" where it can."""
    host, _, port = address.rpartition(":")
    try:
        look_up(host.strip("[]"), int(port))
    except (OSError, UnicodeError, ValueError, OverflowError) as error:
        return str(error) or type(error).__name__
    return ""
