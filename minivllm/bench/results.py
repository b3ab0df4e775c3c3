"""A sweep's rows and their figures; ``results.json`` is both the result and the state that a sweep resumes from."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in a record. ``higher``: whether more is better."""

    key: str
    label: str
    digits: int
    higher: bool = False
    scale: float = 1.0  # for display


FIGURES = (
    Figure("output_tokens_per_s", "output tok/s", 1, higher=True),
    Figure("total_tokens_per_s", "total tok/s", 1, higher=True),
    Figure("ms_per_step_p50", "ms/step p50", 3),
    Figure("ms_per_step_p99", "ms/step p99", 3),
    Figure("ttft_ms_p50", "first token ms", 1),
    Figure("latency_ms_p50", "last token ms", 1),
    Figure("gpu_busy", "GPU busy %", 1, higher=True, scale=100.0),
    Figure("time_to_ready_s", "ready s", 2),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repeated runs."""

    median: float
    min: float
    max: float
    runs: int = 1

    def words(self, figure: Figure) -> tuple[str, str]:
        """The median; and the range, or an empty string after a single run."""
        middle, low, high = (f"{figure.scale * v:,.{figure.digits}f}" for v in (self.median, self.min, self.max))
        return middle, f"{low}–{high}" if self.runs > 1 else ""

    def brief(self, figure: Figure) -> str:
        """As ``24.2 ±6%``, if repeated."""
        half = f" ±{50 * (self.max - self.min) / self.median:.0f}%" if self.runs > 1 and self.median else ""
        return self.words(figure)[0] + half

    def text(self, figure: Figure) -> str:
        middle, ends = self.words(figure)
        return f"{middle} ({ends})" if ends else middle


def figures(record: dict[str, Any]) -> dict[str, Spread]:
    """A record's figures by key. For ``workload=host``: ``host_us 256+0``, µs per step with that many
    running+waiting."""
    found = {}
    for key in (f.key for f in FIGURES):
        value = (record.get("profile") or {}).get("gpu_busy") if key == "gpu_busy" else record.get(key)
        if value is not None:
            ends = record.get("spread", {}).get(key, {"median": value, "min": value, "max": value})
            found[key] = Spread(**ends, runs=len(record["runs"]) if key in record.get("spread", {}) else 1)
    for row in record.get("host", ()):
        value = row["us_p50"]
        found[f"host_us {row['running']}+{row['waiting']}"] = Spread(value, value, value)
    return found


@dataclass(slots=True)
class Row:
    """One configuration. ``status``: waiting, ok, unsupported, failed or timeout."""

    job: int
    settings: dict[str, str]
    status: str = "waiting"
    reason: str | None = None
    job_seconds: float | None = None  # of its process, including startup; the record's are the measured run's
    record: dict[str, Any] | None = None

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]

    def label(self, keys: Sequence[str]) -> str:
        return " ".join(f"{short(key, keys)}={self.settings[key]}" for key in keys)


def short(key: str, keys: Sequence[str]) -> str:
    """The shortest end of a key that tells it from the other keys."""
    parts = key.split(".")
    ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((end for end in ends if not any(f".{k}".endswith(f".{end}") for k in keys if k != key)), key)


@dataclass(slots=True)
class Sweep:
    """All rows, done or not, and the overrides as typed. The caller keeps track of the folder."""

    overrides: list[str]
    swept: list[str]
    cwd: str
    created: str
    rows: list[Row] = field(default_factory=list)
    timeout: float | None = None

    @property
    def keys(self) -> list[str]:
        """The keys in which rows differ."""
        return self.swept or list(self.rows[0].settings)

    def job_folder(self, folder: Path, row: Row) -> Path:
        """The folder for a job's output; names sort like the rows."""
        return folder / "jobs" / f"{row.job:0{len(str(len(self.rows) - 1))}d}"

    def save(self, folder: Path) -> None:
        """Write ``results.json`` and ``results.csv`` atomically, so that a kill never leaves half a file."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False, indent=1)
        _replace(folder / "results.json", lambda file: file.write(text))
        _replace(folder / "results.csv", self._write_csv)

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """Raises ConfigError for a folder without a sweep."""
        file = folder / "results.json"
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
            if tree.pop("format") != FORMAT:
                raise ConfigError(f"{file} was written by another version of minivllm and cannot be resumed")
            return cls(**(tree | {"rows": [Row(**row) for row in tree["rows"]]}))
        except (FileNotFoundError, NotADirectoryError) as e:
            raise ConfigError(
                f"sweep.resume={folder} is not the folder of a sweep: it holds no results.json; type the folder "
                "that `minivllm bench -m` named, such as minivllm-sweeps/DATE-TIME"
            ) from e
        except OSError as e:
            raise ConfigError(f"sweep.resume={folder}: {file} cannot be read: {e.strerror}") from e
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(f"sweep.resume={folder}: {file} is not a sweep's results ({e})") from e

    def _write_csv(self, file: Any) -> None:
        found = [figures(row.record) if row.record else {} for row in self.rows]
        names = list(dict.fromkeys([f.key for f in FIGURES] + [key for of_row in found for key in of_row]))
        settings = list(self.rows[0].settings)
        engine = ("device", "attention", "dtype", "cuda_graphs", "weights")
        about = (*engine, "cpu", "minivllm", "commit", "torch", "triton", "date")
        writer = csv.writer(file)
        columns = [f"{name}{end}" for name in names for end in ("", "_min", "_max")]
        writer.writerow(
            ["job", *settings, "status", "reason", "job_seconds", *columns, *(f"ran_{name}" for name in about)]
        )
        for row, of_row in zip(self.rows, found, strict=True):
            took = "" if row.job_seconds is None else row.job_seconds
            ends = [(s.median, s.min, s.max) if (s := of_row.get(name)) else ("", "", "") for name in names]
            writer.writerow(
                [row.job, *row.settings.values(), row.status, row.reason or "", took]
                + [value for three in ends for value in three]
                + [(row.record or {}).get(name, "") for name in about]
            )


def _replace(path: Path, write: Any) -> None:
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8", newline="") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
