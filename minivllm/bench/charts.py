"""Charts as SVG text, for a self-contained page: no library, script or external font.

Every chart has one row per configuration, and below it the mark: machine, versions, commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 500
COLORS = ("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#b7791f", "#2c7a7b", "#4a5568")
_ROW, _TOP, _CHAR, _MARK = 24, 8, 6.3, 100  # a row's height; the margin above; a letter's width; letters of a mark line
_INK, _FAINT, _GRID = "#1a202c", "#718096", "#e2e8f0"


@dataclass(frozen=True, slots=True)
class Bar:
    """A row: one value, or several stacked, with the spread of repeated runs. Without values, ``text`` says why."""

    label: str
    color: str
    text: str
    values: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0
    runs: tuple[float, ...] = ()
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A row: the 1st, 25th, 50th, 75th and 99th percentile of something."""

    label: str
    color: str
    text: str
    quantiles: tuple[float, float, float, float, float]
    hint: str = ""


def bar_chart(bars: Sequence[Bar], mark: str, top: float | None = None) -> str:
    """Bars from zero (to ``top``, or as far as they reach); whiskers and dots where runs were repeated."""
    most = top or max((max(sum(bar.values), bar.high) for bar in bars), default=0.0) or 1.0

    def draw(bar: Bar, x: Callable[[float], float], y: float) -> Iterator[str]:
        at = 0.0
        for i, value in enumerate(bar.values):
            opacity = 0.85 if len(bar.values) == 1 else (0.35, 0.6, 0.9)[i % 3]
            yield (
                f'<rect x="{x(at):.1f}" y="{y + 4}" width="{x(at + value) - x(at):.1f}" height="{_ROW - 9}" '
                f'fill="{bar.color}" fill-opacity="{opacity}"/>'
            )
            at += value
        if bar.low < bar.high:
            middle = y + _ROW / 2 - 0.5
            yield f'<path d="M{x(bar.low):.1f} {middle}H{x(bar.high):.1f}" stroke="{_INK}" stroke-width="1.2"/>'
            for end in (bar.low, bar.high):
                yield f'<path d="M{x(end):.1f} {middle - 4}v8" stroke="{_INK}" stroke-width="1.2"/>'
            for run in bar.runs:
                yield f'<circle cx="{x(run):.1f}" cy="{middle}" r="2.2" fill="#fff" stroke="{_INK}"/>'

    def end(bar: Bar) -> float | None:
        return max(sum(bar.values), bar.high) if bar.values else None

    return _chart(bars, mark, draw, end, 0.0, most, logarithmic=False)


def box_chart(boxes: Sequence[Box], mark: str) -> str:
    """A line from the 1st to the 99th percentile, a box around the middle half, a tick at the median; logarithmic."""
    ends = [q for box in boxes for q in (box.quantiles[0], box.quantiles[-1])]
    low, high = max(min(ends), 1e-6), max(ends)
    low, high = low / 1.15, max(high, low * 2) * 1.15

    def draw(box: Box, x: Callable[[float], float], y: float) -> Iterator[str]:
        first, quarter, half, three, last = map(x, box.quantiles)
        middle = y + _ROW / 2 - 0.5
        yield f'<path d="M{first:.1f} {middle}H{last:.1f}" stroke="{box.color}" stroke-width="2"/>'
        yield (
            f'<rect x="{quarter:.1f}" y="{y + 5}" width="{max(three - quarter, 1):.1f}" height="{_ROW - 11}" '
            f'fill="{box.color}" fill-opacity="0.45" stroke="{box.color}"/>'
        )
        yield f'<path d="M{half:.1f} {y + 3}v{_ROW - 7}" stroke="{_INK}" stroke-width="2"/>'

    return _chart(boxes, mark, draw, lambda box: box.quantiles[-1], low, high, logarithmic=True)


def _chart(
    rows: Sequence, mark: str, draw: Callable, end: Callable, low: float, high: float, *, logarithmic: bool
) -> str:  # fmt: skip
    left = min(max((len(row.label) for row in rows), default=0) * _CHAR + 12, WIDTH * 0.45)
    right = WIDTH - max((len(row.text) for row in rows if end(row) is not None), default=0) * _CHAR - 14
    bottom = _TOP + _ROW * len(rows)

    def x(value: float) -> float:
        if logarithmic:
            return left + (right - left) * math.log(max(value, low) / low) / math.log(high / low)
        return left + (right - left) * value / high

    lines = _wrap(mark)
    height = bottom + 26 + 12 * len(lines)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">'
    ]
    for tick in _log_ticks(low, high) if logarithmic else _ticks(high):
        parts.append(f'<path d="M{x(tick):.1f} {_TOP}V{bottom}" stroke="{_GRID}"/>')
        parts.append(_text(x(tick), bottom + 14, f"{tick:,.10g}", "middle", _FAINT, 10.5))
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        parts.append("<g>" + (f"<title>{escape(row.hint)}</title>" if row.hint else ""))
        parts.append(_text(left - 8, y + 16, row.label, "end", _INK))
        parts += draw(row, x, y)
        reached = end(row)
        shown, ink = (x(reached) + 6, _INK) if reached is not None else (left + 6, _FAINT)
        parts.append(_text(shown, y + 16, row.text, "start", ink))
        parts.append("</g>")
    parts.append(f'<path d="M{left:.1f} {_TOP}V{bottom}" stroke="{_FAINT}"/>')
    for number, line in enumerate(lines):
        parts.append(_text(2, bottom + 30 + 12 * number, line, "start", _FAINT, 9))
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str, ink: str, size: float = 12) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{ink}" font-size="{size}">{escape(text)}</text>'


def _ticks(high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(high / 2))
    step *= next(n for n in (1, 2, 5, 10) if high / (n * step) <= 5)
    return [step * i for i in range(int(high / step * 1.0001) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [n * 10.0**d for d in decades for n in digits if low <= n * 10.0**d <= high]
        if len(ticks) >= 3:
            break
    return ticks


def _wrap(mark: str) -> list[str]:
    lines = [""]
    for part in mark.split(" · "):
        if lines[-1] and len(lines[-1]) + len(part) + 3 > _MARK:
            lines.append("")
        lines[-1] += (" · " if lines[-1] else "") + part
    return lines
