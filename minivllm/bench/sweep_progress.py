"""A sweep's progress: a line per job on standard error and, in a terminal, a live line with the time left."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Sequence

from minivllm.bench.results import FIGURES, Row, figures


class Progress:
    """Reads ``rows`` as they change; ``keys``: the settings that tell them apart."""

    def __init__(self, rows: Sequence[Row], keys: Sequence[str]) -> None:
        self.rows, self.keys = rows, keys
        self._row: Row | None = None
        self._live = sys.stderr.isatty()

    def start(self, row: Row) -> None:
        self._row = row
        self.tick(0.0)

    def tick(self, seconds: float) -> None:
        """Update the live line, in a terminal."""
        if self._live and self._row is not None:
            text = f"{self._head(self._row)}: {seconds:.0f} s{self._left(seconds)}"
            sys.stderr.write("\r" + text[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")

    def finish(self, row: Row) -> None:
        """Print the job's final line."""
        self.clear()
        self._row = None
        found = figures(row.record) if row.record else {}
        first = next((f for f in FIGURES if f.key in found), None)
        reason = row.reason or ""
        reason = reason if reason.endswith("...") else reason.removesuffix(".")  # a comma follows
        said = f"{row.status}: {reason}" if reason else row.status
        if first is not None:
            said = f"{found[first.key].text(first)} {first.label}"
        print(f"{self._head(row)}: {said}, {row.job_seconds:.1f} s{self._left(0.0)}", file=sys.stderr, flush=True)

    def _head(self, row: Row) -> str:
        done = sum(r.status != "waiting" for r in self.rows) + (row.status == "waiting")
        return f"[{done}/{len(self.rows)}] {row.label(self.keys)}"

    def _left(self, seconds: float) -> str:
        left = time_left(self.rows, self.keys, seconds if self._row is not None else 0.0)
        return "" if left is None else f", about {in_words(left)} left"


def time_left(rows: Sequence[Row], keys: Sequence[str], spent: float = 0.0) -> float | None:
    """Seconds until all waiting rows are done, minus ``spent`` for the first one; None before any is done.

    A row is assumed to take as long as those done, not refused, that share the most settings with it.
    """
    done = [row for row in rows if row.status not in ("waiting", "unsupported") and row.job_seconds is not None]
    waiting = [row for row in rows if row.status == "waiting"]
    if not done or not waiting:
        return None
    times = []
    for row in waiting:
        shared = [sum(row.settings[key] == other.settings[key] for key in keys) for other in done]
        times.append(
            statistics.fmean(o.job_seconds or 0.0 for o, n in zip(done, shared, strict=True) if n == max(shared))
        )
    return max(times[0] - spent, 0.0) + sum(times[1:])


def in_words(seconds: float) -> str:
    """A duration, rounded for reading at a glance."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
