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
    """How long a launch may be put off, so that a request that comes meanwhile is in that step, not in the one behind.

    Only of decodes alone, which the host launches at once: with prompts a launch may take as long as the step. It is to
    come while a step is under way, which takes at least as long as the shortest of the last ones; a quarter of that is
    left, and more on hosts that are late so.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._never = engine.describe().get("device") == "cpu"  # whose launch computes
        self._lengths: deque[float] = deque(maxlen=_STEPS)  # from the end of one step to that of the next
        self._ended: float | None = None  # when the last one did, if another was under way then
        self._may = self._put_off = False
        self._factor = 1.0
        self._waited = 0.0  # the engine's total

    def ended(self, at: float, came: bool) -> None:
        """A step did, and its tokens are taken in. at: ``time.perf_counter`` when they came. came: whether requests did
        before the launch behind it, which so was at once."""
        waited, self._waited = self._engine.stats.wait_time - self._waited, self._engine.stats.wait_time
        late = self._put_off and not came and waited < _LATE
        self._factor = max(self._factor * (_MORE if late else _LESS), 1.0)
        self._put_off = False
        if self._ended is not None:
            self._lengths.append(at - self._ended)
        self._ended = at if self._engine.num_steps_under_way else None
        self._may = not self._never and self._engine.decodes_next

    def left(self, now: float) -> float:
        """Seconds, of ``time.perf_counter``, until the next launch had better come; 0: it is time."""
        if not self._may or self._ended is None or len(self._lengths) < _STEPS:
            return 0.0
        shortest = min(self._lengths)
        left = self._ended + shortest - self._factor * max(_SHARE * shortest, _LEAST) - now
        self._put_off |= left > 0
        return max(left, 0.0)
