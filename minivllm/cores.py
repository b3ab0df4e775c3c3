"""How many CPU cores this process may use, for who starts threads or processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    """Cores, of the tightest quota of a process's cgroup and of those around it (Linux)."""
    return min((granted for group in _groups(own, root) if (granted := _granted(group))), default=None)


def _groups(own: Path, root: Path) -> Iterator[Path]:
    """The folders of the groups that ``own`` names (``/proc/self/cgroup``), and of all around them. A container may
    show its own group as ``root``, and name it as its host does."""
    lines = ["0::/"]
    with suppress(OSError):
        lines = [*own.read_text().splitlines(), *lines]
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or "cpu" in controllers.split(","):  # version 2, and 1
            top = root / "cpu" if controllers else root
            group = top / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _granted(group: Path) -> float | None:
    """Its quota in cores. None: it has none."""
    with suppress(OSError, ValueError):  # version 2 says "max" where there is none, and 1 -1
        two = group / "cpu.max"
        quota, period = two.read_text().split() if two.exists() else _one(group)
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _one(group: Path) -> tuple[str, str]:
    return (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
