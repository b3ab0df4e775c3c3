"""Sums of very many rows over the GPUs of one machine, by their copy engines, beside products (NVLink peer access).

Rows are dealt out: each rank adds up its part of them. The others send it what they computed of its rows while they
compute on, and it sends them the sums while the product behind begins with rows that are there. A reduce-scatter and
an all-gather, so that 2 * (ranks - 1) / ranks of the bytes leave each rank, as in NCCL's ring; but copy engines need
no multiprocessor, which NCCL's programs would take from the product or wait for. 42 MB each way, half of 8,192 rows of
5,120, take 115 µs beside a product that they make 17 µs longer.

With the sums come the rows' factors, 1 / rms, of the norm that the product behind begins with.

Memory, of the same layout on each rank, which the others write to:
# stream (rows, width): each rank's part is written by that rank
# factors (rows,) float32: likewise
# inbox (ranks - 1, part rows, width): what the others, in their order, computed of this rank's part
# arrived (2, ranks) int32: the number (1 or 2, in turn) of the last call whose inbox, and whose part of the stream,
#   rank i has sent
On the rank alone:
# outbox, as inbox: what is being sent

Why nothing is overwritten too early. A call is ``begin``, ``send`` to each other rank, ``collect``, ``share``, then
``arrive`` from each; all ranks make the same ones.
1. The inbox: a rank sends for call n + 1 behind its ``arrive`` of call n, which waits for our ``share``, which stands
   behind our ``collect``, which read it.
2. The stream, and the factors: a rank shares in call n + 1 when it has collected what we sent for it; we sent that
   behind all that reads the rows of call n.
3. ``arrived``: by 1 and 2 a number is replaced when it has been seen, so it need only differ from the one before, and
   to be equal to it is enough. Calls come in pairs, as a layer has two sums: whatever is captured begins with a 1.
4. The outbox, and the part of the stream that is being shared: ``begin`` waits for our own copies.
A kernel that waits by itself (``arrival``) waits for as much as ``arrive`` from each. It may hold every multiprocessor
meanwhile: what it waits for are copies of memory on other GPUs, which engines do, and which were launched before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from minivllm.kernels._triton import cdiv, compiling
from minivllm.kernels.capture import captured
from minivllm.kernels.peer_copies import PeerCopies
from minivllm.kernels.peer_memory import take_peer_memory
from minivllm.kernels.rms_norm import add_rows_factors

MIN_PART = 1024  # rows on average: the host launches more than without, and takes as long for fewer rows
MIN_PART_CAPTURED = 512  # in a graph; products of fewer take longer a row
_TILE = 256  # rows of a part are a multiple of it, but of the last: a pair of tiles of ``persistent_linear``
_PARTIAL, _SUM = 0, 1  # rows of ``arrived``
_ALIGNED = 128  # bytes, of which each array in the memory starts at a multiple


@dataclass(frozen=True, slots=True)
class Arrival:
    """For a kernel that waits for the others' parts of the stream by itself instead of ``arrive``. It must wait for
    each of them; what is launched behind it need not."""

    arrived: torch.Tensor  # (ranks,) int32: the part of rank i is there once element i is ``number``
    number: int
    rank: int  # whose part is there
    part_rows: int  # of each part but the last


class PeerExchange:
    """One rank's end of sums of up to ``rows`` rows of ``width``. ``memory``: every rank's ``nbytes`` of uint8, zeros,
    as this rank's device reaches it."""

    def __init__(
        self, rank: int, memory: list[torch.Tensor], rows: int, width: int, dtype: torch.dtype, keep: Any = None
    ) -> None:
        self.rank, self.ranks, self.max_rows = rank, len(memory), rows
        self.device, self._keep = memory[rank].device, (memory, keep)  # what owns it
        self.others = [(rank + i) % self.ranks for i in range(1, self.ranks)]
        self.stream, self.factors, self.inbox, self._arrived = _views(memory[rank], self.ranks, rows, width, dtype)
        self._outbox = torch.empty_like(self.inbox)
        self._numbers = torch.arange(3, dtype=torch.int32, device=self.device)
        self._call, self._copies = 2, PeerCopies(self.device, self.others)
        self._line = width * dtype.itemsize
        self._slot = part_rows(rows, self.ranks) * self._line
        # from here to the same place in a peer's memory
        self._away = {peer: memory[peer].data_ptr() - memory[rank].data_ptr() for peer in self.others}

    @staticmethod
    def nbytes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
        """Of one rank's memory: of two ranks, 1.5 * rows * width elements, and an outbox of a third of that besides."""
        return sum(_sizes(ranks, rows, width, dtype))

    @classmethod
    def create(cls, group: Any, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> PeerExchange:
        """Take memory that the group's other ranks can reach; every rank of it calls this.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        memory = take_peer_memory(group, cls.nbytes(group.size(), rows, width, dtype), device)
        everywhere = [memory.of(rank) for rank in range(group.size())]
        return cls(memory.rank, everywhere, rows, width, dtype, keep=memory)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether to sum products of a step of x, (t, width), here."""
        fits = least_rows(self.ranks, captured(x)) <= x.shape[0] <= self.max_rows and x.dtype == self.stream.dtype
        return fits and x.device == self.device and not compiling()  # what is only compiled waits for nobody

    def parts(self, rows: int) -> list[slice]:
        """Each rank's rows of so many."""
        size = part_rows(rows, self.ranks)
        return [slice(min(i * size, rows), min((i + 1) * size, rows)) for i in range(self.ranks)]

    # ------------------------------------------------------------------ a call

    def begin(self) -> None:
        """A call; what was sent and shared in the last one may be written over by what is launched from now on."""
        self._call = 3 - self._call  # never 0, which stands there at the start
        self.settle()

    def outbox(self, peer: int, rows: int) -> torch.Tensor:
        """Where to write what this rank computes of the part of ``peer``, (rows, width)."""
        return self._outbox[peer - (peer > self.rank)][:rows]

    def send(self, peer: int, rows: int) -> None:
        """Send it."""
        inbox = self.inbox.data_ptr() + self._away[peer] + (self.rank - (self.rank > peer)) * self._slot
        outbox = self._outbox.data_ptr() + (peer - (peer > self.rank)) * self._slot
        self._copies.begin([peer])
        self._copies.copy(peer, inbox, outbox, rows * self._line)
        self._tell(peer, _PARTIAL)

    def collect(self, own: slice, eps: float) -> None:
        """Add to this rank's part of the stream, the rows ``own``, what the others sent of it, in their order. ``eps``:
        of the norm behind, for the factors."""
        for peer in self.others:
            self._wait(peer, _PARTIAL)
        add_rows_factors(self.stream[own], self.inbox, self.factors[own], eps)

    def share(self, own: slice) -> None:
        """Send them and their factors to all others; the call ends when theirs ``arrive``."""
        rows, stream, factors = own.stop - own.start, self.stream.data_ptr(), self.factors.data_ptr()
        stream, factors = stream + own.start * self._line, factors + own.start * 4
        self._copies.begin(self.others)
        for peer, away in self._away.items():
            self._copies.copy(peer, stream + away, stream, rows * self._line)
            self._copies.copy(peer, factors + away, factors, rows * 4)
            self._tell(peer, _SUM)

    def arrive(self, peer: int) -> None:
        """What is launched from now on finds the part of ``peer``, of the call that ended last, in the stream, and its
        factors."""
        self._wait(peer, _SUM)

    def arrival(self, rows: int) -> Arrival:
        """Of a stream of so many rows, of the call that ended last."""
        return Arrival(self._arrived[_SUM], self._call, self.rank, part_rows(rows, self.ranks))

    def settle(self) -> None:
        """What is launched from now on may write over what was sent and shared."""
        self._copies.settle()

    def all_reduce(self, x: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
        """A sum by itself: that over the ranks of x, (t, width); returned in ``stream``, with ``factors``."""
        for rows in (x, x[:0]):  # a pair of calls
            self._sum(rows, eps)
        self.settle()
        return self.stream[: x.shape[0]]

    def _sum(self, x: torch.Tensor, eps: float) -> None:
        parts = self.parts(x.shape[0])
        self.begin()
        for peer in self.others:
            theirs = x[parts[peer]]
            self.outbox(peer, len(theirs)).copy_(theirs)
            self.send(peer, len(theirs))
        own = parts[self.rank]
        self.stream[own].copy_(x[own])
        self.collect(own, eps)
        self.share(own)
        for peer in self.others:
            self.arrive(peer)

    def _tell(self, peer: int, what: int) -> None:
        """By a copy, which engines do in order: behind those before it."""
        told, number = self._told(self.rank, what) + self._away[peer], self._numbers.data_ptr() + self._call * 4
        self._copies.copy(peer, told, number, 4)

    def _wait(self, peer: int, what: int) -> None:
        self._copies.wait(self._told(peer, what), self._call)

    def _told(self, rank: int, what: int) -> int:
        """Where that rank leaves numbers, here."""
        return self._arrived.data_ptr() + (what * self.ranks + rank) * 4


def least_rows(ranks: int, captured: bool = False) -> int:
    """Of a step that is summed here."""
    return (MIN_PART_CAPTURED if captured else MIN_PART) * ranks


def part_rows(rows: int, ranks: int) -> int:
    """Of each rank but the last, which has what is left."""
    return cdiv(cdiv(rows, ranks), _TILE) * _TILE


class _Views(NamedTuple):
    stream: torch.Tensor
    factors: torch.Tensor
    inbox: torch.Tensor
    arrived: torch.Tensor


def _sizes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> list[int]:
    """Bytes of each of ``_Views``."""
    line = width * dtype.itemsize
    sizes = rows * line, rows * 4, (ranks - 1) * part_rows(rows, ranks) * line, 2 * ranks * 4
    return [cdiv(size, _ALIGNED) * _ALIGNED for size in sizes]


def _views(memory: torch.Tensor, ranks: int, rows: int, width: int, dtype: torch.dtype) -> _Views:
    """Of one rank's memory."""
    kinds = (dtype, (rows, width)), (torch.float32, (rows,)), (dtype, (ranks - 1, part_rows(rows, ranks), width))
    pieces = zip(memory.split(_sizes(ranks, rows, width, dtype)), (*kinds, (torch.int32, (2, ranks))), strict=True)
    return _Views(*(piece.view(kind)[: math.prod(shape)].view(shape) for piece, (kind, shape) in pieces))
