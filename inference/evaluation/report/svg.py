"""SVG charts as text: scales, ticks, axes, marks. Colours come from the page's style sheet.

A chart is one element inside HTML; coordinates are in its own user units, about one CSS pixel at
full width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

SERIES = 8  # colours of the style sheet
_LEGEND_ROW = 18

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """A map from a range of values to a range of coordinates, linear or logarithmic."""

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
        return self.start + (value - low) / (high - low) * (self.end - self.start)


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


@dataclass(frozen=True)
class Frame:
    """The plotting area inside a chart, and its axes; margins leave room for labels."""

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

    def y_axis(
        self, ticks: Sequence[float], tick_text: Callable[[float], str], *, is_log: bool = False
    ) -> tuple[Scale, list[str]]:
        """Return the vertical scale over `ticks`, and horizontal grid lines with their values."""
        scale = Scale(ticks[0], ticks[-1], self.y_end, self.top, is_log)
        marks = []
        for tick in ticks:
            y = scale(tick)
            marks.append(line((self.left, y), (self.x_end, y), kind=_grid(tick)))
            marks.append(text((self.left - 8, y + 4), tick_text(tick), anchor="end"))
        return scale, marks

    def x_axis(
        self,
        ticks: Sequence[float],
        tick_text: Callable[[float], str],
        *,
        high: float | None = None,
        grid: bool = False,
    ) -> tuple[Scale, list[str]]:
        """Return the horizontal scale and the values below it, with grid lines if `grid`.

        The scale ends at `high`, where ticks beyond it are left out, or at the last tick.
        """
        scale = self.x(ticks[0], ticks[-1] if high is None else high)
        marks = []
        for tick in (each for each in ticks if each <= scale.high):
            x = scale(tick)
            if grid:
                marks.append(line((x, self.top), (x, self.y_end), kind=_grid(tick)))
            marks.append(text((x, self.y_end + 18), tick_text(tick), anchor="middle"))
        return scale, marks

    def axis_names(self, *, x: str, y: str) -> list[str]:
        """Return the names of the axes: x below on the right, y above on the left."""
        return [
            text((self.x_end, self.height - 5), x, anchor="end", kind="axis"),
            text((0, 11), y, kind="axis"),
        ]

    def svg(self, body: Sequence[str], *, label: str) -> Markup:
        """Return the whole chart; a screen reader reads `label`."""
        return Markup(
            f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" '
            f'aria-label="{escape(label)}">{"".join(body)}</svg>'
        )


def _grid(tick: float) -> str:
    return "base" if tick == 0 else "grid"


def _element(
    tag: str, kind: str, *, content: str = "", hint: str = "", **attributes: str | float
) -> str:
    """Return an element of class `kind`; a hint is shown under the pointer."""
    given = "".join(
        f' {name.replace("_", "-")}="{value if isinstance(value, str) else _n(value)}"'
        for name, value in attributes.items()
    )
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<{tag}{given} class="{kind}">{title}{escape(content)}</{tag}>'


def text(at: Point, content: str, *, anchor: str = "start", kind: str = "tick") -> str:
    """Return a label; `kind` is its class."""
    return _element("text", kind, content=content, x=at[0], y=at[1], text_anchor=anchor)


def line(start: Point, end: Point, *, kind: str) -> str:
    """Return a straight line."""
    return _element("line", kind, x1=start[0], y1=start[1], x2=end[0], y2=end[1])


def rectangle(
    corner: Point, width: float, height: float, *, kind: str, hint: str = "", radius: float = 0
) -> str:
    """Return a rectangle by its upper left corner."""
    x, y, width, height = *corner, max(width, 0.0), max(height, 0.0)
    return _element("rect", kind, hint=hint, x=x, y=y, width=width, height=height, rx=radius)


def dot(at: Point, radius: float, *, kind: str, hint: str = "") -> str:
    """Return a filled circle."""
    return _element("circle", kind, hint=hint, cx=at[0], cy=at[1], r=radius)


def polyline(points: Sequence[Point], *, kind: str) -> str:
    """Return a line through all points."""
    return _element("polyline", kind, points=_joined(points))


def polygon(points: Sequence[Point], *, kind: str, hint: str = "") -> str:
    """Return a filled outline."""
    return _element("polygon", kind, hint=hint, points=_joined(points))


def legend(frame: Frame, names: Sequence[str], *, y: float = 25) -> list[str]:
    """Return the names of the series next to their colours, in lines from `y` on."""
    body = []
    for index, (name, (x, row)) in enumerate(zip(names, _legend_places(frame, names), strict=True)):
        top = y + _LEGEND_ROW * row
        body.append(rectangle((x, top), 11, 11, kind=f"bar s{index % SERIES}", radius=2))
        body.append(text((x + 16, top + 10), name, kind="note"))
    return body


def legend_height(frame: Frame, names: Sequence[str]) -> float:
    """Return the height of the legend."""
    return _LEGEND_ROW * (1 + max((row for _, row in _legend_places(frame, names)), default=0))


def _legend_places(frame: Frame, names: Sequence[str]) -> Iterator[tuple[float, int]]:
    """Yield the horizontal start of each name and its line."""
    x, row = frame.left, 0
    for name in names:
        width = 34 + 6.6 * len(name)
        if x > frame.left and x + width - 12 > frame.width:
            x, row = frame.left, row + 1
        yield x, row
        x += width


def _joined(points: Sequence[Point]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
