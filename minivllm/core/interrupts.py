"""Delays Ctrl-C until the end of a step: if a step were interrupted, scheduler and device would disagree."""

from __future__ import annotations

import signal
import threading
from types import FrameType

try:  # ``signal`` wraps this and looks each handler up in its enums: 10 µs per step
    import _signal as handlers
except ImportError:  # not CPython
    handlers = signal


class Uninterrupted:
    """A context manager that delays Ctrl-C to its end. A second Ctrl-C is raised at once.

    Has an effect only where KeyboardInterrupt is possible: in the main thread, with Python's own handler. If nested, as
    when a step's observer aborts a request, the outermost one raises.
    """

    _depth = 0

    def __enter__(self) -> None:
        if self._depth:
            self._depth += 1
            return
        self._came = False
        self._mine = (
            threading.current_thread() is threading.main_thread()
            and handlers.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._mine:
            handlers.signal(signal.SIGINT, self._note)
        self._depth = 1  # last: a Ctrl-C before the handler is there leaves nothing behind

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
