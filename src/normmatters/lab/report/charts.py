"""Charts as SVG: inline in the page's own colours, standalone, or several beside each other for README.

The SVGs are templates, since their colours must be CSS variables: they serve light and dark pages.
Series differ by colour and by dash, so that no reader depends on colour alone.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

# Distinguishable for the common colour deficiencies and with >= 3:1 contrast on their background.
LIGHT = ("#0b62b8", "#c2410c", "#0f7a55", "#8a3fb5", "#8a6a00", "#4b5563")
DARK = ("#6cb6ff", "#ff9a62", "#46d6a0", "#d6a2ff", "#eac54f", "#b6bfca")
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "5 2 1 2", "1 3")
_WIDTH, _HEIGHT = 460, 300
_AREA = (58, 444, 12, 260)  # of the curves: left, right, top, bottom


@dataclass(frozen=True)
class Series:
    """``points`` are (x, mean, low, high); ``slot`` picks colour and dash, so that a cell looks the same everywhere.

    One that ``diverged`` may leave the frame: beside a perplexity of 1e304 all others would be one line.
    ``paper`` is the paper's final number, which gets a mark at the right.
    """

    label: str
    points: tuple[tuple[float, float, float, float], ...]
    slot: int
    diverged: bool = False
    paper: float | None = None

    @property
    def has_spread(self) -> bool:
        return any(high > low for _, _, low, high in self.points)


@dataclass(frozen=True)
class Chart:
    """Curves by epoch, or with ``against`` points of the axis of that name, which is logarithmic.

    With ``map`` each series is a row of squares, the last one on top, the darker the larger the value.
    """

    title: str
    y_label: str
    series: tuple[Series, ...]
    log: bool = False
    unit: str = ""
    against: str = ""
    map: bool = False

    @property
    def x_label(self) -> str:
        return self.against or "epoch"

    @property
    def axis(self) -> str:
        return self.y_label + (f" ({self.unit})" if self.unit else "")

    @property
    def drawable(self) -> bool:
        return any(s.points for s in self.series)

    def csv(self) -> str:
        """The curves as a table: one row per epoch (or point), three columns per series."""
        table = {s.label: {x: values for x, *values in s.points} for s in self.series if s.points}
        head = [self.x_label, *(f"{label} ({what})" for label in table for what in ("mean", "lowest", "highest"))]
        rows = [head]
        for x in sorted({x for curve in table.values() for x in curve}):
            values = (value for curve in table.values() for value in curve.get(x, [None] * 3))
            rows.append([f"{x:g}", *("" if value is None else f"{value:.5g}" for value in values)])
        csv.writer(text := io.StringIO()).writerows(rows)
        return text.getvalue()


def _y_range(chart: Chart) -> tuple[float, float]:
    """The frame shows all curves' ends and most of their middles; the first steep epochs may leave it."""
    drawn = [s for s in chart.series if s.points]
    framed = [s for s in drawn if not s.diverged] or drawn
    shown = [p[1] for s in framed for p in s.points] + [s.paper for s in drawn if s.paper is not None]
    values = sorted(value for value in shown if not chart.log or value > 0)
    if not values:
        return (0.1, 1.0) if chart.log else (0.0, 1.0)
    if chart.log:
        low, high = values[0], values[-1]
        return (low / 1.15, high * 1.15) if high / low > 1.05 else (low / 1.2, high * 1.2)
    ends = max(value for s in framed for value in (s.points[-1][1], s.paper) if value is not None)
    high = max(values[math.ceil(0.93 * len(values)) - 1], ends)
    low = values[0]
    if chart.against:  # no steep start, and the intervals in full
        low, high = min(p[2] for s in framed for p in s.points), max(p[3] for s in framed for p in s.points)
    pad = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (max(0.0, low - pad) if low >= 0 else low - pad), high + pad


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        steps = [m * 10.0**e for e in range(-12, 13) for m in (1, 2, 5)]
        ticks = [t for t in steps if low <= t <= high]
        if len(ticks) > 7:
            ticks = [t for t in ticks if round(math.log10(t), 6).is_integer()]
        if len(ticks) >= 3:
            return ticks
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Frame:
    """Where a chart's numbers are on a drawing: ``area`` is its left, right, top and bottom there."""

    chart: Chart
    area: tuple[float, float, float, float]
    y_range: tuple[float, float]

    @cached_property
    def xs(self) -> list[float]:
        return sorted({p[0] for s in self.chart.series for p in s.points}) or [0.0, 1.0]

    @cached_property
    def x_range(self) -> tuple[float, float]:
        low, high, places = self.xs[0], self.xs[-1], len(self.xs) - 1
        if not self.chart.against:
            return low, max(high, low + 1)
        margin = (high / low) ** (0.5 / places) if self.chart.map and places else 1.1  # half a square
        return low / margin, high * margin

    @cached_property
    def x_ticks(self) -> dict[float, str]:
        """Where the ticks are, and their text: at each point's number, or where these are many at round ones."""
        if not self.chart.against:
            return {t: f"{t:g}" for t in _ticks(*self.x_range, False) if t == int(t)}
        most = (self.area[1] - self.area[0]) / 50
        if len(self.xs) <= most:
            return {x: f"{x:g}" for x in self.xs}
        for leading in ((1, 2, 5), (1, 3), (1,)):
            ticks = [
                m * 10.0**e
                for e in range(-12, 13)
                for m in leading
                if self.x_range[0] <= m * 10.0**e <= self.x_range[1]
            ]
            if len(ticks) <= most:
                break
        return {tick: _number(tick) for tick in ticks}

    @cached_property
    def y_ticks(self) -> list[float]:
        return [] if self.chart.map else _ticks(*self.y_range, self.chart.log)

    def x(self, value: float) -> float:
        left, right, _, _ = self.area
        return round(left + _part(value, self.x_range, bool(self.chart.against)) * (right - left), 1)

    def y(self, value: float) -> float:
        _, _, top, bottom = self.area
        if self.chart.log:
            value = max(value, self.y_range[0] * 1e-3)
        part = _part(value, self.y_range, self.chart.log)
        return round(top + (1 - min(max(part, -1.0), 2.0)) * (bottom - top), 1)


