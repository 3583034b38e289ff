"""Draw small charts as SVG text: scales, axes, marks. Colours come from the page's style sheet.

A chart is a string that stands for itself inside HTML; coordinates are in its own user units,
about one CSS pixel at full width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

SERIES = 8  # colours of the style sheet
_LEGEND_ROW = 18


@dataclass(frozen=True)
class Scale:
    """Maps a range of values to a range of coordinates, evenly or by their logarithms."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of `value`."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Frame:
    """The plotting area inside a chart; margins leave room for labels."""

    width: float
    height: float
    left: float = 56
    right: float = 16
    top: float = 20
    bottom: float = 40

    @property
    def x_end(self) -> float:
        """Right edge of the plotting area."""
        return self.width - self.right

    @property
    def y_end(self) -> float:
        """Lower edge of the plotting area."""
        return self.height - self.bottom

    def x(self, low: float, high: float) -> Scale:
        """Return the horizontal scale of values from `low` to `high`."""
        return Scale(low, high, self.left, self.x_end)

    def y(self, low: float, high: float, *, is_log: bool = False) -> Scale:
        """Return the vertical scale, growing upwards."""
        return Scale(low, high, self.y_end, self.top, is_log)


def nice_ticks(high: float, *, low: float = 0.0, count: int = 5) -> list[float]:
    """Return about `count` round values from `low` that reach at least to `high`."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low, low + 1.0]
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return values 1, 2 and 5 times powers of ten from below `low` to above `high`."""
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    steps = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max(index for index, each in enumerate(steps) if each <= low * (1 + 1e-9))
    last = min(index for index, each in enumerate(steps) if each >= high * (1 - 1e-9))
    return steps[first : max(last, first + 1) + 1]


def svg(width: float, height: float, body: Sequence[str], *, label: str) -> str:
    """Return a whole chart; `label` is read out to those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", kind: str = "tick") -> str:
    """Return a label; `kind` is its class."""
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" class="{kind}">'
        f"{escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, *, kind: str) -> str:
    """Return a straight line."""
    return f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{kind}"/>'


def rectangle(
    x: float, y: float, width: float, height: float, *, kind: str, hint: str = "", radius: float = 0
) -> str:
    """Return a rectangle with a hint shown under the pointer."""
    inner = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(max(height, 0))}" '
        f'rx="{_n(radius)}" class="{kind}">{inner}</rect>'
    )


def dot(x: float, y: float, radius: float, *, kind: str, hint: str = "") -> str:
    """Return a filled circle with a hint shown under the pointer."""
    inner = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{kind}">{inner}</circle>'


def diamond(x: float, y: float, radius: float, *, kind: str, hint: str = "") -> str:
    """Return a diamond with a hint shown under the pointer."""
    points = ((x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y))
    joined = " ".join(f"{_n(a)},{_n(b)}" for a, b in points)
    inner = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<polygon points="{joined}" class="{kind}">{inner}</polygon>'


def polyline(points: Sequence[tuple[float, float]], *, kind: str) -> str:
    """Return a line through all points."""
    joined = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    return f'<polyline points="{joined}" class="{kind}"/>'


def polygon(points: Sequence[tuple[float, float]], *, kind: str) -> str:
    """Return a filled outline."""
    joined = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    return f'<polygon points="{joined}" class="{kind}"/>'


def y_axis(
    frame: Frame, scale: Scale, ticks: Sequence[float], format_tick: Callable[[float], str]
) -> list[str]:
    """Return horizontal grid lines with their values on the left."""
    marks = []
    for tick in ticks:
        y = scale(tick)
        marks.append(line(frame.left, y, frame.x_end, y, kind="base" if tick == 0 else "grid"))
        marks.append(text(frame.left - 8, y + 4, format_tick(tick), anchor="end"))
    return marks


def x_axis(
    frame: Frame,
    scale: Scale,
    ticks: Sequence[float],
    format_tick: Callable[[float], str],
    *,
    grid: bool = False,
) -> list[str]:
    """Return values below the plotting area, with vertical grid lines if `grid`."""
    marks = []
    for tick in ticks:
        x = scale(tick)
        if grid:
            marks.append(line(x, frame.top, x, frame.y_end, kind="base" if tick == 0 else "grid"))
        marks.append(text(x, frame.y_end + 18, format_tick(tick), anchor="middle"))
    return marks


def axis_names(frame: Frame, *, x: str = "", y: str = "") -> list[str]:
    """Return the names of the axes: x below on the right, y above on the left."""
    names = []
    if x:
        names.append(text(frame.x_end, frame.height - 5, x, anchor="end", kind="axis"))
    if y:
        names.append(text(0, 11, y, kind="axis"))
    return names


def legend(frame: Frame, names: Sequence[str], *, y: float = 25) -> list[str]:
    """Return the names of the series beside their colours, in lines from `y` on."""
    body = []
    for index, (name, (x, row)) in enumerate(zip(names, _legend_places(frame, names), strict=True)):
        top = y + _LEGEND_ROW * row
        body.append(rectangle(x, top, 11, 11, kind=f"bar s{index % SERIES}", radius=2))
        body.append(text(x + 16, top + 10, name, kind="note"))
    return body


def legend_height(frame: Frame, names: Sequence[str]) -> float:
    """Return how much room the legend needs."""
    return _LEGEND_ROW * (1 + max((row for _, row in _legend_places(frame, names)), default=0))


def _legend_places(frame: Frame, names: Sequence[str]) -> Iterator[tuple[float, int]]:
    """Yield where each name begins, and in which line."""
    x, row = frame.left, 0
    for name in names:
        width = 34 + 6.6 * len(name)
        if x > frame.left and x + width - 12 > frame.width:
            x, row = frame.left, row + 1
        yield x, row
        x += width


def _n(value: float) -> str:
    """Return a coordinate in few characters."""
    return f"{value:.1f}".removesuffix(".0")
