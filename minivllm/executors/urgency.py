"""Undoes Ray's niceness of 15 for its workers, which on a busy node leaves them a thirtieth of a core."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_ASKED = "RAY_worker_niceness"  # a cluster may be started with another value


def be_as_urgent_as_others() -> None:
    """Reset the niceness of this process, which launches GPU work; not if the cluster was started with its own value,
    or if this process lacks the privilege (CAP_SYS_NICE)."""
    if _ASKED in os.environ:
        return
    threads = Path("/proc/self/task")  # on Linux each thread has its own niceness
    for thread in threads.iterdir() if threads.is_dir() else ():
        with suppress(OSError):  # not permitted, or the thread has ended
            if os.getpriority(os.PRIO_PROCESS, int(thread.name)) > 0:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
