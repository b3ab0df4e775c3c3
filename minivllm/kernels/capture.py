"""Whether what is launched now becomes part of a CUDA graph, or stands for what does.

Some ways of doing a thing cannot be captured: other GPUs' parts counted by the host, sums that libraries finish on
streams of their own. The step before a capture must not take them either: it loads what the captured step needs, and
is what that is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache

import torch

# Of a thread: engines in others go their own ways.
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
    """What is launched within goes the ways of a captured step."""
    return _true(_rehearsing)


def loading() -> AbstractContextManager[None]:
    """A rehearsal whose result nobody reads: all that it is for is what it loads."""
    return _true(_rehearsing, _loading)


def only_loads() -> bool:
    """Whether layers that launch what others have launched may be left out."""
    return _loading.get()


def captured(x: torch.Tensor) -> bool:
    """Whether what is launched with ``x`` now is captured, or rehearsed."""
    return _rehearsing.get() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def side_by_side(device: torch.device, one: Callable[[], None], other: Callable[[], None]) -> None:
    """Launch both. Captured, ``other`` on a branch of the graph: its kernels need not wait for those of ``one``, and
    find room as these end."""
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
    """One for all: of a process's engines, one captures at a time."""
    return torch.cuda.Stream(device, priority=-1)  # its kernels go first where both have some that wait
