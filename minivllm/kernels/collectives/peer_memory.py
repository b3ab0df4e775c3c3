"""Memory of each GPU of a group that the others' kernels can access (NVLink, torch's symmetric memory)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's memory, and the others' addresses; keep this object while the memory is in use."""

    rank: int
    mine: torch.Tensor  # (nbytes,) uint8
    addresses: list[int]  # each rank's, as seen from this rank's device
    handle: Any

    def of(self, rank: int) -> torch.Tensor:
        """(nbytes,) uint8: that rank's memory."""
        theirs: torch.Tensor = self.handle.get_buffer(rank, (len(self.mine),), torch.uint8)
        return theirs


def take_peer_memory(
    group: Any, nbytes: int, device: torch.device, clear: Callable[[torch.Tensor], Any] = torch.Tensor.zero_
) -> PeerMemory:
    """Allocate ``nbytes`` on each rank; all ranks of the group call this, and find everyone's prepared by ``clear``.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import _SymmetricMemory  # its Python wrapper imports sympy, 2 s without bytecode

    mine = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    clear(mine)
    handle = _SymmetricMemory.rendezvous(mine, group.group_name)
    torch.cuda.synchronize(device)
    dist.barrier(group, device_ids=[device.index])  # all cleared before anyone's first word
    offset = mine.data_ptr() - int(handle.buffer_ptrs[handle.rank])  # within its allocation, the same on all ranks
    return PeerMemory(handle.rank, mine, [int(base) + offset for base in handle.buffer_ptrs], handle)
