"""Small charts as inline SVG: lines and stacked areas over steps. No script, no dependency.

Colours are CSS variables of the page (--c0 .. --c5, --ink, --grid), so that light and dark work.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 26
_NUM_COLORS = 6
# Above this many points the markers that carry the hover text would be the page's weight.
_MAX_MARKERS = 300
# Fewer points than this are drawn as they are.
_SMOOTH_FROM = 8

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A named curve. Example: ``Series(name="reward", points=[(1, 0.2), (2, 0.3)])``."""

    name: str
    points: Points


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Maps values to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        return _LEFT + (value - self.x_low) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = self.y_high - self.y_low
        return HEIGHT - _BOTTOM - (value - self.y_low) / span * (HEIGHT - _TOP - _BOTTOM)


def line_chart(series: Sequence[Series], *, smooth: bool = True, dots: bool = False) -> str:
    """Draw curves; with ``smooth`` the points are faint and their moving mean is strong.

    Args:
        series: the curves.
        smooth: add the moving mean where there are enough points.
        dots: show every point, for curves that were measured at a few steps only.
    """
    drawn = [item for item in series if item.points]
    if not drawn:
        return _empty()
    frame = _frame([point for item in drawn for point in item.points])
    parts = [_axes(frame)]
    for index, item in enumerate(drawn):
        color = f"var(--c{index % _NUM_COLORS})"
        if smooth and len(item.points) >= _SMOOTH_FROM:
            parts.append(_path(frame, item.points, color, opacity=0.3, width=1.0))
            parts.append(_path(frame, moving_mean(item.points), color, opacity=1.0, width=2.2))
        else:
            parts.append(_path(frame, item.points, color, opacity=1.0, width=1.8))
        parts.append(_markers(frame, item, color, dots=dots))
    return _svg(parts)


def stacked_chart(series: Sequence[Series]) -> str:
    """Draw areas on top of each other; every series must have the same x values."""
    drawn = [item for item in series if item.points]
    if not drawn:
        return _empty()
    xs = [x for x, _ in drawn[0].points]
    if any([x for x, _ in item.points] != xs for item in drawn):
        raise ValueError("stacked series must have the same x values")
    tops = [0.0] * len(xs)
    layers: list[tuple[Series, list[float], list[float]]] = []
    for item in drawn:
        floor = tops
        tops = [low + max(0.0, y) for low, (_, y) in zip(floor, item.points, strict=True)]
        layers.append((item, floor, tops))
    frame = _frame([*zip(xs, tops, strict=True), (xs[0], 0.0)])
    parts = [_axes(frame)]
    for index, (item, floor, top) in enumerate(layers):
        edge = [*zip(xs, top, strict=True), *zip(reversed(xs), reversed(floor), strict=True)]
        points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in edge)
        color = f"var(--c{index % _NUM_COLORS})"
        title = text(item.name)
        parts.append(f'<polygon points="{points}" fill="{color}"><title>{title}</title></polygon>')
    return _svg(parts)


def legend(names: Sequence[str]) -> str:
    """Name the colours of a chart with several series."""
    items = [
        f'<span class="key"><i style="background:var(--c{i % _NUM_COLORS})"></i>{text(name)}</span>'
        for i, name in enumerate(names)
    ]
    return f'<div class="legend">{"".join(items)}</div>'


def text(value: object) -> str:
    """Escape a value for HTML; control characters become visible symbols."""
    shown = "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(value)
    )
    return html.escape(shown, quote=True)


def moving_mean(points: Points, window: int = 0) -> list[tuple[float, float]]:
    """Return the trailing mean of ``window`` points (0: a tenth of them, at least 3)."""
    size = window or max(3, len(points) // 10)
    smoothed = []
    for index, (x, _) in enumerate(points):
        recent = [y for _, y in points[max(0, index + 1 - size) : index + 1]]
        smoothed.append((x, sum(recent) / len(recent)))
    return smoothed


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round values between ``low`` and ``high``, steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= most:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _frame(points: Points) -> _Frame:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = min(ys), max(ys)
    # A curve that starts near 0 is read against 0; elsewhere the axis would hide its shape.
    if 0 < y_low < 0.4 * y_high:
        y_low = 0.0
    margin = 0.05 * (y_high - y_low) or (abs(y_high) * 0.1 or 1.0)
    bottom = y_low if y_low == 0.0 else y_low - margin
    return _Frame(
        x_low=x_low,
        x_high=x_high if x_high > x_low else x_low + 1,
        y_low=bottom,
        y_high=y_high + margin,
    )


def _axes(frame: _Frame) -> str:
    rows = []
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        rows.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        rows.append(
            f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_label(value)}</text>'
        )
    for value in ticks(frame.x_low, frame.x_high, most=6):
        if value == int(value):
            x = frame.x(value)
            rows.append(
                f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_label(value)}</text>'
            )
    return "".join(rows)


def _path(frame: _Frame, points: Points, color: str, *, opacity: float, width: float) -> str:
    steps = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return (
        f'<polyline points="{steps}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-linejoin="round"/>'
    )


def _markers(frame: _Frame, item: Series, color: str, *, dots: bool) -> str:
    """Draw a dot a point, invisible until the pointer is on it; its title tells the value."""
    if len(item.points) > _MAX_MARKERS:
        return ""
    radius = 3 if len(item.points) > 1 else 4
    shown = "dot alone" if dots or len(item.points) == 1 else "dot"
    name = text(item.name)
    return "".join(
        f'<circle class="{shown}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}" '
        f'fill="{color}"><title>step {_label(x)} · {name} {y:.5g}</title></circle>'
        for x, y in item.points
    )


def _label(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 100_000 or abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _empty() -> str:
    return '<p class="none">no data</p>'
