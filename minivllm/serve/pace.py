"""When a server's next step is launched: not at once, and never late."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine

_STEPS = 32  # of which the shortest says how long the one under way takes at least
_SHARE, _LEAST = 0.25, 0.7e-3  # of that, and seconds: a launch comes so long before that end, whichever is more
_LATE = 50e-6  # seconds: a result that was waited for no longer had been there before
_MORE, _LESS = 1.5, 0.99  # times as long before, for each launch that was late, and for each step


class Pace:
    """How long a launch may be put off, so that requests that come meanwhile are in that step and not in the one behind.

    It is to come while a step is under way, which takes at least as long as the shortest of the last ones; a quarter of
    that is left, and more on hosts that are late so. A step that takes the host long to launch is not late: the device
    begins before all of it is there.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._never = engine.describe()["device"] == "cpu"  # whose launch computes
        self._lengths: deque[float] = deque(maxlen=_STEPS)  # from the end of one step to that of the next
        self._ended: float | None = None  # when the last one did, if another was under way then
        self._put_off = False
        self._factor = 1.0
        self._waited = self._launching = 0.0  # the engine's totals

    def ended(self, at: float) -> None:
        """A step did, and its tokens are taken in. at: ``time.perf_counter`` when they came."""
        stats = self._engine.stats
        waited, launching = stats.wait_time - self._waited, stats.launch_time - self._launching
        self._waited, self._launching = stats.wait_time, stats.launch_time
        late = self._put_off and waited < _LATE and launching < _LEAST
        self._factor = max(self._factor * (_MORE if late else _LESS), 1.0)
        self._put_off = False
        if self._ended is not None:
            self._lengths.append(at - self._ended)
        self._ended = at if self._engine.num_steps_under_way else None

    def left(self, now: float) -> float:
        """Seconds, of ``time.perf_counter``, until the next launch had better come; 0: it is time."""
        if self._never or self._ended is None or len(self._lengths) < _STEPS:
            return 0.0
        shortest = min(self._lengths)
        left = self._ended + shortest - self._factor * max(_SHARE * shortest, _LEAST) - now
        self._put_off |= left > 0
        return max(left, 0.0)
