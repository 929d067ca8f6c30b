"""What a process waits for, said on its standard error: after seconds, then every half minute."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST_S = 5.0
EVERY_S = 30.0
Tell = Callable[[str], None]


def say(text: str) -> None:
    """Print a line where it does not mix with results."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(
    what: Callable[[], str],
    limit_s: float,
    *,
    tell: Tell = say,
    first_s: float = FIRST_S,
    every_s: float = EVERY_S,
) -> Iterator[None]:
    """While the block runs, say what it waits for and how long it has.

    Args:
        what: returns what has not come; asked anew each time.
        limit_s: when the block gives up, in seconds.
        tell: gets each line, in a thread of its own.
        first_s: seconds to the first line, or a quarter of ``limit_s`` where that is less.
        every_s: seconds between lines.
    """
    over = threading.Event()
    began = time.monotonic()

    def repeat() -> None:
        pause = min(first_s, limit_s / 4)
        while not over.wait(pause):
            tell(f"{what()}; waited {time.monotonic() - began:.0f} s of at most {limit_s:.0f} s")
            pause = every_s

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
