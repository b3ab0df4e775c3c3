"""A stand-in for CUDA graphs, for steps on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Recorded:
    """Replays by running the step again; like a capture, making one runs nothing. ``result``: tensors that a replay
    writes to, and what is the same in each; ``say`` is called at each."""

    def __init__(self, run: Callable[[], Iterable[Any]], result: Iterable[Any], say: Callable[[], object]) -> None:
        self.run, self.result, self.say = run, result, say

    def replay(self) -> None:
        self.say()
        for kept, its in zip(self.result, self.run(), strict=True):
            if isinstance(kept, torch.Tensor):
                kept.copy_(its)
            elif kept is not None:
                assert str(kept) == str(its)
