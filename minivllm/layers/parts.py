"""The residual stream of a large step on several ranks, each of which sums a part of its rows
(``kernels/collectives/exchange.py``): the other ranks' parts arrive while a matmul starts on those already there.
``Decoder`` decides which layers run this way; the state here lasts one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from minivllm.kernels.collectives.exchange import Arrival, PeerExchange
from minivllm.layers.linear import RowParallelLinear


@dataclass(frozen=True, slots=True)
class Part:
    """The rows that one rank sums."""

    rank: int
    rows: slice


class PartedStream:
    """The residual stream, a copy of x (t, hidden): read part by part (``arriving``), by a matmul that waits for the
    parts itself (``hand_over``), or ``whole``."""

    def __init__(self, exchange: PeerExchange, x: torch.Tensor) -> None:
        self.parts = [Part(rank, rows) for rank, rows in enumerate(exchange.parts(x.shape[0]))]
        self._exchange, self._under_way, self._eps = exchange, False, 0.0
        self._x = exchange.stream[: x.shape[0]]
        exchange.settle()
        self._x.copy_(x)

    @property
    def under_way(self) -> bool:
        return self._under_way

    @property
    def shape(self) -> torch.Size:
        return self._x.shape

    def arriving(self) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each part with its rows, ready for kernels launched from then on: this rank's first, then the others', for
        which the device waits but not the host."""
        exchange = self._exchange
        for rank in (exchange.rank, *exchange.others):
            if self._under_way and rank != exchange.rank:
                exchange.arrive(rank)
            yield self.parts[rank], self._x[self.parts[rank].rows]
        self._under_way = False

    def whole(self) -> torch.Tensor:
        for _ in self.arriving():
            pass
        self._exchange.settle()  # the caller may write to it
        return self._x

    def hand_over(self, eps: float) -> tuple[torch.Tensor, torch.Tensor, Arrival]:
        """Hand parts in flight to one matmul, which must be launched next and waits for them itself: x, its rows' norm
        factors (t,) float32 (``eps`` must be that of the last ``add``), and what to wait for. After that matmul all
        parts have arrived."""
        assert self._under_way and eps == self._eps
        exchange, rows = self._exchange, self.shape[0]
        for rank in exchange.others:
            part = self.parts[rank].rows
            if part.start == part.stop:  # the matmul reads no row of it, so it would not wait
                exchange.arrive(rank)
        self._under_way = False
        return self._x, exchange.factors[:rows], exchange.arrival(rows)

    def add(self, product: RowParallelLinear, ys: Sequence[torch.Tensor], eps: float) -> None:
        """Start adding ``product`` of each part's y (rows, in / tp). All parts must have arrived. ``eps``: of the norm
        that follows."""
        assert not self._under_way
        exchange = self._exchange
        exchange.begin()
        for rank in exchange.others:
            y = ys[rank]
            product.write(exchange.outbox(rank, len(y)), y)
            exchange.send(rank, len(y))
        mine = self.parts[exchange.rank].rows
        product.add_own(self._x[mine], ys[exchange.rank])
        exchange.collect(mine, eps)
        exchange.share(mine)
        self._under_way, self._eps = True, eps
