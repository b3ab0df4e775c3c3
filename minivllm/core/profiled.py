"""Torch's profiler around some steps, in the process that runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def profiled(file: Path) -> Iterator[None]:
    """While the context is open, trace this process; on exit torch's Chrome trace is written to ``file`` atomically."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_initialized()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    growing = file.with_name(f"{file.name}.part")
    profiler.export_chrome_trace(str(growing))
    os.replace(growing, file)
