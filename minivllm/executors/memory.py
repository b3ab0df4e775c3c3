"""The part of a GPU's memory that a rank may use: ``cache.gpu_memory_utilization`` of all that the GPU has, as in vLLM,
for weights, cache and what a step needs. Other processes and other engines of this process do not count as the rank's.
"""

from __future__ import annotations

import torch

_SPARE = 0.02  # of all memory, which stays free if others have so much that a rank cannot get its part


class MemoryShare:
    """Make it before the rank allocates anything."""

    def __init__(self, device: torch.device, fraction: float) -> None:
        self._device, self._fraction = device, fraction
        self._free_at_first = self._free()[0]

    def left(self) -> float:
        """Bytes that the rank may still allocate; negative if it has taken more than its part."""
        free, everything = self._free()
        taken = max(self._free_at_first - free, 0)
        return min(self._fraction * everything - taken, free - _SPARE * everything)

    def _free(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)
