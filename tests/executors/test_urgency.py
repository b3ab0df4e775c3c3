"""A process that was made nice is no longer, where that may be undone and nobody asked for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have no niceness of their own")

PROGRAM = """
import os, threading, time
go = threading.Event()
threading.Thread(target=go.wait, daemon=True).start()
from minivllm.executors.urgency import be_as_urgent_as_others
be_as_urgent_as_others()
print(sorted({os.getpriority(os.PRIO_PROCESS, int(name)) for name in os.listdir("/proc/self/task")}))
"""


def niceness(asked: str | None = None) -> str:
    """Of all threads of a process that starts with 7."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_worker_niceness"}
    env |= {} if asked is None else {"RAY_worker_niceness": asked}
    command = ["nice", "-n", "7", sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def may() -> bool:
    """Whether this process may undo it."""
    limit = subprocess.run(["nice", "-n", "1", "nice", "-n", "-1", "true"], capture_output=True, text=True)
    return not limit.stderr


def test_all_threads_are_as_urgent_as_others() -> None:
    assert niceness() == ("[0]" if may() else "[7]")


def test_what_a_cluster_was_started_with_stays() -> None:
    assert niceness("7") == "[7]"
