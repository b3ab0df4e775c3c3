"""The memory through which the ranks' megakernels (``megakernel.py``) all-reduce: words of a float32 and a flag, as
within one GPU. Each thread sends its partial sum of one element of the stream to the same thread on every other rank,
and waits for theirs: one trip over NVLink, no barrier.

Memory, with the same layout on each rank, initially zero:
# words: (2, ranks, rows, width) int64 for each of the kernels for 1, 2, 4 and 8 rows, one after another: what each rank
#   has sent after attention and after the MLP
On the rank alone:
# layers (1,) int32: layers computed so far, in all launches, which are the same on all ranks: a word's flag is the
#   layer's number

Why two buffers suffice. When a thread sends its sum after attention, it has received the peer's sum after the previous
layer's MLP, and the peer sent that only after it had read the previous contents of the attention buffer. The same holds
with the two exchanged, and from one launch to the next; kernels for other rows have other words.
"""

from __future__ import annotations

from typing import Any

import torch

from minivllm.kernels.collectives.peer_memory import take_peer_memory

MOST_ROWS = 8
_ROWS = 2 * MOST_ROWS - 1  # of all kernels together


class PeerWords:
    """One rank's end. ``memory``: each rank's address of ``nbytes`` of zeros, as seen from this rank's device."""

    def __init__(self, rank: int, memory: list[int], device: torch.device, keep: Any = None) -> None:
        self.rank, self.ranks = rank, len(memory)
        self.addresses = torch.tensor(memory, dtype=torch.int64).to(device)
        self.layers = torch.zeros(1, dtype=torch.int32, device=device)
        self._keep = keep  # owns the memory

    @staticmethod
    def nbytes(ranks: int, width: int) -> int:
        """Of one rank's memory: 2.5 MB for two ranks of width 5,120."""
        return 8 * 2 * ranks * _ROWS * width

    @classmethod
    def create(cls, group: Any, width: int, device: torch.device) -> PeerWords:
        """Allocate memory that the group's other ranks can reach; all of them must call this.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        memory = take_peer_memory(group, cls.nbytes(group.size(), width), device)
        return cls(memory.rank, memory.addresses, device, keep=memory)
