"""Where the ranks' kernels of all layers (``megakernel.py``) leave each other their parts of a sum, in each other's
memory: words of a float32 and a flag, as within one GPU. A thread of a program sends what it has of one element of the
stream to the thread of its number on every other rank, and waits for theirs: one way over NVLink, no barrier.

Memory, of the same layout on each rank, zeros at the start:
# words, of kernels for 1, 2, 4 and 8 rows one behind the other: (2, ranks, rows, width) int64; what each rank has sent,
# behind attention and behind the MLP
On the rank alone:
# layers (1,) int32: how many so far, in all launches. All ranks make the same ones, so a flag, the layer's number, is
# of one layer alone

Why two buffers are enough. A thread sends behind attention what its peer reads there, after what it got from behind the
MLP of the layer before: that, the peer had sent when it had read what stood there. The other way round it is the same,
also from one launch to the next; kernels for other rows have other words.
"""

from __future__ import annotations

from typing import Any

import torch

from minivllm.kernels.peer_memory import take_peer_memory

MOST_ROWS = 8
_ROWS = 2 * MOST_ROWS - 1  # of all kernels together


class PeerWords:
    """One rank's end. ``memory``: every rank's address of ``nbytes`` of zeros, as this rank's device reaches it."""

    def __init__(self, rank: int, memory: list[int], device: torch.device, keep: Any = None) -> None:
        self.rank, self.ranks = rank, len(memory)
        self.addresses = torch.tensor(memory, dtype=torch.int64).to(device)
        self.layers = torch.zeros(1, dtype=torch.int32, device=device)
        self._keep = keep  # what owns the memory

    @staticmethod
    def nbytes(ranks: int, width: int) -> int:
        """Of one rank's memory: 2.5 MB for two ranks of width 5,120."""
        return 8 * 2 * ranks * _ROWS * width

    @classmethod
    def create(cls, group: Any, width: int, device: torch.device) -> PeerWords:
        """Take memory that the group's other ranks can reach; every rank of it calls this.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        memory = take_peer_memory(group, cls.nbytes(group.size(), width), device)
        return cls(memory.rank, memory.addresses, device, keep=memory)
