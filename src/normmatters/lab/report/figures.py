"""One chart, three forms: inline SVG in the page's own colours, a standalone SVG, a PNG.

The SVG is written by hand because its colours must be CSS variables: the same drawing serves a light and a dark page.
Series differ by colour and by dash, so that no reader depends on colour alone.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["DARK", "DASHES", "LIGHT", "Chart", "Series", "legend_key", "png", "svg"]

# Distinguishable for the common colour deficiencies and with >= 3:1 contrast on their background.
LIGHT = ("#0b62b8", "#c2410c", "#0f7a55", "#8a3fb5", "#8a6a00", "#4b5563")
DARK = ("#6cb6ff", "#ff9a62", "#46d6a0", "#d6a2ff", "#eac54f", "#b6bfca")
DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "5 2 1 2", "1 3")
_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 12, 40


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


@dataclass(frozen=True)
class Chart:
    """Curves by epoch, or with ``against`` points of the axis of that name, which is logarithmic."""

    title: str
    y_label: str
    series: tuple[Series, ...]
    log: bool = False
    unit: str = ""
    against: str = ""

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
    """All curves' ends and most of their middles; the first steep epochs may leave the frame."""
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
        found = [t for t in steps if low <= t <= high]
        if len(found) > 7:
            found = [t for t in found if round(math.log10(t), 6).is_integer()]
        if len(found) >= 3:
            return found
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(chart: Chart, *, standalone: bool = False, id: str = "chart") -> str:
    """The chart as SVG. ``standalone`` adds its own colours and a legend; else the page's CSS variables apply."""
    xs = [p[0] for s in chart.series for p in s.points] or [0.0, 1.0]
    x0, x1 = (min(xs) / 1.1, max(xs) * 1.1) if chart.against else (min(xs), max(max(xs), min(xs) + 1))
    y0, y1 = _y_range(chart)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def fx(x: float) -> float:
        part = math.log(x / x0) / math.log(x1 / x0) if chart.against else (x - x0) / (x1 - x0)
        return round(_LEFT + part * width, 1)

    def fy(y: float) -> float:
        if chart.log:
            y = math.log(max(y, y0 * 1e-3) / y0) / math.log(y1 / y0)
        else:
            y = (y - y0) / (y1 - y0)
        return round(_TOP + (1 - min(max(y, -1.0), 2.0)) * height, 1)

    parts = []
    for tick in _ticks(y0, y1, chart.log):
        parts.append(f'<path class="grid" d="M{_LEFT} {fy(tick)}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{fy(tick) + 4}" text-anchor="end">{_number(tick)}</text>')
    for tick in sorted({*xs}) if chart.against else _ticks(x0, x1, False):
        if chart.against or tick == int(tick):
            parts.append(f'<path class="axis" d="M{fx(tick)} {_HEIGHT - _BOTTOM}v4"/>')
            parts.append(f'<text x="{fx(tick)}" y="{_HEIGHT - _BOTTOM + 17}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>')
    parts.append(f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(chart.x_label)}</text>')
    middle, label = _TOP + height / 2, escape(chart.axis)
    parts.append(f'<text transform="rotate(-90 11 {middle})" x="11" y="{middle}" text-anchor="middle">{label}</text>')
    clip = re.sub(r"\W", "-", f"clip-{id}")  # a user's experiment may be called R&D
    parts.append(
        f'<clipPath id="{clip}"><rect x="{_LEFT}" y="{_TOP}" width="{width + 4}" height="{height}"/></clipPath>'
    )
    parts.append(f'<g clip-path="url(#{clip})">')
    for s in chart.series:
        if not s.points:
            continue
        color = f"var(--s{s.slot % 6})"
        parts.append(f'<g class="series" data-slot="{s.slot}"><title>{escape(s.label)}</title>')
        if chart.against:
            bars = "".join(f"M{fx(x)} {fy(lo)}V{fy(hi)}" for x, _, lo, hi in s.points)
            parts.append(f'<path d="{bars}" style="stroke:{color};stroke-width:1.5"/>')
        elif any(hi > lo for _, _, lo, hi in s.points):
            edge = [f"{fx(x)},{fy(hi)}" for x, _, _, hi in s.points] + [
                f"{fx(x)},{fy(lo)}" for x, _, lo, _ in s.points[::-1]
            ]
            parts.append(f'<polygon points="{" ".join(edge)}" style="fill:{color};opacity:.14"/>')
        line = " ".join(f"{fx(x)},{fy(mean)}" for x, mean, _, _ in s.points)
        parts.append(f'<polyline points="{line}"{_stroke(s.slot)}/>')
        for x, mean, *_ in s.points if chart.against else s.points[-1:]:
            parts.append(f'<circle cx="{fx(x)}" cy="{fy(mean)}" r="2.6" style="fill:{color}"/>')
        parts.append("</g>")
    parts.append("</g>")
    right = _WIDTH - _RIGHT + 1
    for s in chart.series:
        if s.paper is not None and s.points:
            note = f"<title>{escape(s.label)} in the paper: {_number(s.paper)}</title>"
            look = f'class="series paper" data-slot="{s.slot}" style="fill:var(--s{s.slot % 6})"'
            parts.append(f'<path {look} d="M{right} {fy(s.paper)}l10 -5v10z">{note}</path>')
    summary = "; ".join(f"{s.label} ends at {_number(s.points[-1][1])}" for s in chart.series if s.points)
    aria = f'role="img" aria-label="{escape(f"{chart.title}, {chart.axis} by {chart.x_label}: {summary}", quote=True)}"'
    if standalone:
        rows = _legend_rows(chart.series)
        total = _HEIGHT + 18 * (len(rows) // 2) + 26
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -22 {_WIDTH} {total}" width="{_WIDTH}" {aria}>'
        title = f'<text class="title" x="{_LEFT}" y="-6">{escape(chart.title)}</text>'
        back = '<rect class="page" y="-22" width="100%" height="100%"/>'
        return f"{head}<style>{_style()}</style>{back}{title}{''.join(parts + rows)}</svg>\n"
    data = {
        "x": [_LEFT, _WIDTH - _RIGHT, *((math.log(x0), math.log(x1)) if chart.against else (x0, x1))],
        "by": chart.x_label,
        "log": bool(chart.against),
        "unit": chart.unit,
        "series": [
            {"label": s.label, "slot": s.slot, "p": [[x, _short(m)] for x, m, *_ in s.points]} for s in chart.series
        ],
    }
    blob = escape(json.dumps(data, ensure_ascii=False, separators=(",", ":")), quote=True)
    cross = f'<path class="cross" d="M0 {_TOP}v{height}"/>'
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" {aria} data-chart="{blob}">{"".join(parts)}{cross}</svg>'
    )


