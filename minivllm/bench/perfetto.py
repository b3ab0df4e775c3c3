"""``trace=``: a run as a trace for https://ui.perfetto.dev and chrome://tracing (Chrome's JSON format).

One process with four tracks: scheduling, launch, GPU step (or what computes instead) and commit, with a slice per step.
A request is a flow: from the scheduling that admits it, through each step on the device that computes its prompt, to
the commits of its first and its last token. Below them are counters: batch, queue and cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minivllm.bench.recorder import Step, StepRecorder

_PID = 1
TRACKS = ("scheduling", "launch", "GPU step", "commit")
_SCHEDULING, _LAUNCH, _DEVICE, _COMMIT = range(1, 5)


def write_trace(recorder: StepRecorder, file: Path, about: dict[str, Any]) -> None:
    """Write the trace. ``about``, a description of what ran, goes to ``otherData``."""
    events: list[dict[str, Any]] = [_named("process_name", 0, f"minivllm: {about.get('model', '')}")]
    for thread, track in enumerate(TRACKS, 1):
        where = " (here: CPU)" if thread == _DEVICE and about.get("device") == "cpu" else ""
        events += [_named("thread_name", thread, track + where), _sorted(thread)]
    flows = _Flows()
    for step in recorder.steps:
        events += _slices(step, recorder)
        events += flows.of(step, recorder.began)
    about = {**about, "gpu_clock": recorder.clock}
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}), encoding="utf-8")


def _slices(step: Step, recorder: StepRecorder) -> Iterator[dict[str, Any]]:
    args = {
        "step": step.number,
        "sequences": step.sequences,
        "decode tokens": step.decode_tokens,
        "prompt tokens": step.prefill_tokens,
    }
    start, end = step.device
    for thread, begin, until, more in (
        (_SCHEDULING, step.began, step.planned, {"admitted": step.admitted}),
        (_LAUNCH, step.planned, step.launched, {}),
        (_DEVICE, start, end, {"clock": recorder.clock}),
        (_COMMIT, step.done, step.ended, {"finished": step.finished}),
    ):
        yield {
            "ph": "X", "pid": _PID, "tid": thread, "name": _name(step), "cat": "step",
            "ts": _us(begin, recorder.began), "dur": max(_us(until, begin), 0.001), "args": {**args, **more},
        }  # fmt: skip
    for name, values in (
        ("tokens", {"decode": step.decode_tokens, "prompt": step.prefill_tokens}),
        ("requests", {"running": step.running, "waiting": step.waiting}),
        ("cache blocks", {"used": step.blocks}),
    ):
        yield {"ph": "C", "pid": _PID, "name": name, "ts": _us(step.planned, recorder.began), "args": values}


def _name(step: Step) -> str:
    parts = [f"{step.decode_tokens} decode"] * bool(step.decode_tokens)
    return " + ".join(parts + [f"{step.prefill_tokens} prompt"] * bool(step.prefill_tokens)) or "drafts"


class _Flows:
    """The arrows between slices, one flow per request. An arrow's time is the middle of its slice, to attach to it."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def of(self, step: Step, zero: float) -> Iterator[dict[str, Any]]:
        for name in step.admitted:
            new = name not in self._ids
            self._ids.setdefault(name, len(self._ids) + 1)
            yield self._event("s" if new else "t", name, _SCHEDULING, step.began, step.planned, zero)
        for name in dict.fromkeys(step.chunks):
            yield self._event("t", name, _DEVICE, *step.device, zero)
        for name in step.first:
            if name not in step.finished:
                yield self._event("t", name, _COMMIT, step.done, step.ended, zero)
        for name in step.finished:
            yield self._event("f", name, _COMMIT, step.done, step.ended, zero)

    def _event(self, phase: str, name: str, thread: int, begin: float, end: float, zero: float) -> dict[str, Any]:
        event = {
            "ph": phase, "pid": _PID, "tid": thread, "name": name, "cat": "request", "id": self._ids[name],
            "ts": _us((begin + end) / 2, zero),
        }  # fmt: skip
        return event | {"bp": "e"} if phase == "f" else event


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PID, "tid": thread, "name": kind, "args": {"name": name}}


def _sorted(thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": _PID, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _us(at: float, zero: float) -> float:
    return round(1e6 * (at - zero), 3)
