"""What a person sees while a run goes on: a live display, or one plain line a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# The display is redrawn by a thread: twice a second is enough, and each redraw costs CPU.
_REDRAWS_PER_SECOND = 2
# Steps whose mean length gives the time left.
_WINDOW = 10


class Progress:
    """Shows step, resolved rates, tokens/s, live sandboxes, time left and the phase.

    On a terminal a live table; elsewhere one plain line a step and a phase, so that a log stays
    readable.

    Args:
        num_steps: steps of the whole run. ``first_step``: steps already done (resume).
        console: where to print; by default stdout.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember the arguments; the display starts in ``__enter__``."""
        self._num_steps = num_steps
        self._done = first_step
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._began = clock()
        self._marks: deque[float] = deque(maxlen=_WINDOW + 1)
        self._phase = "starting"
        self._sandboxes = 0
        self._metrics: dict[str, float] = {}
        self._heldout: float | None = None
        self._limit: Callable[[], float] | None = None
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        """Start the live display on a terminal."""
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=_REDRAWS_PER_SECOND,
                redirect_stdout=True,
                redirect_stderr=True,
            )
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def phase(self, name: str) -> None:
        """Say what the run is doing now, e.g. "warm start", "collect", "train", "evaluate"."""
        changed, self._phase = name != self._phase, name
        if name == "collect" and not self._marks:
            self._marks.append(self._clock())
        # A step's own phases pass in seconds: on a plain log only the step's line tells of them.
        if changed and self._live is None and name not in ("collect", "train", "publish"):
            self._console.print(
                f"[{_clock_text(self._clock() - self._began)}] {name}", markup=False
            )

    def sandboxes(self, live: int) -> None:
        """Set the number of live sandboxes."""
        self._sandboxes = live

    def limit(self, seconds: Callable[[], float]) -> None:
        """Set what is left of the time limit of the run, in seconds."""
        self._limit = seconds

    def note(self, text: str) -> None:
        """Print a line for a person above the display."""
        self._console.print(text, markup=False, soft_wrap=True)

    def evaluated(self, name: str, rate: float) -> None:
        """Keep the resolved rate of the last evaluation of sampled held-out episodes in sight."""
        if name == "sampled":
            self._heldout = rate

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step's numbers."""
        self._done = step
        self._metrics = dict(metrics)
        self._marks.append(self._clock())
        if self._live is None:
            self._console.print(self._line(), markup=False, soft_wrap=True)

    def seconds_left(self) -> float | None:
        """Return the time the remaining steps will take at the mean of the last ones, or may."""
        if len(self._marks) < 2:
            return None
        mean = (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)
        left = mean * max(0, self._num_steps - self._done)
        return left if self._limit is None else min(left, max(0.0, self._limit()))

    def _fields(self) -> list[tuple[str, str]]:
        left = self.seconds_left()
        return [
            ("resolved", _percent(self._metrics.get("resolved_rate"))),
            ("held-out", _percent(self._heldout)),
            ("fresh", _percent(self._metrics.get("resolved_rate_fresh"))),
            ("failed", f"{self._metrics.get('failed_episodes', 0.0):.0f}"),
            ("tokens/s", _number(self._metrics.get("tokens_per_s"), "{:,.0f}")),
            ("sandboxes", str(self._sandboxes)),
            ("left", "?" if left is None else _clock_text(left)),
        ]

    def _line(self) -> str:
        elapsed = _clock_text(self._clock() - self._began)
        # at the end of a step no sandbox is alive
        shown = [field for field in self._fields() if field[0] != "sandboxes"]
        fields = "  ".join(f"{name} {value}" for name, value in shown)
        return f"[{elapsed}] step {self._done}/{self._num_steps}  {fields}"

    def _render(self) -> Group:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self._done}/{self._num_steps}", style="bold"),
            ProgressBar(total=max(1, self._num_steps), completed=self._done, width=40),
            Text(self._phase, style="cyan"),
            Text(_clock_text(self._clock() - self._began), style="dim"),
        )
        body = Table.grid(padding=(0, 3))
        fields = self._fields()
        body.add_row(*(Text(name, style="dim") for name, _ in fields))
        body.add_row(*(Text(value, style="bold") for _, value in fields))
        return Group(head, body)


def _clock_text(seconds: float) -> str:
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
