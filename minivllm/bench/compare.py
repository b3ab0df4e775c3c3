"""``minivllm bench compare A B``: what became faster or slower from A to B, beyond the spread of repeated runs.

A and B are ``results.json`` of sweeps or files written by ``output=``. Rows with the same settings are compared.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from minivllm.bench.record import mark
from minivllm.bench.results import FIGURES, Figure, Spread, figures
from minivllm.bench.settings import settings_of
from minivllm.bench.table import show
from minivllm.errors import ConfigError
from minivllm.naming import did_you_mean

THRESHOLD = 5.0  # per cent
USAGE = f"""usage: minivllm bench compare A B [threshold={THRESHOLD:g}]

What became faster or slower from A to B: each is results.json of a sweep, or a file that output= wrote.

  threshold  per cent (default {THRESHOLD:g}); of one run only, a difference up to it counts as the same

The exit code is 1 if some figure is slower by more than the threshold and beyond the spread of repeated runs, or if a
configuration that worked fails now, and 2 if nothing could be compared."""
# Startup is measured once per process, and the GPU-busy share is not a goal in itself: neither is judged.
_JUDGED = ("output_tokens_per_s", "total_tokens_per_s", "ms_per_step_p50", "ttft_ms_p50", "latency_ms_p50")


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one configuration in both files. ``percent``: how much better (+) or worse (-) it became."""

    settings: str
    figure: Figure
    before: Spread
    after: Spread

    @property
    def percent(self) -> float:
        before, after = self.before.median, self.after.median
        better, worse = (after, before) if self.figure.higher else (before, after)
        return 100.0 * (better / worse - 1.0) if worse else 0.0

    @property
    def known(self) -> bool:
        """Whether both were repeated, so that a spread is known."""
        return self.before.runs > 1 and self.after.runs > 1

    @property
    def beyond(self) -> bool:
        """Whether the two ranges of runs do not overlap."""
        return self.before.max < self.after.min or self.after.max < self.before.min

    def verdict(self, threshold: float) -> str:
        if not self.beyond or (not self.known and abs(self.percent) <= threshold):
            return "same"
        return "faster" if self.percent > 0 else "slower"


def run(files: Sequence[str], overrides: Sequence[str]) -> int:
    """Print the comparison; returns 1 if something became slower than ``threshold=`` per cent, or fails now.

    Raises ConfigError: a file that cannot be read, or two that have nothing in common.
    """
    if len(files) != 2:
        raise ConfigError(
            f"bench compare takes two files, A.json and B.json, not {len(files)}: results.json of a sweep, or what "
            "output= wrote"
        )
    threshold = _threshold(overrides)
    before, after = _named(*(_read(Path(expanduser(name))) for name in files))
    both = [settings for settings in before if settings in after]
    if not both:
        raise ConfigError(
            f"{files[0]} and {files[1]} have no configuration in common: {_some(before)} against {_some(after)}"
        )
    _marks(files, before, after)
    changes, broken, mended, neither = [], [], [], []
    for settings in both:
        a, b = before[settings], after[settings]
        if a.records and b.records:
            changes += (found := _changes(settings, a, b))
            neither += [] if found else [f"no figure in common: {settings}"]
        elif a.records:
            broken.append(f"fails now: {settings}: {b.reason}")
        elif b.records:
            mended.append(f"works now: {settings}")
        else:
            neither.append(f"in neither: {settings}: {b.reason}")
    _table(changes, threshold)
    only = [f"only in {files[0]}: {s}" for s in before if s not in after]
    only += [f"only in {files[1]}: {s}" for s in after if s not in before]
    for line in (*broken, *mended, *neither, *only):
        print(line)
    if not (changes or broken or mended):
        raise ConfigError(f"{files[0]} and {files[1]} have no figure in common, so that nothing was compared")
    if any(not change.known for change in changes):
        print(
            f"* one run only: its spread is not known, and up to {threshold:g}% counts as the same; repeat=3 shows it"
        )
    slower = [c for c in changes if c.verdict(threshold) == "slower" and c.percent < -threshold]
    if slower or broken:
        print(f"{len(slower)} slower by more than {threshold:g}% and beyond the spread, {len(broken)} that fail now")
    else:
        print(f"nothing is slower by more than {threshold:g}% and beyond the spread")
    return 1 if slower or broken else 0


def _threshold(overrides: Sequence[str]) -> float:
    threshold = THRESHOLD
    for text in overrides:
        key, _, value = text.partition("=")
        if key != "threshold":
            raise ConfigError(f"{text}: bench compare has one setting, threshold=5.{did_you_mean(key, ['threshold'])}")
        try:
            threshold = float(value)
        except ValueError:
            threshold = -1.0
        if not 0 <= threshold < float("inf"):
            raise ConfigError(f"{text}: threshold is a number of per cent from 0, not {value}")
    return threshold


