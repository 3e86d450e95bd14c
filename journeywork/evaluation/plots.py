"""Plots as inline SVG, without a library: intervals in rows, and one point for each task.

Colours come from the page's style sheet, so that a plot follows the reader's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from journeywork.statistics import Estimate

_WIDTH, _LEFT, _RIGHT, _ROW = 720, 230, 90, 30
_SIDE = 360
_MARGIN = 44


@dataclass(frozen=True)
class _Scale:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values inside, at distances of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _scale(values: Sequence[float], start: float, end: float) -> _Scale:
    found = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(found), max(found)
    room = (high - low) * 0.08 or max(abs(high) * 0.1, 0.5)
    return _Scale(low - room, high + room, start, end)


def interval_plot(title: str, rows: Sequence[tuple[str, Estimate]], zero: bool = False) -> str:
    """Return one row for each estimate: a point for the mean, a line for the 95 % interval.

    `zero` draws a line at 0, for differences."""
    shown = [v for _, e in rows for v in (e.mean, e.low, e.high)] + ([0.0] if zero else [])
    scale = _scale(shown, _LEFT, _WIDTH - _RIGHT)
    height = _ROW * len(rows) + 60
    bottom = height - 30
    parts = [_axis(scale, bottom, 10)]
    if zero:
        parts.append(_line(scale(0), 10, scale(0), bottom, "zero"))
    for number, (name, estimate) in enumerate(rows):
        y = 28 + number * _ROW
        parts.append(_text(_LEFT - 12, y + 4, name if len(name) <= 30 else f"…{name[-29:]}", "end"))
        if not math.isfinite(estimate.mean):
            parts.append(_text(_LEFT, y + 4, "no value", "start"))
            continue
        low = estimate.low if math.isfinite(estimate.low) else scale.low
        high = estimate.high if math.isfinite(estimate.high) else scale.high
        parts.append(_line(scale(low), y, scale(high), y, "interval"))
        parts.append(f'<circle class="point" cx="{scale(estimate.mean):.1f}" cy="{y}" r="4.5"/>')
        parts.append(
            _text(
                _WIDTH - _RIGHT + 12,
                y + 4,
                f"{estimate.mean:+.3f}" if zero else f"{estimate.mean:.3f}",
                "start",
            )
        )
    return _svg(title, _WIDTH, height, parts)


def scatter_plot(title: str, pairs: Sequence[tuple[str, float, float]], x_name: str, y_name: str) -> str:
    """Return one point for each (task, x, y). Above the diagonal, y is larger."""
    values = [v for _, x, y in pairs for v in (x, y)]
    across = _scale(values, _MARGIN + 10, _SIDE - 10)
    up = _Scale(across.low, across.high, _SIDE - _MARGIN, 10)
    parts = [_axis(across, _SIDE - _MARGIN, 10)]
    parts += [_text(_MARGIN, up(tick) + 4, f"{tick:g}", "end") for tick in up.ticks()]
    parts.append(_line(across(across.low), up(up.low), across(across.high), up(up.high), "zero"))
    where: dict[tuple[float, float], list[str]] = {}
    for task, x, y in pairs:
        where.setdefault((x, y), []).append(task)
    for (x, y), tasks in where.items():
        radius = 3 + min(math.sqrt(len(tasks)), 12)
        names = ", ".join(tasks[:5]) + (f" and {len(tasks) - 5} more" if len(tasks) > 5 else "")
        title = f"<title>{escape(names)}: {x:.3g} to {y:.3g}</title>"
        parts.append(
            f'<circle class="task" cx="{across(x):.1f}" cy="{up(y):.1f}" r="{radius:.1f}">{title}</circle>'
        )
    parts.append(_text((_MARGIN + _SIDE) / 2, _SIDE - 6, f"{x_name} (up: {y_name})", "middle"))
    return _svg(title, _SIDE, _SIDE, parts)


def bar_plot(title: str, rows: Sequence[tuple[str, float]], unit: str) -> str:
    """Return one bar from 0 for each (name, value)."""
    scale = _Scale(0.0, max([v for _, v in rows] + [1e-9]) * 1.05, _LEFT, _WIDTH - _RIGHT)
    height = _ROW * len(rows) + 60
    parts = [_axis(scale, height - 30, 10)]
    for number, (name, value) in enumerate(rows):
        y = 28 + number * _ROW
        parts.append(_text(_LEFT - 12, y + 4, name if len(name) <= 30 else f"…{name[-29:]}", "end"))
        width = max(scale(value) - _LEFT, 1)
        parts.append(f'<rect class="bar" x="{_LEFT}" y="{y - 8}" width="{width:.1f}" height="16"/>')
        parts.append(_text(_WIDTH - _RIGHT + 12, y + 4, f"{value:.3g} {unit}", "start"))
    return _svg(title, _WIDTH, height, parts)


def _axis(scale: _Scale, bottom: float, top: float) -> str:
    parts = [_line(scale.start, bottom, scale.end, bottom, "axis")]
    for tick in scale.ticks():
        parts.append(_line(scale(tick), top, scale(tick), bottom, "grid"))
        parts.append(_text(scale(tick), bottom + 16, f"{tick:g}", "middle"))
    return "".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}" '
        f'style="max-width:{width}px">{"".join(parts)}</svg>'
    )
