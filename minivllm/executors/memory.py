"""The part of a GPU's memory that a rank may use: ``cache.gpu_memory_utilization`` of all that the GPU has, as in vLLM,
for weights, cache and what a step needs. What other processes and other engines of this one have does not count.
"""

from __future__ import annotations

import torch

_SPARE = 0.02  # of all memory, which stays free if others have so much that a rank cannot get its part


class MemoryShare:
    """Make it before the rank allocates anything. Counted is what torch allocates, not CUDA's own half a gigabyte, so
    that engines in several processes may start at the same time."""

    def __init__(self, device: torch.device, fraction: float) -> None:
        self._device, self._fraction = device, fraction
        self.beside = 0  # bytes that the rank has of CUDA itself, not of torch
        self._before = self._allocated()

    def left(self) -> float:
        """Bytes that the rank may still allocate; negative if it has taken more than its part."""
        taken = max(self._allocated() - self._before, 0) + self.beside
        free, everything = torch.cuda.mem_get_info(self._device)
        return min(self._fraction * everything - taken, free - _SPARE * everything)

    def _allocated(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)
