"""Ctrl-C waits for the end of a step: cut off within one, the scheduler and the device would tell different stories."""

from __future__ import annotations

import signal
import threading
from types import FrameType

try:  # what ``signal`` wraps, looking each handler up among its enums: 10 µs a step
    import _signal as handlers
except ImportError:  # another Python's
    handlers = signal


class Uninterrupted:
    """``with``: a Ctrl-C is raised at the end. A second one does not wait.

    Only where KeyboardInterrupt could come at all: in the main thread, under Python's own handler. Within another one,
    as when a step's observer aborts a request, it is the outer one's.
    """

    _depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._came = False
        self._mine = (
            threading.current_thread() is threading.main_thread()
            and handlers.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._mine:
            handlers.signal(signal.SIGINT, self._note)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._depth -= 1
        if self._mine and not self._depth:
            handlers.signal(signal.SIGINT, signal.default_int_handler)
            if self._came and kind is None:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
