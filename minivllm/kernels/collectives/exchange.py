"""All-reduce of very many rows over the GPUs of one machine by copy engines, overlapped with products (NVLink).

Rows are divided: each rank sums its part. The others send it their partial sums of these rows while they compute on,
and it sends back the sums while the next product starts with rows that are there. A reduce-scatter and an all-gather,
so each rank sends 2 * (ranks - 1) / ranks of the bytes, as in NCCL's ring; but copy engines need no SMs, which NCCL
would take from the product or wait for. 42 MB each way, half of 8,192 rows of 5,120, take 115 µs and slow the
overlapped product by 17 µs.

The sums come with the rows' factors, 1 / rms, for the norm that the next product starts with.

Memory that the others write to, with the same layout on each rank:
# stream (rows, width): each rank's part is written by that rank
# factors (rows,) float32: likewise
# inbox (ranks - 1, part rows, width): the other ranks' partial sums of this rank's part, in rank order
# arrived (2, ranks) int32: number (1 or 2, in turn) of the last call for which rank i has sent its partial sums, and
#   its part of the stream
On the rank alone:
# outbox, as inbox: what is being sent

Why nothing is overwritten too early. A call is ``begin``, ``send`` to each other rank, ``collect``, ``share``, then
``arrive`` from each; all ranks make the same ones.
1. The inbox: a rank sends for call n + 1 after its ``arrive`` of call n, which waits for our ``share``, which comes
   after our ``collect``, which read the inbox.
2. The stream and the factors: a rank shares in call n + 1 after it has collected what we sent for it; we sent that
   after everything that reads the rows of call n.
3. ``arrived``: by 1 and 2 a number is replaced only after it has been seen, so it need only differ from the one before,
   and testing for equality is enough. Calls come in pairs, as a layer has two sums: every capture begins with a 1.
4. The outbox, and the part of the stream that is being shared: ``begin`` waits for our own copies.
A kernel that waits by itself (``arrival``) waits for the same as ``arrive`` from each. It may hold every SM meanwhile:
it waits for copies from other GPUs, which were launched before it and are done by copy engines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from minivllm.kernels._triton import compiling
from minivllm.kernels.capture import captured
from minivllm.kernels.collectives.peer_copies import PeerCopies
from minivllm.kernels.collectives.peer_memory import take_peer_memory
from minivllm.kernels.rms_norm import add_rows_factors
from minivllm.rounding import cdiv

MIN_PART = 1024  # rows on average: the host launches more than without this, in a time that does not depend on rows
MIN_PART_CAPTURED = 512  # in a graph; products of fewer rows take longer per row
_TILE = 256  # parts but the last are a multiple of this many rows: a pair of tiles of ``persistent_linear``
_PARTIAL, _SUM = 0, 1  # rows of ``arrived``
_ALIGNED = 128  # alignment in bytes of each array in the memory


@dataclass(frozen=True, slots=True)
class Arrival:
    """For a kernel that waits for the others' parts of the stream itself, instead of ``arrive``. It must wait for each
    of them; kernels launched after it need not."""

    arrived: torch.Tensor  # (ranks,) int32: rank i's part is there once element i equals ``number``
    number: int
    rank: int  # its part is already there
    part_rows: int  # in each part but the last


class PeerExchange:
    """One rank's end of sums of up to ``rows`` rows of ``width``. ``memory``: each rank's ``nbytes`` of uint8, zeros,
    as seen from this rank's device."""

    def __init__(
        self, rank: int, memory: list[torch.Tensor], rows: int, width: int, dtype: torch.dtype, keep: Any = None
    ) -> None:
        self.rank, self.ranks, self.max_rows = rank, len(memory), rows
        self.device, self._keep = memory[rank].device, (memory, keep)  # owns the memory
        self.others = [(rank + i) % self.ranks for i in range(1, self.ranks)]
        self.stream, self.factors, self.inbox, self._arrived = _views(memory[rank], self.ranks, rows, width, dtype)
        self._outbox = torch.empty_like(self.inbox)
        self._numbers = torch.arange(3, dtype=torch.int32, device=self.device)
        self._call, self._copies = 2, PeerCopies(self.device, self.others)
        self._line = width * dtype.itemsize
        self._slot = part_rows(rows, self.ranks) * self._line
        # offset from an address here to the same place in a peer's memory
        self._away = {peer: memory[peer].data_ptr() - memory[rank].data_ptr() for peer in self.others}

    @staticmethod
    def nbytes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
        """Of one rank's memory: for two ranks 1.5 * rows * width elements; the outbox takes another third of that."""
        return sum(_sizes(ranks, rows, width, dtype))

    @classmethod
    def create(cls, group: Any, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> PeerExchange:
        """Allocate memory that the group's other ranks can reach; all of them must call this.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        memory = take_peer_memory(group, cls.nbytes(group.size(), rows, width, dtype), device)
        everywhere = [memory.of(rank) for rank in range(group.size())]
        return cls(memory.rank, everywhere, rows, width, dtype, keep=memory)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether to use this for sums in a step of x, (t, width)."""
        fits = least_rows(self.ranks, captured(x)) <= x.shape[0] <= self.max_rows and x.dtype == self.stream.dtype
        return fits and x.device == self.device and not compiling()  # compiling alone must wait for nobody

    def parts(self, rows: int) -> list[slice]:
        """Each rank's slice of the rows."""
        size = part_rows(rows, self.ranks)
        return [slice(min(i * size, rows), min((i + 1) * size, rows)) for i in range(self.ranks)]

    # ------------------------------------------------------------------ a call

    def begin(self) -> None:
        """Begin a call. What is launched from now on may overwrite what the last one sent and shared."""
        self._call = 3 - self._call  # never 0, the initial value
        self.settle()

    def outbox(self, peer: int, rows: int) -> torch.Tensor:
        """Where to write this rank's partial sums of the part of ``peer``, (rows, width)."""
        return self._outbox[peer - (peer > self.rank)][:rows]

    def send(self, peer: int, rows: int) -> None:
        """Send the outbox of ``peer``."""
        inbox = self.inbox.data_ptr() + self._away[peer] + (self.rank - (self.rank > peer)) * self._slot
        outbox = self._outbox.data_ptr() + (peer - (peer > self.rank)) * self._slot
        self._copies.begin([peer])
        self._copies.copy(peer, inbox, outbox, rows * self._line)
        self._signal(peer, _PARTIAL)

    def collect(self, own: slice, eps: float) -> None:
        """Add what the others sent to this rank's part of the stream, the rows ``own``, in rank order. ``eps``: of the
        next norm, for the factors."""
        for peer in self.others:
            self._wait(peer, _PARTIAL)
        add_rows_factors(self.stream[own], self.inbox, self.factors[own], eps)

    def share(self, own: slice) -> None:
        """Send this part and its factors to all others; the call ends when theirs ``arrive``."""
        rows, stream, factors = own.stop - own.start, self.stream.data_ptr(), self.factors.data_ptr()
        stream, factors = stream + own.start * self._line, factors + own.start * 4
        self._copies.begin(self.others)
        for peer, away in self._away.items():
            self._copies.copy(peer, stream + away, stream, rows * self._line)
            self._copies.copy(peer, factors + away, factors, rows * 4)
            self._signal(peer, _SUM)

    def arrive(self, peer: int) -> None:
        """Make what is launched from now on wait for the part of ``peer`` in the stream, and its factors, of the call
        that ended last."""
        self._wait(peer, _SUM)

    def arrival(self, rows: int) -> Arrival:
        """For a stream of so many rows, of the call that ended last."""
        return Arrival(self._arrived[_SUM], self._call, self.rank, part_rows(rows, self.ranks))

    def settle(self) -> None:
        """What is launched from now on may overwrite what was sent and shared."""
        self._copies.settle()

    def all_reduce(self, x: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
        """A single sum: of x, (t, width), over the ranks; returned in ``stream``, with ``factors``."""
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

    def _signal(self, peer: int, what: int) -> None:
        """Set the flag at the peer: by a copy, because copies to a peer are done in order."""
        flag, number = self._flag(self.rank, what) + self._away[peer], self._numbers.data_ptr() + self._call * 4
        self._copies.copy(peer, flag, number, 4)

    def _wait(self, peer: int, what: int) -> None:
        self._copies.wait(self._flag(peer, what), self._call)

    def _flag(self, rank: int, what: int) -> int:
        """The address of the flag here that the rank sets: to the number of the call."""
        return self._arrived.data_ptr() + (what * self.ranks + rank) * 4


def least_rows(ranks: int, captured: bool = False) -> int:
    """The fewest rows of a step for which this is used."""
    return (MIN_PART_CAPTURED if captured else MIN_PART) * ranks


def part_rows(rows: int, ranks: int) -> int:
    """In each rank's part but the last, which has the rest."""
    return cdiv(cdiv(rows, ranks), _TILE) * _TILE


class _Views(NamedTuple):
    stream: torch.Tensor
    factors: torch.Tensor
    inbox: torch.Tensor
    arrived: torch.Tensor


def _sizes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> list[int]:
    """Bytes of each array in ``_Views``."""
    line = width * dtype.itemsize
    sizes = rows * line, rows * 4, (ranks - 1) * part_rows(rows, ranks) * line, 2 * ranks * 4
    return [cdiv(size, _ALIGNED) * _ALIGNED for size in sizes]


def _views(memory: torch.Tensor, ranks: int, rows: int, width: int, dtype: torch.dtype) -> _Views:
    """The arrays in one rank's memory."""
    kinds = (dtype, (rows, width)), (torch.float32, (rows,)), (dtype, (ranks - 1, part_rows(rows, ranks), width))
    pieces = zip(memory.split(_sizes(ranks, rows, width, dtype)), (*kinds, (torch.int32, (2, ranks))), strict=True)
    return _Views(*(piece.view(kind)[: math.prod(shape)].view(shape) for piece, (kind, shape) in pieces))
