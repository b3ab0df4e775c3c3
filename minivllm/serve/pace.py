"""Decides when a server launches the next step: not at once, but never too late."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine

_STEPS = 32  # recent steps; the shortest is a lower bound for the one in flight
_SHARE, _LEAST = 0.25, 0.7e-3  # a launch comes this share of it, or this many seconds, before its end: the larger
_LATE = 50e-6  # seconds: a result waited for no longer than this was already there
_MORE, _LESS = 1.5, 0.99  # factors on that lead time, for each late launch and for each step


class Pace:
    """How long a launch may be delayed, so that a request arriving meanwhile joins that step instead of the next.

    Only for decode-only steps, which the host launches quickly: with prompts a launch may take as long as the step. The
    launch must come while a step is in flight, which takes at least as long as the shortest recent one; a quarter of
    that is kept as lead time, and more on hosts where launches are late.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._never = engine.describe().get("device") == "cpu"  # there, launch computes
        self._lengths: deque[float] = deque(maxlen=_STEPS)  # from one step's end to the next one's
        self._ended: float | None = None  # when the last step ended, if another was in flight
        self._may = self._put_off = False
        self._factor = 1.0
        self._waited = 0.0  # the engine's total

    def ended(self, at: float, came: bool) -> None:
        """Called after a step's tokens are committed. at: ``time.perf_counter`` of their arrival. came: whether
        requests arrived before the following launch, which was therefore not delayed."""
        waited, self._waited = self._engine.stats.wait_time - self._waited, self._engine.stats.wait_time
        late = self._put_off and not came and waited < _LATE
        self._factor = max(self._factor * (_MORE if late else _LESS), 1.0)
        self._put_off = False
        if self._ended is not None:
            self._lengths.append(at - self._ended)
        self._ended = at if self._engine.num_steps_under_way else None
        self._may = not self._never and self._engine.decodes_next

    def left(self, now: float) -> float:
        """Seconds from ``now`` (``time.perf_counter``) until the next launch is due; 0: launch now."""
        if not self._may or self._ended is None or len(self._lengths) < _STEPS:
            return 0.0
        shortest = min(self._lengths)
        left = self._ended + shortest - self._factor * max(_SHARE * shortest, _LEAST) - now
        self._put_off |= left > 0
        return max(left, 0.0)
