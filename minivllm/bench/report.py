"""A sweep's ``report.html``: one self-contained file with the table and the charts."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from minivllm.bench.charts import COLORS, Bar, Box, bar_chart, box_chart
from minivllm.bench.record import mark
from minivllm.bench.results import FIGURES, Figure, Row, Spread, Sweep, figures, short
from minivllm.plugins.types import CONFIG_GROUPS

_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1a202c; background: #fff;
  max-width: 1100px; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.6rem; margin: 0 0 .3rem } h2 { font-size: 1.2rem; margin: 2.2rem 0 .3rem }
h3 { font-size: .95rem; margin: .6rem 0 .2rem; font-weight: 600 }
p { margin: .3rem 0; color: #4a5568 } code { font-size: .9em; overflow-wrap: anywhere }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(500px, 1fr)); gap: .6rem 1.6rem }
svg { max-width: 100%; height: auto; display: block } img { max-width: 100% }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; margin: .6rem 0; min-width: 100% }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #e2e8f0; text-align: right; vertical-align: top }
td { white-space: nowrap } th { color: #4a5568; font-weight: 600; border-bottom: 2px solid #cbd5e0 }
th.text, td.text { text-align: left }
td.why { text-align: left; font-size: .78rem; white-space: normal; color: #9b2c2c; min-width: 22rem }
small { color: #718096 } .key { white-space: nowrap; margin-right: 1.1em }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
"""
# Nothing may be fetched, and nothing run: this file is all there is.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(sweep: Sweep, file: Path) -> None:
    """Write it, from the rows available."""
    page = _Page(sweep)
    overrides = escape(" ".join(sweep.overrides))
    body = [
        "<h1>minivllm sweep</h1>",
        f"<p><code>minivllm bench -m {overrides}</code></p>",
        f"<p>{escape(page.state())}</p>",
        *(f"<p>{escape(line)}</p>" for line in page.marks),
        *page.pictures(),
        *page.table(),
        *_timelines(sweep, file.parent),
    ]
    html = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
        f"<title>minivllm sweep: {overrides}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    beside = file.with_name(file.name + ".new")
    beside.write_text(html + "\n".join(body) + "\n</body>\n</html>\n", encoding="utf-8")
    beside.replace(file)


