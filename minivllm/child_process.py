"""Starts child processes of our own, which can import what this process can, and leave Ctrl-C to it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1


def start(module: str, *arguments: object, fds: Sequence[int] = (), **env: str) -> subprocess.Popen[bytes]:
    """Run ``python -m module arguments``; the child inherits ``fds`` under the same numbers."""
    command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    # Blocked here, SIGINT is blocked in the child from its first moment.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, env=importing_env(**env), stdin=subprocess.DEVNULL, pass_fds=fds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ends_with(parent_pid: int) -> Callable[[], None]:
    """What a child calls to have the kernel kill it when its parent ends (Linux; elsewhere it does nothing). It may be
    called between fork and exec, as ``preexec_fn``: it imports and looks up nothing."""
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it had already ended
            os._exit(0)

    return end_with_parent


def how_it_ended(code: int) -> str:
    """A ``Popen.returncode``, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def importing_env(**more: str) -> dict[str, str]:
    """This process's environment, with ``sys.path`` as PYTHONPATH, so that a child can import the same modules."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)} | more
