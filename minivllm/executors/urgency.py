"""Ray runs its workers at a niceness of 15, of which a busy node's other processes leave them a thirtieth of a core."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_ASKED = "RAY_worker_niceness"  # what a cluster may be started with instead


def be_as_urgent_as_others() -> None:
    """Undo that for this process, which launches a GPU's work. Not where the cluster was started with a niceness of its
    own, nor where it takes a privilege (CAP_SYS_NICE) that this process lacks."""
    if _ASKED in os.environ:
        return
    threads = Path("/proc/self/task")  # of Linux, where each has a niceness of its own
    for thread in threads.iterdir() if threads.is_dir() else ():
        with suppress(OSError):  # it may not, or has ended
            if os.getpriority(os.PRIO_PROCESS, int(thread.name)) > 0:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
