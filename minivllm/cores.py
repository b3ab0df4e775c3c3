"""How many CPU cores this process may use, to decide how many threads or processes to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def usable_cores() -> int:
    """The cores that this process may run on; fewer, but at least one, if its cgroup has a CPU quota (``docker run
    --cpus``, Kubernetes' limits)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota(own: Path, root: Path) -> float | None:
    """The tightest quota of a process's cgroup and its ancestors, in cores (Linux); None: there is no quota."""
    return min((granted for group in _groups(own, root) if (granted := _granted(group))), default=None)


def _groups(own: Path, root: Path) -> Iterator[Path]:
    """The folders of the cgroups named in ``own`` (``/proc/self/cgroup``), and of their ancestors. In a container the
    process's own cgroup may be mounted as ``root``, although ``own`` has its name on the host."""
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
    """A cgroup's quota in cores; None: it has none."""
    with suppress(OSError, ValueError):  # without a quota, version 2 has "max", and version 1 has -1
        both = group / "cpu.max"
        quota, period = both.read_text().split() if both.exists() else _quota_of_version_1(group)
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _quota_of_version_1(group: Path) -> tuple[str, str]:
    return (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
