"""Tensor parallelism: which part of each layer this rank holds, and the collectives between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from minivllm.kernels.collectives.all_reduce import PeerAllReduce
    from minivllm.kernels.collectives.exchange import PeerExchange
    from minivllm.kernels.collectives.peer_words import PeerWords


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A handle that every layer is built with; with ``size == 1`` nothing is communicated.

    ``group`` is a ``torch.distributed`` process group, or None on one rank. ``peer`` all-reduces small tensors
    (``takes``) faster than the group (``all_reduce.py`` in ``kernels/collectives/``); ``exchange`` large ones,
    overlapped with GEMMs (``exchange.py``); ``words`` are for a kernel of all layers (``peer_words.py``).
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
        """Add the sum of ``x`` over the ranks to ``residual``, in place; returns it. ``x`` must not be read again."""
        if self.peer is not None and self.peer.takes(x) and self.peer.takes(residual):
            return self.peer.add_to(residual, x)
        return residual.add_(self.all_reduce(x))

    def start_all_reduce(self, x: torch.Tensor) -> Any:
        """Start to sum ``x`` over the ranks, in place, concurrently with this stream's next work; ``wait()`` on the
        result makes the stream wait for it."""
        import torch.distributed as dist

        return dist.all_reduce(x, group=self.group, async_op=True)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate all ranks' ``x``, (n, columns), along the last dimension. All ranks get the same bytes."""
        if self.size == 1:
            return x
        import torch.distributed as dist

        n, columns = x.shape
        parts = x.new_empty((self.size * n, columns))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        gather(parts, x.contiguous(), group=self.group)
        return parts.view(self.size, n, columns).transpose(0, 1).reshape(n, self.size * columns)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's ``x`` to all ranks, in place; returns ``x``."""
        if self.size > 1:
            import torch.distributed as dist

            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def minimum(self, number: int, device: torch.device) -> int:
        """The minimum of ``number`` over the ranks; waits for the device."""
        if self.size == 1:
            return number
        import torch
        import torch.distributed as dist

        least = torch.tensor(number, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)
