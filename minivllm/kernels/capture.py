"""Whether a launch becomes part of a CUDA graph, or rehearses one.

Some operations cannot be captured: other GPUs' parts counted by the host, library reductions that finish on their own
streams. The step before a capture must not use them either: it loads what the captured step needs, and the captured
step is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache

import torch

# Per thread: engines in other threads are independent.
_rehearsing, _loading = ContextVar("rehearsing", default=False), ContextVar("loading", default=False)


@contextmanager
def _true(*variables: ContextVar[bool]) -> Iterator[None]:
    before = [variable.set(True) for variable in variables]
    try:
        yield
    finally:
        for variable, token in zip(variables, before, strict=True):
            variable.reset(token)


def rehearsal() -> AbstractContextManager[None]:
    """Launches in this context behave as in a captured step."""
    return _true(_rehearsing)


def loading() -> AbstractContextManager[None]:
    """A rehearsal whose result is not used: it only loads kernels."""
    return _true(_rehearsing, _loading)


def only_loads() -> bool:
    """Whether layers that would launch the same kernels again may be skipped."""
    return _loading.get()


def captured(x: torch.Tensor) -> bool:
    """Whether a launch with ``x`` is captured or rehearsed."""
    return _rehearsing.get() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def side_by_side(device: torch.device, one: Callable[[], None], other: Callable[[], None]) -> None:
    """Launch both. Under capture, ``other`` becomes a branch of the graph: its kernels need not wait for those of
    ``one``, and start as these leave room."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        one()
        other()
        return
    here, branch = torch.cuda.current_stream(device), _branch(device)
    branch.wait_stream(here)
    with torch.cuda.stream(branch):
        other()
    one()
    here.wait_stream(branch)


@cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    """One for all: in a process one engine captures at a time."""
    return torch.cuda.Stream(device, priority=-1)  # its kernels go first where both have some waiting
