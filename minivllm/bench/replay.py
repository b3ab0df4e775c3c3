"""Times kernels by replaying a CUDA graph, without the host's part; ``measure.py`` times whole engines."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def need_gpu(count: int = 1, way_out: str = "run it on a machine that has one") -> None:
    """Exit if there are fewer GPUs."""
    if (seen := torch.cuda.device_count()) < count:
        sys.exit(f"this times kernels on {count} GPU{'s' * (count > 1)}, and torch sees {seen or 'none'}; {way_out}")


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture what ``run`` launches as a graph, after running it once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # kernels share buffers that two streams must not use at once
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog may query the device meanwhile
        run()
    return graph


def median_seconds(step: Callable[[], object], repeats: int) -> float:
    """The median device time of ``repeats`` calls, after three warm-up calls."""
    times = []
    for _ in range(repeats + 3):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        step()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return sorted(times[3:])[repeats // 2]


def replay_seconds(run: Callable[[], object]) -> float:
    """The median device time of seven replays of what ``run`` launches."""
    return median_seconds(captured(run).replay, 7)
