"""Which part of each layer this rank holds, and how ranks add up their parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from minivllm.kernels.all_reduce import PeerAllReduce
    from minivllm.kernels.exchange import PeerExchange
    from minivllm.kernels.peer_words import PeerWords


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A handle that every layer is built with; ``size == 1`` communicates nothing.

    ``group`` is a ``torch.distributed`` process group, or None on one rank. ``peer`` sums what is small enough for it
    (``takes``) faster than the group does (``kernels/all_reduce.py``); ``exchange`` what is so large that products go
    on beside it (``kernels/exchange.py``); ``words`` are for a kernel of all layers (``kernels/peer_words.py``).
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    peer: PeerAllReduce | None = None
    exchange: PeerExchange | None = None
    words: PeerWords | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the ranks, in place; returns ``x``. All ranks get the same bytes."""
        if self.size > 1:
            if self.peer is not None and self.peer.takes(x):
                return self.peer(x)
            import torch.distributed as dist

            dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the sum of ``x`` over the ranks to ``residual``, in place; returns it. ``x`` is not to be read again."""
        if self.peer is not None and self.peer.takes(x) and self.peer.takes(residual):
            return self.peer.add_to(residual, x)
        return residual.add_(self.all_reduce(x))

    def start_all_reduce(self, x: torch.Tensor) -> Any:
        """Begin to sum ``x`` over the ranks, in place, beside what this stream does next; ``wait`` of what it returns
        makes the stream wait for it."""
        import torch.distributed as dist

        return dist.all_reduce(x, group=self.group, async_op=True)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's ``x``, (n, columns), along the last dimension. All ranks get the same bytes."""
        if self.size == 1:
            return x
        import torch.distributed as dist

        n, columns = x.shape
        parts = x.new_empty((self.size * n, columns))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        gather(parts, x.contiguous(), group=self.group)
        return parts.view(self.size, n, columns).transpose(0, 1).reshape(n, self.size * columns)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``x`` on all ranks, in place; returns ``x``."""
        if self.size > 1:
            import torch.distributed as dist

            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def minimum(self, number: int, device: torch.device) -> int:
        """The smallest ``number`` that any rank has; waits for the device."""
        if self.size == 1:
            return number
        import torch
        import torch.distributed as dist

        least = torch.tensor(number, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)