def _part(value: float, ends: tuple[float, float], log: bool) -> float:
    """Where a value lies between the ends of an axis, 0 to 1."""
    low, high = ends
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)


def svg(chart: Chart, *, standalone: bool = False, id: str = "chart") -> str:
    """The chart as SVG. ``standalone`` adds its own colours and a legend; else the page's CSS variables apply."""
    frame = Frame(chart, _AREA, _y_range(chart))
    left, right, _, _ = _AREA
    data = {
        "x": [left, right, *(map(math.log, frame.x_range) if chart.against else frame.x_range)],
        "by": chart.x_label,
        "log": bool(chart.against),
        "unit": chart.unit,
        "series": [
            {"label": s.label, "slot": s.slot, "p": [[x, float(f"{mean:.5g}")] for x, mean, *_ in s.points]}
            for s in chart.series
        ],
    }
    return _fill(
        "chart.svg",
        chart=chart,
        frame=frame,
        drawn=[s for s in chart.series if s.points],
        standalone=standalone,
        width=_WIDTH,
        height=_HEIGHT,
        shade=lambda value: _shade(chart, value),
        clip=re.sub(r"\W", "-", f"clip-{id}"),  # a user's experiment may be called R&D
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")),
    ) + ("\n" * standalone)


def picture(charts: Sequence[Chart]) -> str:
    """Charts beside each other, for a README. A title may have two lines. Charts with the same series and metric that
    follow each other are a group, with one legend and the same y axis."""
    frames, legend = list[Frame](), list[dict[str, object]]()
    for _, alike in groupby(charts, key=lambda chart: (chart.axis, [(s.label, s.slot) for s in chart.series])):
        group = list(alike)
        ranges = [_y_range(_framed(chart)) for chart in group]
        y_range = min(low for low, _ in ranges), max(high for _, high in ranges)
        legend += _legend(group[0], _PANEL * len(frames) + 14, _PANEL * len(group) - 20)
        for chart in group:
            right = _PANEL * (len(frames) + 1) - 14
            frames.append(Frame(chart, (right - _PANEL + 58, right, 78, 300), y_range))
    return _fill("picture.svg", frames=frames, legend=legend, width=_PANEL * len(frames)) + "\n"


_PANEL = 310  # the width of each of a picture's charts


def _legend(chart: Chart, left: int, width: int) -> list[dict[str, object]]:
    """Lines of points side by side; curves below each other, with their ends."""
    keys = list[dict[str, object]]()
    for i, s in enumerate(chart.series):
        if chart.against:
            x, y, text = left + i * width // len(chart.series), 360, s.label
        else:
            end = f": {_short(s.points[-1][1])} {chart.unit}".rstrip() if s.points else ""
            x, y, text = left, 360 + 20 * i, s.label + end
        keys.append({"x": x, "y": y, "slot": s.slot, "text": text})
    return keys


def _framed(chart: Chart) -> Chart:
    """The part of a chart that a picture's frame must hold: no intervals, and no first eighth of a curve."""
    first = 0.0 if chart.against else max((p[0] for s in chart.series for p in s.points), default=0.0) / 8
    return replace(
        chart,
        series=tuple(
            replace(s, points=tuple((x, y, y, y) for x, y, *_ in s.points if x >= first), paper=None)
            for s in chart.series
        ),
    )


def _shade(chart: Chart, value: float) -> float:
    """How dark a map's square is: text on it has a contrast of 4:1 or more, on light pages and on dark ones."""
    means = [_on_axis(chart, mean) for s in chart.series for _, mean, *_ in s.points]
    low, high = min(means), max(means)
    return round(0.05 + 0.45 * (_on_axis(chart, value) - low) / (high - low or 1.0), 3)


def _on_axis(chart: Chart, value: float) -> float:
    return math.log(max(value, 1e-300)) if chart.log else value


def _fill(template: str, **values: object) -> str:
    colors = {"light": LIGHT, "dark": DARK}
    return _environment().get_template(template).render(**values, **colors, stroke=lambda slot: Markup(_stroke(slot)))


@cache
def _environment() -> Environment:
    """Of templates whose line breaks are left out, so that every tag stands on one line there."""

    def source(name: str) -> str:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        return "".join(line.strip("\n") for line in text.splitlines())

    environment = Environment(loader=FunctionLoader(source), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"number": _number, "short": _short}
    return environment


def _dash(slot: int) -> str:
    """The colours repeat after six, each with another dash."""
    return DASHES[(slot + slot // 6) % 6]


def legend_key(slot: int) -> str:
    """A short piece of the line of ``slot``, for a legend in HTML."""
    return f'<svg class="key" viewBox="0 0 28 10" aria-hidden="true"><path d="M1 5H27"{_stroke(slot)}/></svg>'


def _stroke(slot: int) -> str:
    dash = _dash(slot)
    return (f' stroke-dasharray="{dash}"' if dash else "") + f' style="stroke:var(--s{slot % 6})"'


def _short(value: float) -> str:
    """To three digits."""
    return f"{value:#.3g}".removesuffix(".")


def _number(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e4):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"
