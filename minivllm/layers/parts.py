"""The residual stream of a large step on several ranks, each of which adds up a part of its rows
(``kernels/exchange.py``): what the others add up arrives while a product begins with what is there. Which layers go so,
``Decoder`` decides; one step's stream lives here, and nothing behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from minivllm.kernels.exchange import Arrival, PeerExchange
from minivllm.layers.linear import RowParallelLinear
from minivllm.layers.plain import is_plain


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank adds up."""

    rank: int
    rows: slice


class PartedStream:
    """x (t, hidden): read by ``arriving``, part by part, by a product that waits for parts (``hand_over``), or
    ``whole``. It is x no longer, but a copy of it."""

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
        """Each part with its rows, for what is launched from then on: this rank's own, then those that the device
        waits for, which the host does not."""
        exchange = self._exchange
        for rank in (exchange.rank, *exchange.others):
            if self._under_way and rank != exchange.rank:
                exchange.arrive(rank)
            yield self.parts[rank], self._x[self.parts[rank].rows]
        self._under_way = False

    def whole(self) -> torch.Tensor:
        for _ in self.arriving():
            pass
        self._exchange.settle()  # who gets it may write to it
        return self._x

    def hand_over(self, eps: float) -> tuple[torch.Tensor, torch.Tensor, Arrival]:
        """What is under way to one product, which is launched next and waits for it itself: x, its rows' factors (t,)
        float32 of a norm with ``eps``, as the last ``add`` was told, and what to wait for. Behind it all parts have
        arrived."""
        assert self._under_way and eps == self._eps
        exchange, rows = self._exchange, self.shape[0]
        for rank in exchange.others:
            part = self.parts[rank].rows
            if part.start == part.stop:  # the product has no use for it, and so waits for nothing
                exchange.arrive(rank)
        self._under_way = False
        return self._x, exchange.factors[:rows], exchange.arrival(rows)

    def add(self, product: RowParallelLinear, ys: Sequence[torch.Tensor], eps: float) -> None:
        """Begin to add ``product`` of each part's y (rows, in / tp). All parts must have arrived. ``eps``: of the norm
        behind the sum."""
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


def adds_parts(product: nn.Module) -> bool:
    """Whether ``PartedStream.add`` may stand for the product's ``add_to``."""
    if not is_plain(product, RowParallelLinear):
        return False
    return type(product).add_to is RowParallelLinear.add_to and product.bias is None
