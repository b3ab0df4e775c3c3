"""Context recorded with every figure: versions, machine, time since process start, memory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minivllm.cores import usable_cores
from minivllm.version import __version__


def environment() -> dict[str, Any]:
    """Versions, time and machine. ``load_average``: of the last minute, as it was before."""
    return {
        "minivllm": __version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cpu_count": usable_cores(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
    }


def mark(record: dict[str, Any]) -> str:
    """The machine, versions, commit and day in one line, the caption of each chart.

    For a server (``url=``) only its address and model are known; machine and versions are the client's.
    """
    device = record.get("device", "cpu")
    machine = record.get("cpu", "") if device in ("cpu", "none") else device
    triton = f"triton {record['triton']}" if record.get("triton") else ""
    source = f"commit {record['commit']}" if record.get("commit") else "installed package"
    parts = [machine, f"minivllm {record.get('minivllm')}, {source}", f"torch {record.get('torch')}", triton]
    if record.get("url"):
        parts = [f"server {record['url']}, model {record.get('model')}", f"client: {machine}", parts[1]]
    return " · ".join(filter(None, [*parts, f"Python {record.get('python')}", str(record.get("date", ""))[:10]]))


def commit() -> str | None:
    """The commit of a source tree, with ``-dirty`` if tracked files differ from it; None for an installed package.

    ``MINIVLLM_COMMIT`` overrides it, for copies without a .git folder (an image, a remote machine).
    """
    if said := os.environ.get("MINIVLLM_COMMIT"):
        return said
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return head and head + ("-dirty" if changed else "")


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def process_seconds() -> float | None:
    """Seconds since this process was started, including the interpreter's startup; None if they are not known."""
    try:
        # Field 22 of proc(5), in clock ticks since boot; the name in field 2 may hold spaces and parentheses.
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return seconds if seconds > 0 else None


def peak_memory(device: str) -> dict[str, int | None]:
    """Bytes: the most that torch held on this process's GPU, and that the process held of the host's memory."""
    import resource

    import torch

    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    gpu = torch.cuda.max_memory_allocated() if device != "cpu" and torch.cuda.is_initialized() else 0
    return {"peak_gpu_bytes": gpu or None, "peak_host_bytes": host}


def append(path: Path, record: dict[str, Any]) -> None:
    """Append one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _git(root: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
