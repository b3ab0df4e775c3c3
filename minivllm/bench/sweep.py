"""``minivllm bench -m``: each combination in its own child process; a table, files and a report at the end."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from os.path import expanduser
from pathlib import Path

from minivllm.bench.child import Outcome, run_child
from minivllm.bench.record import environment
from minivllm.bench.results import FIGURES, Row, Sweep, figures
from minivllm.bench.sweep_progress import Progress
from minivllm.bench.sweep_values import expand
from minivllm.bench.table import show
from minivllm.config.compose import compose
from minivllm.config.modes import BenchOptions, SweepOptions
from minivllm.config.overrides import Override
from minivllm.errors import ConfigError, one_line
from minivllm.naming import listed
from minivllm.plugins.registry import Registry

FOLDER = "minivllm-sweeps"
_FILES = {"trace": "trace.json", "timeline": "timeline.png", "profile": "profile.json"}  # one per job, in its folder
_REFUSED = {
    "output": "a sweep writes its rows to its folder",
    "check": "a sweep has rows, not one exit code",
    "mode": "a sweep is of bench",
    "url": "a sweep starts engines of its own; measure a server once for each setting",
}
_WORDS = ("true", "false", "gpu", "png")


def run(overrides: Sequence[str], registry: Registry) -> int:
    """Run a sweep, or the rest of an interrupted one; returns the exit code: 1 if no row succeeded, 130 for Ctrl-C."""
    own = [text for text in overrides if Override.parse(text).key.startswith("sweep.")]
    typed = [text for text in overrides if text not in own]
    options = _options(own, registry)
    resumed = None if options.resume is None else Path(expanduser(options.resume)).resolve()
    sweep = _new(typed, options, registry) if resumed is None else _resumed(resumed, typed, options)
    undone = [row for row in sweep.rows if row.status != "ok"]
    refused = {row.job: why for row in _shown(undone) if (why := _refused(row, registry))}
    if len(refused) == len(sweep.rows):
        raise ConfigError(refused[0])
    folder = resumed or _make_folder(options.dir)
    with _alone(folder):
        return _run(sweep, folder, refused)


def _options(own: Sequence[str], registry: Registry) -> SweepOptions:
    composed = compose(own, registry, mode="bench").options
    assert isinstance(composed, BenchOptions)
    options = composed.sweep
    if options.resume is not None and options.dir is not None:
        raise ConfigError(f"sweep.resume={options.resume} resumes in that folder; leave sweep.dir out")
    return options


def _new(typed: Sequence[str], options: SweepOptions, registry: Registry) -> Sweep:
    if not typed:
        raise ConfigError("-m needs the keys to vary, as attention=torch,triton; or sweep.resume=DIR")
    for text in typed:
        override = Override.parse(text)
        key = override.key
        if key in _REFUSED:
            raise ConfigError(f"{text}: {_REFUSED[key]}; leave {key} out")
        if key in _FILES and not set(override.value.split(",")) <= set(_WORDS):
            raise ConfigError(
                f"{text}: each job of a sweep would overwrite it; type {key}={'png' if key == 'timeline' else 'true'}, "
                "and each writes one to its folder"
            )
    swept, combinations = expand(typed, registry)
    rows = [Row(number, settings) for number, settings in enumerate(combinations)]
    created = datetime.now().astimezone().isoformat(timespec="seconds")
    return Sweep(list(typed), swept, os.getcwd(), created, rows, options.timeout)


def _shown(rows: list[Row]) -> Iterable[Row]:
    """The rows, with a progress bar if checking them takes long (10 ms each)."""
    from tqdm import tqdm

    return tqdm(rows, desc="looking at configurations", delay=2, leave=False, dynamic_ncols=True)


def _refused(row: Row, registry: Registry) -> str | None:
    """Why a configuration is invalid, as far as can be told without loading anything."""
    try:
        compose(row.overrides, registry, mode="bench")
    except ConfigError as e:
        return one_line(e)
    return None


def _make_folder(name: str | None) -> Path:
    if name is None:
        stem = Path(FOLDER) / datetime.now().strftime("%Y%m%d-%H%M%S")
        folder, number = stem, 1
        while folder.exists():
            folder, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    else:
        folder = Path(expanduser(name))
        if (folder / "results.json").exists():
            raise ConfigError(
                f"sweep.dir={name} holds a sweep already: type sweep.resume={name} to resume it, or take another"
            )
        if held := sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []:
            raise ConfigError(
                f"sweep.dir={name} holds {listed(held, 3)}, which a sweep might overwrite: type a new folder, or an "
                "empty one"
            )
    try:
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"sweep.dir={folder} cannot be made: {e.strerror}") from e
    return folder.absolute()


def _resumed(folder: Path, typed: Sequence[str], options: SweepOptions) -> Sweep:
    sweep = Sweep.load(folder)
    if typed and sorted(typed) != sorted(sweep.overrides):
        raise ConfigError(
            f"sweep.resume={options.resume} is a sweep of {' '.join(sweep.overrides)}; leave the other settings "
            "out, or type them as they were"
        )
    if not Path(sweep.cwd).is_dir():
        raise ConfigError(f"sweep.resume={options.resume} was begun in {sweep.cwd}, which is gone; make it again")
    if options.timeout is not None:
        sweep.timeout = options.timeout
    return sweep


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process per folder. Raises ConfigError if another is using it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as e:
        raise ConfigError(f"{folder} is a sweep that still runs; wait for it, or end it first") from e
    finally:
        os.close(handle)


# --------------------------------------------------------------------------- running


def _run(sweep: Sweep, folder: Path, refused: dict[int, str]) -> int:
    from minivllm.bench.report import write_report

    print(f"sweep: {len(sweep.rows)} configuration{'s'[: len(sweep.rows) > 1]}, in {folder}", flush=True)
    done = sum(row.status == "ok" for row in sweep.rows)
    again = sum(row.status not in ("ok", "waiting") for row in sweep.rows)
    if done or again:
        _say(f"{done} done before are kept, {again} that failed are tried again")
    here = environment()
    kept = {row.record["commit"] for row in sweep.rows if row.status == "ok" and row.record}
    if kept - {here["commit"]}:
        _say(f"rows kept are of commit {', '.join(map(str, kept))}, new ones of {here['commit']}: they may not compare")
    for row in sweep.rows:
        if row.job in refused:
            _say(f"{row.label(sweep.keys)} cannot run: {refused[row.job]}")
    sweep.save(folder)
    progress = Progress(sweep.rows, sweep.keys)
    try:
        for row in sweep.rows:
            if row.status != "ok":
                row.status, row.reason = "waiting", None
        for row in sweep.rows:
            if row.status == "waiting":
                progress.start(row)
                outcome = _outcome(row, sweep, folder, refused.get(row.job), progress)
                row.status, row.reason = outcome.status, outcome.reason
                row.job_seconds, row.record = outcome.seconds, outcome.record
                sweep.save(folder)
                progress.finish(row)
    except KeyboardInterrupt:
        progress.clear()
        write_report(sweep, folder / "report.html")
        left = sum(row.status == "waiting" for row in sweep.rows)
        _say(f"interrupted with {left} of {len(sweep.rows)} left; resume with: minivllm bench -m sweep.resume={folder}")
        return 130
    write_report(sweep, folder / "report.html")
    show_sweep(sweep)
    for name in ("results.csv", "results.json", "report.html"):
        print(folder / name)
    return 0 if any(row.status == "ok" for row in sweep.rows) else 1


def _outcome(row: Row, sweep: Sweep, folder: Path, refused: str | None, progress: Progress) -> Outcome:
    if refused is not None:
        return Outcome("unsupported", refused, 0.0, None)
    mine = sweep.job_folder(folder, row)
    mine.mkdir(exist_ok=True)
    result = mine / "result.jsonl"
    return run_child(
        command(row, mine, result), mine / "log.txt", result, cwd=Path(sweep.cwd), timeout=sweep.timeout,
        tick=progress.tick,
    )  # fmt: skip


def command(row: Row, mine: Path, result: Path) -> list[str]:
    """A job's command. Unless typed otherwise, ``profile=gpu`` adds the GPU-busy share."""
    settings = {"profile": "gpu"} | row.settings
    for key, name in _FILES.items():
        if settings.get(key) in ("true", "png") and key != "profile":
            settings[key] = str(mine / name)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-P", "-m", "minivllm", "bench", *overrides, f"output={result}"]