class _Page:
    """A picture for each workload; in each, a row for each configuration of the rest, coloured by the first key."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.figures = [figures(row.record) if row.record else {} for row in sweep.rows]
        self.marks = list(dict.fromkeys(mark(row.record) for row in sweep.rows if row.record))
        rest = [key for key in sweep.keys if key != "workload"]
        self.rest = rest or sweep.keys
        self.color_key = "attention" if "attention" in self.rest else self.rest[0]
        values = list(dict.fromkeys(row.settings[self.color_key] for row in sweep.rows))
        self.colors = {value: COLORS[i % len(COLORS)] for i, value in enumerate(values)}
        # of workload=host there is no step of a model to draw
        self.panels = {
            name: rows
            for name in dict.fromkeys(row.settings.get("workload", "quick") for row in sweep.rows)
            if name != "host" and (rows := [r for r in sweep.rows if r.settings.get("workload", "quick") == name])
        }

    def state(self) -> str:
        of = {status: sum(row.status == status for row in self.sweep.rows) for status in
              ("ok", "unsupported", "failed", "timeout", "waiting")}  # fmt: skip
        said = ", ".join(f"{number} {status}" for status, number in of.items() if number)
        return f"Begun {self.sweep.created}: {len(self.sweep.rows)} configurations, {said}."

    def table(self) -> list[str]:
        shown = [f for f in FIGURES if any(f.key in found for found in self.figures)]
        repeated = any(spread.runs > 1 for found in self.figures for spread in found.values())
        keys = self.sweep.keys
        lines = ["<h2>All configurations</h2>"]
        if repeated:
            lines.append("<p>The median of the runs; beneath it the least and the most.</p>")
        lines.append('<div class="scroll"><table><thead><tr>')
        lines += [f'<th class="text">{escape(key)}</th>' for key in keys]
        lines += [f"<th>{escape(f.label)}</th>" for f in shown] + ["</tr></thead><tbody>"]
        for row, found in zip(self.sweep.rows, self.figures, strict=True):
            cells = [f'<td class="text">{escape(row.settings[key])}</td>' for key in keys]
            if row.status == "ok":
                cells += [_cell(found[f.key], f) if f.key in found else "<td>–</td>" for f in shown]
            else:
                why = f"{row.status}{': ' + row.reason if row.reason else ''}"
                cells.append(f'<td class="why" colspan="{max(len(shown), 1)}">{escape(why)}</td>')
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return [*lines, "</tbody></table></div>"]

    def pictures(self) -> list[str]:
        if not any(self.figures) or not self.panels:
            return []
        step, first, busy = (
            next(f for f in FIGURES if f.key == k) for k in ("ms_per_step_p50", "ttft_ms_p50", "gpu_busy")
        )
        spread = "A bar is the median; a line with dots, where there is one, the repeated runs."
        parts = self._section("Throughput", f"More is better. {spread}", self._throughput)
        parts += self._section(
            "Latency of a step", f"Milliseconds, half the steps are faster. Less is better. {spread}",
            lambda rows: bar_chart([self._bar(row, step) for row in rows], self._mark(rows)),
        )  # fmt: skip
        parts += self._section(
            "Latency to the first token", f"Milliseconds from a request's arrival, the median request. {spread}",
            lambda rows: bar_chart([self._bar(row, first) for row in rows], self._mark(rows)),
        )  # fmt: skip
        parts += self._section(
            "Step times", "Milliseconds, logarithmic: from the 1st to the 99th percentile, the middle half as a box, "
            "the median as a tick. Beside it: the median / the 99th percentile.",
            lambda rows: box_chart([self._box(row) for row in rows], self._mark(rows)),
        )  # fmt: skip
        parts += self._section(
            "GPU-busy share", "Per cent of the time in which some kernel ran, over some steady steps under torch's "
            "profiler, with tp above 1 of rank 0. CPUs are not seen.",
            lambda rows: bar_chart([self._bar(row, busy) for row in rows], self._mark(rows), top=100.0),
            any("gpu_busy" in found for found in self.figures),
        )  # fmt: skip
        parts += self._section(
            "Start", "Seconds until the engine takes requests: the process (lightest), imports, the engine.",
            lambda rows: bar_chart([self._start(row) for row in rows], self._mark(rows)),
        )  # fmt: skip
        return parts

    def _section(self, title: str, text: str, draw: Callable[[Sequence[Row]], str], there: bool = True) -> list[str]:
        if not there:
            return [f"<h2>{title}</h2>", "<p>Not measured: no row ran on a GPU of its own process.</p>"]
        there_are = {row.settings[self.color_key] for row in self.sweep.rows if row.status == "ok"}
        legend = "".join(
            f'<span class="key"><i style="background:{color}"></i>{escape(self._short(self.color_key, value))}</span>'
            for value, color in self.colors.items()
            if value in there_are
        )
        parts = [f"<h2>{title}</h2>", f"<p>{text}</p>", f"<p>{legend}</p>", '<div class="panels">']
        for name, rows in self.panels.items():
            measured = [row for row in rows if row.status == "ok"]
            less = len(rows) - len(measured)
            rest = f"<p>{less} of {len(rows)} have no figures; the table below says why.</p>" if less else ""
            picture = draw(measured) if measured else ""
            parts.append(f"<div><h3>workload={escape(name)}{self._unit(title, rows)}</h3>{picture}{rest}</div>")
        return [*parts, "</div>"]

    def _unit(self, title: str, rows: Sequence[Row]) -> str:
        return f": {self._rate(rows).label}" if title == "Throughput" else ""

    def _rate(self, rows: Sequence[Row]) -> Figure:
        """Output tokens, or all of them where nearly all work is in the prompts."""
        records = [row.record for row in rows if row.record]
        prompts = records and all(r["tokens_in"] > 10 * r["tokens_out"] for r in records)
        return FIGURES[1] if prompts else FIGURES[0]

    def _throughput(self, rows: Sequence[Row]) -> str:
        return bar_chart([self._bar(row, self._rate(rows)) for row in rows], self._mark(rows))

    def _mark(self, rows: Sequence[Row]) -> str:
        return " and ".join(dict.fromkeys(mark(row.record) for row in rows if row.record))

    def _label(self, row: Row) -> str:
        return " ".join(self._short(key, row.settings[key]) for key in self.rest)

    def _short(self, key: str, value: str) -> str:
        """A group's option needs no key to be understood."""
        return value if key in CONFIG_GROUPS else f"{short(key, self.sweep.keys)}={value}"

    def _color(self, row: Row) -> str:
        return self.colors[row.settings[self.color_key]]

    def _bar(self, row: Row, figure: Figure) -> Bar:
        spread = figures(row.record).get(figure.key) if row.record else None
        hint = f"{row.label(self.sweep.keys)}: {spread.text(figure) if spread else ''} {figure.label}"
        if spread is None:
            return Bar(self._label(row), self._color(row), "not measured", hint=hint)
        runs = [run[figure.key] for run in (row.record or {}).get("runs", ()) if figure.key in run]
        median, low, high = (figure.scale * v for v in (spread.median, spread.min, spread.max))
        text = f"{median:,.{figure.digits if median < 1000 else 0}f}"
        return Bar(self._label(row), self._color(row), text, (median,), low, high, tuple(runs), hint)

    def _box(self, row: Row) -> Box:
        found = (row.record or {})["step_ms_quantiles"]
        first, quarter, half, three, last = (found[q] for q in ("0.01", "0.25", "0.5", "0.75", "0.99"))
        text = " / ".join(f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" for ms in (half, last))
        hint = f"{row.label(self.sweep.keys)}: median / 99th percentile"
        return Box(self._label(row), self._color(row), text, (first, quarter, half, three, last), hint)

    def _start(self, row: Row) -> Bar:
        phases = (row.record or {})["ready_phases_s"]
        values = tuple(seconds or 0.0 for seconds in phases.values())
        hint = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in zip(phases, values, strict=True))
        return Bar(self._label(row), self._color(row), f"{sum(values):.1f}", values, hint=hint)


def _cell(spread: Spread, figure: Figure) -> str:
    middle, ends = spread.words(figure)
    return f"<td>{middle}<br><small>{ends}</small></td>" if ends else f"<td>{middle}</td>"


def _timelines(sweep: Sweep, folder: Path) -> list[str]:
    parts = []
    for row in sweep.rows:
        picture = sweep.job_folder(folder, row) / "timeline.png"
        if row.status == "ok" and picture.exists():
            data = base64.b64encode(picture.read_bytes()).decode()
            parts += [
                f"<h3>{escape(row.label(sweep.keys))}</h3>",
                f'<img alt="timeline" src="data:image/png;base64,{data}">',
            ]
    return ["<h2>Timelines</h2>", *parts] if parts else []
