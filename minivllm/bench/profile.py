"""A torch profiler trace of some steady steps: how busy the GPU was, and with which kernels."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.bench.measure import Bench

_LARGEST = 10
_LEAD_IN = 3  # steady steps before the trace begins


@dataclass(frozen=True, slots=True)
class Work:
    """All runs of one kernel (or of one CPU operation: its own time, without what it calls)."""

    name: str
    count: int
    total_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """``gpu_busy``: the share of the time from the first kernel's start to the last one's end in which a kernel ran;
    the profiler's own cost is in the gaps. None if there was no kernel."""

    trace: str | None  # the file, if it is kept
    steps: int
    gpu_busy: float | None
    largest: list[Work]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def profile_steps(bench: Bench, steps: int, keep: Path | None = None) -> Profile:
    """Run the workload until everything that can run decodes, trace ``steps`` steps, and abort the rest.

    ``keep``: where to write torch's Chrome trace.
    """
    engine = bench.engine
    bench.add(bench.requests)
    _settle(bench, steps)
    with tempfile.TemporaryDirectory(prefix="minivllm-") as folder:
        trace = keep or Path(folder) / "trace.json"
        with engine.executor.profile(trace):
            before = engine.stats.steps
            while engine.stats.steps - before < steps and engine.has_unfinished_requests():
                engine.step()
            traced = engine.stats.steps - before
        bench.clear()
        events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    kept = None if keep is None else str(keep)
    if not (kernels := kernels_of(events)):
        return Profile(kept, traced, None, largest(operations_of(events)))
    return Profile(kept, traced, busy_share((start, start + length) for _, start, length in kernels), largest(kernels))


def _settle(bench: Bench, steps: int) -> None:
    """Step until each running sequence gets a token per step; trace a workload too short for that from its start."""
    engine = bench.engine
    patience = max(r.max_tokens for r in bench.requests) - steps  # leaves the longest request that many steps
    steady = 0
    for _ in range(patience if patience > _LEAD_IN else 0):
        before = engine.stats.output_tokens
        engine.step()
        full = min(engine.num_unfinished_requests, engine.config.scheduler.max_num_seqs)
        steady = steady + 1 if engine.stats.output_tokens - before >= full else 0
        if steady > _LEAD_IN:
            return


def busy_share(intervals: Iterable[tuple[float, float]]) -> float:
    """The share of the time from the first start to the last end that intervals cover."""
    ordered = sorted(intervals)
    covered, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return covered / max(reached - ordered[0][0], 1e-9)


def largest(work: Iterable[tuple[str, float, float]]) -> list[Work]:
    """The names that took the most time, of (name, start, µs)."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for name, _, length in work:
        lengths[name].append(length)
    found = [Work(name, len(all_of), sum(all_of)) for name, all_of in lengths.items()]
    return sorted(found, key=lambda w: -w.total_us)[:_LARGEST]


def kernels_of(events: Iterable[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(name, start, length) in µs of each kernel in a Chrome trace's events."""
    return [(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") == "kernel"]


def operations_of(events: Iterable[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(name, start, own time without callees) in µs of each CPU operation."""
    calls = sorted(
        (e["tid"], float(e["ts"]), -float(e["dur"]), e["name"]) for e in events if e.get("cat") == "cpu_op"
    )  # by thread; callers before callees
    own = [-length for _, _, length, _ in calls]
    under_way: list[int] = []
    for i, (thread, start, length, _) in enumerate(calls):
        while under_way and (calls[under_way[-1]][0] != thread or _end(calls[under_way[-1]]) <= start):
            under_way.pop()
        if under_way:
            own[under_way[-1]] += length
        under_way.append(i)
    return [(name, start, max(us, 0.0)) for (_, start, _, name), us in zip(calls, own, strict=True)]


def _end(call: tuple[Any, float, float, str]) -> float:
    return call[1] - call[2]