def show_sweep(sweep: Sweep) -> None:
    """Print the table: what was varied, the figures that any row has, and below it why rows have none."""
    found = [figures(row.record) if row.record else {} for row in sweep.rows]
    shown = [f for f in FIGURES if any(f.key in of_row for of_row in found)]
    reasons: dict[str, int] = {}
    rows = []
    for row, of_row in zip(sweep.rows, found, strict=True):
        cells = [of_row[f.key].brief(f) if f.key in of_row else "" for f in shown]
        host = ", ".join(f"{key[8:]}: {s.median:.1f}" for key, s in of_row.items() if key.startswith("host_us "))
        note = f"µs a step, running+waiting: {host}" if host else row.status
        if row.reason:
            note += f" [{reasons.setdefault(row.reason, len(reasons) + 1)}]"
        rows.append([*(row.settings[key] for key in sweep.keys), *cells, note])
    repeated = any(s.runs > 1 for of_row in found for s in of_row.values())
    show(
        "sweep: " + " ".join(sweep.overrides) + (" (median ± half of what lies between least and most)" * repeated),
        [*sweep.keys, *(f.label for f in shown), "status"],
        rows,
        left=(*range(len(sweep.keys)), len(sweep.keys) + len(shown)),
    )
    for reason, number in reasons.items():
        print(f"  [{number}] {reason}")


def _say(text: str) -> None:
    print(f"sweep: {text}", file=sys.stderr, flush=True)
