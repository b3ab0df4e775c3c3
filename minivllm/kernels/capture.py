"""Whether what is launched now becomes part of a CUDA graph, or stands for what does.

Some ways of doing a thing cannot be captured: other GPUs' parts counted by the host, sums that libraries finish on
streams of their own. The step before a capture must not take them either: it loads what the captured step needs, and
is what that is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_rehearsals = 0  # under way; of the one thread that launches


@contextmanager
def rehearsal() -> Iterator[None]:
    """What is launched here goes the ways of a captured step."""
    global _rehearsals
    _rehearsals += 1
    try:
        yield
    finally:
        _rehearsals -= 1


def captured(x: torch.Tensor) -> bool:
    """Whether what is launched with ``x`` now is captured, or rehearsed."""
    return _rehearsals > 0 or (x.is_cuda and torch.cuda.is_current_stream_capturing())
