"""Tracks a rank's progress at startup, or while it loads other weights, by sampling the stack of the thread that does.

A thread that loads, compiles or captures does not stay at one place for long, whatever code it runs; one that hangs
does. An endless loop is not detected.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from minivllm.errors import ConfigError
from minivllm.executors.messages import Still

# In seconds, for ranks in processes and in actors:
START_TIMEOUT = 600.0  # at one place; the longest legitimate wait is a backend compiling its kernels
STEP_TIMEOUT = 300.0  # a first step may compile kernels
SILENT = 6.0  # without a sign of life, until a rank counts as lost
TICK = 0.25  # between liveness checks
_OURS = Path(__file__).parents[1]
_WAITS_FOR_OTHERS = "/huggingface_hub/"  # a download waits for its own threads and has its own time limits


def seconds(options: Mapping[str, Any], name: str, usual: float) -> float:
    """``executor.options.<name>`` in seconds. Raises ConfigError for an invalid value."""
    value, key = options.get(name, usual), f"executor.options.{name}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{key}={value} is not a number of seconds above 0; type {key}={usual:g}")
    return float(value)


class Progress:
    """Watches one thread; ``sample`` is called from another."""

    def __init__(self, thread: int | None) -> None:
        self.thread = thread
        self._place, self._since = 0, time.monotonic()

    def sample(self) -> Still:
        """Where the thread is, and for how many seconds it has been there."""
        frame = sys._current_frames().get(self.thread or 0)
        frames = list(_stack(frame))
        place = hash(tuple((f.f_code, f.f_lasti) for f in frames))
        downloads = any(_WAITS_FOR_OTHERS in f.f_code.co_filename for f in frames)
        now = time.monotonic()
        if place != self._place or downloads:
            self._place, self._since = place, now
        return Still(describe(frames), now - self._since)


def _stack(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def describe(frames: list[FrameType]) -> str:
    """The innermost function, and the innermost minivllm function that called it."""
    if not frames:
        return "no Python code"
    ours = next((f for f in frames if _OURS in Path(f.f_code.co_filename).parents), None)
    called = f", called by {_name(ours)}" if ours is not None and ours is not frames[0] else ""
    return _name(frames[0]) + called


def _name(frame: FrameType) -> str:
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{frame.f_code.co_name} ({file}, line {frame.f_lineno})"


def nobody_moves(places: dict[int, Still], limit: float, doing: str = "startup") -> str | None:
    """Why to give up ``doing`` this, if every rank that is not ready has been at one place for ``limit`` seconds.

    While one moves, the others may be waiting for it. The cause cannot be told from outside, so all are named.
    """
    if not places or min(still.seconds for still in places.values()) <= limit:
        return None
    where = "; ".join(f"rank {rank} for {s.seconds:.0f} s in {s.where}" for rank, s in sorted(places.items()))
    return f"{doing} made no progress for {limit:g} s (executor.options.start_timeout): {where}"
