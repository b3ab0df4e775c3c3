"""LoRA adapters of single requests: what linear layers add to their outputs in rows whose request has one.

An engine has a fixed number of places, 1 to ``max_loras``, each for one adapter of up to ``max_lora_rank``; captured
steps read their tensors where they are. Per linear layer, of which a stacked one (q, k, v; gate, up) has several parts:
# a (places, parts * rank, in)   b (places, out, parts * rank), zero where a column belongs to another part
Of several ranks each has the slices that its slice of the weight needs. A row-parallel layer's ``a`` then gives partial
sums, and so does ``b`` of them: both are summed with the product's.
"""

from __future__ import annotations

import torch
from torch import nn

from minivllm.core.adapter_rows import AdapterRows
from minivllm.kernels.linear.adapter_linear import expand, shrink
from minivllm.layers.parameter import Piece, ShardId, pieces_of


class LinearAdapters:
    """Those of one linear layer, whose weight (out, in) is made up of pieces (``layers/parameter.py``)."""

    def __init__(self, weight: nn.Parameter, rows: AdapterRows, places: int, rank: int, dtype: torch.dtype) -> None:
        self._rows, self._rank = rows, rank
        self._pieces: dict[ShardId, Piece] = pieces_of(weight)
        (out, inner), width = weight.shape, len(self._pieces) * rank
        self._a = torch.zeros((places, width, inner), dtype=dtype, device=weight.device)
        self._b = torch.zeros((places, out, width), dtype=dtype, device=weight.device)

    @staticmethod
    def nbytes(weight: nn.Parameter, places: int, rank: int, dtype: torch.dtype) -> int:
        """What they take."""
        return places * len(pieces_of(weight)) * rank * sum(weight.shape) * dtype.itemsize

    @property
    def active(self) -> bool:
        return self._rows.order is not None

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in), as the ranks of its rows' adapters: what ``expand`` needs. Best launched before the product."""
        assert self._rows.order is not None
        return shrink(x.flatten(0, -2), self._a, self._rows.order)

    def expand(self, y: torch.Tensor, shrunk: torch.Tensor) -> None:
        """Add to y (…, out), in place, what the adapters make of what was ``shrink``'s x."""
        assert self._rows.order is not None
        expand(y.view(-1, y.shape[-1]), shrunk, self._b, self._rows.order)

    def clear(self, place: int) -> None:
        """Nothing is added for the adapter in this place any more."""
        self._a[place - 1].zero_()
        self._b[place - 1].zero_()

    def load(
        self, place: int, shard_id: ShardId, a: torch.Tensor, b: torch.Tensor, norm: torch.Tensor | None = None
    ) -> None:
        """What the adapter in a place, cleared before, has for a checkpoint's tensor W (whole out, whole in): a (r,
        whole in) and b (whole out, r), by any factor; r is at most the rank. ``norm`` (whole in,): the weight of the
        norm before that is folded into W, by which x is no longer multiplied."""
        if shard_id not in self._pieces:  # all parts in one tensor
            for part, its in zip(self._pieces, b.split([p.shape[0] for p in self._pieces.values()]), strict=True):
                self.load(place, part, a, its, norm)
            return
        piece, rank, device = self._pieces[shard_id], len(a), self._a.device
        first = list(self._pieces).index(shard_id) * self._rank
        a, b = a.to(device), b.to(device)
        if norm is not None:
            a = a * norm
        if piece.dim == 1:  # its input is sharded
            a, rows = a.narrow(1, piece.start, piece.length), slice(None)
        else:
            b, rows = b.narrow(0, piece.start, piece.length), slice(piece.offset, piece.offset + piece.length)
        self._a[place - 1, first : first + rank] = a
        self._b[place - 1, rows, first : first + rank] = b