def _dash(slot: int) -> str:
    """The colours come again after six, each with another dash."""
    return DASHES[(slot + slot // 6) % 6]


def legend_key(slot: int) -> str:
    """A short piece of the line of ``slot``, for a legend in HTML."""
    return f'<svg class="key" viewBox="0 0 28 10" aria-hidden="true"><path d="M1 5H27"{_stroke(slot)}/></svg>'


def _stroke(slot: int) -> str:
    dash = _dash(slot)
    return (f' stroke-dasharray="{dash}"' if dash else "") + f' style="stroke:var(--s{slot % 6})"'


def _legend_rows(series: Sequence[Series]) -> list[str]:
    rows = []
    for i, s in enumerate(series):
        y = _HEIGHT + 14 + 18 * i
        rows.append(f'<polyline points="{_LEFT},{y - 4} {_LEFT + 28},{y - 4}"{_stroke(s.slot)}/>')
        rows.append(f'<text x="{_LEFT + 36}" y="{y}">{escape(s.label)}</text>')
    if any(s.paper is not None for s in series):
        y = _HEIGHT + 14 + 9 * len(rows)
        rows.append(f'<path class="mark" d="M{_LEFT + 16} {y - 4}l10 -5v10z"/>')
        rows.append(f'<text x="{_LEFT + 36}" y="{y}">the paper’s final number</text>')
    return rows


def _style() -> str:
    def theme(colors: tuple[str, ...], text: str, grid: str, page: str) -> str:
        slots = ";".join(f"--s{i}:{c}" for i, c in enumerate(colors))
        return f"svg{{{slots};--text:{text};--grid:{grid};--page:{page}}}"

    shapes = (
        "text{font:12px system-ui,sans-serif;fill:var(--text)}.title{font-weight:600}.page{fill:var(--page)}"
        ".mark{fill:var(--text)}"
        "polyline{fill:none;stroke-width:2;stroke-linejoin:round}.grid{stroke:var(--grid)}.axis{stroke:var(--text)}"
    )
    dark = theme(DARK, "#c9d1d9", "#30363d", "#0d1117")
    return f"{theme(LIGHT, '#24292f', '#e3e7ec', '#ffffff')}{shapes}@media(prefers-color-scheme:dark){{{dark}}}"


def png(chart: Chart) -> bytes:
    """The same chart by matplotlib, for places that take no SVG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2))
    axes = figure.add_axes((0.12, 0.12, 0.85, 0.8))
    if chart.log:
        axes.set_yscale("log")
    low, high = _y_range(chart)
    axes.set_ylim(low, high)  # first: matplotlib looks for no limits of its own then, and 1e304 has none
    ticks = _ticks(low, high, chart.log)
    axes.set_yticks(ticks, [_number(tick) for tick in ticks])
    axes.set_yticks([], minor=True)  # a logarithmic axis writes its own between them, as 6 × 10¹
    for s in chart.series:
        if not s.points:
            continue
        x, mean, least, most = zip(*s.points, strict=True)
        dash = _dash(s.slot)
        style = (0, tuple(float(d) for d in dash.split())) if dash else "-"
        axes.plot(x, mean, color=LIGHT[s.slot % 6], linestyle=style, linewidth=1.7, label=s.label)
        if chart.against:
            axes.vlines(x, least, most, color=LIGHT[s.slot % 6], linewidth=1.3)
            axes.plot(x, mean, "o", color=LIGHT[s.slot % 6], markersize=3.5)
        else:
            axes.fill_between(x, least, most, color=LIGHT[s.slot % 6], alpha=0.13, linewidth=0)
        if s.paper is not None:
            axes.plot(1.012, s.paper, "<", color=LIGHT[s.slot % 6], transform=axes.get_yaxis_transform(), clip_on=False)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.axis)
    if chart.against:
        axes.set_xscale("log")
        places = sorted({x for s in chart.series for x, *_ in s.points})
        axes.set_xticks(places, [f"{x:g}" for x in places])
        axes.set_xticks([], minor=True)
    axes.grid(axis="y", color="#e3e7ec")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5)
    FigureCanvasAgg(figure).print_png(image := io.BytesIO())
    return image.getvalue()


def _number(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e4):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
