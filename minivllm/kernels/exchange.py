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
# arrived (2, ranks) int32: the number of the last call whose inbox, and whose part of the stream, rank i has sent
On the rank alone:
# outbox, as inbox: what is being sent

Why nothing is overwritten too early. A call is ``begin``, ``send`` to each other rank, ``collect``, ``share``, then
``arrive`` from each; all ranks make the same ones.
1. The inbox: a rank sends for call n + 1 behind its ``arrive`` of call n, which waits for our ``share``, which stands
   behind our ``collect``, which read it.
2. The stream, and the factors: a rank shares in call n + 1 when it has collected what we sent for it; we sent that
   behind all that reads the rows of call n.
3. ``arrived``: by 1 and 2 a number is replaced when it has been seen, so to be equal to it is enough.
4. The outbox, and the part of the stream that is being shared: ``begin`` waits for our own copies.
A kernel that waits by itself (``arrival``) waits for as much as ``arrive`` from each. It may hold every multiprocessor
meanwhile: what it waits for are copies of memory on other GPUs, which engines do, and which were launched before it.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from minivllm.kernels._triton import cdiv, compiling
from minivllm.kernels.capture import captured
from minivllm.kernels.peer_memory import take_peer_memory
from minivllm.kernels.rms_norm import add_rows_factors

MIN_PART = 2048  # rows, of two ranks: a product of fewer takes longer a row
_TILE = 256  # rows of a part are a multiple of it, but of the last: a pair of tiles of ``persistent_linear``
_NUMBERS = 1 << 10  # calls are counted modulo this
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
        self.device, self._keep = memory[rank].device, keep  # what owns the memory
        self.others = [(rank + i) % self.ranks for i in range(1, self.ranks)]
        views = [_views(each, self.ranks, rows, width, dtype) for each in memory]
        self.stream, self.factors, self.inbox, self._arrived = views[rank]
        self._everywhere = views
        self._inboxes = {peer: views[peer].inbox[rank - (rank > peer)] for peer in self.others}
        self._told = [view.arrived[:, rank] for view in views]
        self._outbox = torch.empty_like(self.inbox)
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=self.device)
        self._call = 0
        self._lane = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None

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
        fits = least_rows(self.ranks) <= x.shape[0] <= self.max_rows and x.dtype == self.stream.dtype
        # Kernels that are only compiled wait for nobody, and the numbers of calls are not a graph's to keep.
        return fits and x.device == self.device and not compiling() and not captured(x)

    def parts(self, rows: int) -> list[slice]:
        """Each rank's rows of so many."""
        size = part_rows(rows, self.ranks)
        return [slice(min(i * size, rows), min((i + 1) * size, rows)) for i in range(self.ranks)]

    # ------------------------------------------------------------------ a call

    def begin(self) -> None:
        """A call; what was sent and shared in the last one may be written over by what is launched from now on."""
        self._call = self._call % (_NUMBERS - 1) + 1  # never 0, which stands there at the start
        self.settle()

    def outbox(self, peer: int, rows: int) -> torch.Tensor:
        """Where to write what this rank computes of the part of ``peer``, (rows, width)."""
        return self._outbox[peer - (peer > self.rank)][:rows]

    def send(self, peer: int, rows: int) -> None:
        """Send it."""
        with self._beside():
            self._inboxes[peer][:rows].copy_(self.outbox(peer, rows))
            self._tell(peer, _PARTIAL)

    def collect(self, own: slice, eps: float) -> None:
        """Add to this rank's part of the stream, the rows ``own``, what the others sent of it, in their order. ``eps``:
        of the norm behind, for the factors."""
        for peer in self.others:
            self._wait(peer, _PARTIAL)
        add_rows_factors(self.stream[own], self.inbox, self.factors[own], eps)

    def share(self, own: slice) -> None:
        """Send them and their factors to all others; the call ends when theirs ``arrive``."""
        with self._beside():
            for peer in self.others:
                self._everywhere[peer].stream[own].copy_(self.stream[own])
                self._everywhere[peer].factors[own].copy_(self.factors[own])
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
        if self._lane is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._lane)

    def all_reduce(self, x: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
        """A call by itself: the sum over the ranks of x, (t, width); returned in ``stream``, with ``factors``."""
        parts, stream = self.parts(x.shape[0]), self.stream[: x.shape[0]]
        self.begin()
        for peer in self.others:
            theirs = x[parts[peer]]
            self.outbox(peer, len(theirs)).copy_(theirs)
            self.send(peer, len(theirs))
        own = parts[self.rank]
        stream[own].copy_(x[own])
        self.collect(own, eps)
        self.share(own)
        for peer in self.others:
            self.arrive(peer)
        return stream

    # ------------------------------------------------------------------ copies

    def _beside(self) -> AbstractContextManager[Any]:
        """Behind all that is launched so far, and beside what comes."""
        if self._lane is None:
            return nullcontext()
        self._lane.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._lane)

    def _tell(self, peer: int, what: int) -> None:
        """By a copy, which engines do in order: behind those before it."""
        self._told[peer][what : what + 1].copy_(self._numbers[self._call : self._call + 1])

    def _wait(self, peer: int, what: int) -> None:
        number = self._arrived[what, peer]
        if self._lane is None:
            while int(number) != self._call:
                time.sleep(0)
            return
        from cuda.bindings import driver

        (error,) = driver.cuStreamWaitValue32(
            torch.cuda.current_stream(self.device).cuda_stream,
            number.data_ptr(),
            self._call,
            driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ,
        )
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuStreamWaitValue32: {error.name}")


def least_rows(ranks: int) -> int:
    """Of a step that is summed here. More ranks than two have more parts to multiply and to send, one after another:
    with 2,048 rows each Qwen3-14B's `mixed` on four GPUs took 9.7 s, 9.3 without, on two machines of equal `bs1`."""
    return MIN_PART * (1 if ranks == 2 else 2) * ranks


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