# --------------------------------------------------------------------------- reading


@dataclass(slots=True)
class _Config:
    """What a file says of one configuration: the records of all its runs, or why it has none."""

    records: list[dict[str, Any]]
    reason: str | None = None

    def figures(self) -> dict[str, Spread]:
        """Over all runs of all records."""
        found = [figures(record) for record in self.records]
        if len(found) == 1:
            return found[0]
        pooled = {}
        for key in found[-1]:
            spreads = [of_record[key] for of_record in found if key in of_record]
            pooled[key] = Spread(
                statistics.median(s.median for s in spreads), min(s.min for s in spreads), max(s.max for s in spreads),
                sum(s.runs for s in spreads),
            )  # fmt: skip
        return pooled


def _read(file: Path) -> dict[tuple[str, str | None], _Config]:
    """settings and server, if it was one → what was measured, of a sweep's results or of JSON lines."""
    try:
        text = file.read_text(encoding="utf-8")
        rows = _rows(text)
        found: dict[tuple[str, str | None], _Config] = {}
        for row in rows:
            if row["status"] == "waiting":
                continue
            overrides = row.get("overrides") or [f"{key}={value}" for key, value in row["settings"].items()]
            server = (row.get("record") or {}).get("url")
            config = found.setdefault((settings_of(overrides), server), _Config([]))
            if row["status"] == "ok":
                config.records.append(_checked(row["record"]))
            else:
                config.reason = f"{row['status']}: {row['reason']}"
    except IsADirectoryError as e:
        raise ConfigError(f"{file} is a folder; type {file / 'results.json'}, if a sweep wrote it") from e
    except OSError as e:
        raise ConfigError(f"{file} cannot be read: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        why = f"a row has no {e}" if isinstance(e, KeyError) else str(e) if isinstance(e, ValueError) else "its layout"
        raise ConfigError(f"{file} is neither results.json of a sweep nor JSON lines that output= wrote ({why})") from e
    if not found:
        raise ConfigError(f"{file} has no result in it")
    return found


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """The record. Raises ValueError, or what Python raises for another layout, if its figures cannot be shown."""
    mark(record)
    for key, spread in figures(record).items():
        for value in (spread.median, spread.min, spread.max):
            if not isinstance(value, int | float):
                raise ValueError(f"{key} has {value!r}, which is no number")
    return record


def _named(*files: dict[tuple[str, str | None], _Config]) -> list[dict[str, _Config]]:
    """By settings: two servers, one a file, meet. With several in one file each is a configuration of its own."""
    if all(len({server for _, server in file}) == 1 for file in files):
        return [{settings: config for (settings, _), config in file.items()} for file in files]
    return [
        {f"{settings} url={server}" if server else settings: config for (settings, server), config in file.items()}
        for file in files
    ]


def _rows(text: str) -> list[dict[str, Any]]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict) and "rows" in tree:
        return tree["rows"]
    records = [json.loads(line) for line in text.split("\n") if line.strip()]
    return [{"overrides": r["overrides"], "record": r, "status": "ok", "reason": None} for r in records]


def _some(configs: dict[str, _Config]) -> str:
    return "; ".join(list(configs)[:2]) + ("; ..." if len(configs) > 2 else "")


# --------------------------------------------------------------------------- telling


def _changes(settings: str, a: _Config, b: _Config) -> list[Change]:
    before, after = a.figures(), b.figures()
    known = {f.key: f for f in FIGURES}
    keys = [key for key in before if key in after and (key in _JUDGED or key not in known)]
    return [
        Change(settings, known.get(key, Figure(key, key.replace("_", " "), 1)), before[key], after[key]) for key in keys
    ]


def _table(changes: Sequence[Change], threshold: float) -> None:
    rows, last = [], None
    for change in changes:
        percent = f"{change.percent:+.1f}%" + ("" if change.known else "*")
        rows.append([
            "" if change.settings == last else change.settings, change.figure.label, change.before.text(change.figure),
            change.after.text(change.figure), percent, change.verdict(threshold),
        ])  # fmt: skip
        last = change.settings
    if rows:
        columns = ["settings", "figure", "before", "after", "better by", ""]
        show("compared: median, and from least to most", columns, rows, left=(0, 1, 5))


def _marks(files: Sequence[str], *sides: dict[str, _Config]) -> None:
    for file, side in zip(files, sides, strict=True):
        for line in dict.fromkeys(mark(record) for config in side.values() for record in config.records):
            print(f"{file}: {line}")
