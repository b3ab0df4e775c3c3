"""How many CPU cores this process may use, for who starts threads or processes."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def usable_cores() -> int:
    """Those that the process may run on, or fewer, at least one, where it or a container around it has a quota
    (``docker run --cpus``, limits of Kubernetes)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota(own: Path, root: Path) -> float | None:
    """Cores, of the tightest ``cpu.max`` of a process's cgroup and of those around it (Linux, version 2)."""
    quotas = []
    with suppress(OSError, ValueError):
        within = next(line[3:].strip() for line in [*own.read_text().splitlines(), "0::/"] if line.startswith("0::"))
        group = root / within.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()
                quotas.append(int(quota) / int(period))  # "max": none
            if folder == root:
                break
    return min(quotas, default=None)
