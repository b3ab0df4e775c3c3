"""Starts child processes of our own, which can import what this process can, and leave Ctrl-C to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence


def start(module: str, *arguments: object, fds: Sequence[int] = (), **env: str) -> subprocess.Popen[bytes]:
    """Run ``python -m module arguments``; the child inherits ``fds`` under the same numbers."""
    command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    # Blocked here, SIGINT is blocked in the child from its first moment.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, env=importing_env(**env), stdin=subprocess.DEVNULL, pass_fds=fds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_it_ended(code: int) -> str:
    """A ``Popen.returncode``, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def importing_env(**more: str) -> dict[str, str]:
    """This process's environment, with ``sys.path`` as PYTHONPATH, so that a child can import the same modules."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)} | more
