"""All-reduce over the GPUs of one machine through each other's memory (NVLink peer access, no multicast).

One shot: every rank writes its x into all others' inboxes, polls its own until everything is there, and sums in rank
order, so that every rank gets the same bits. Data is its own flag (``lamport.py``). Larger x on more than two ranks
take two shots (``two_shots.py``). In one shot a rank sends (ranks - 1) * n bytes; for few rows the time is the latency,
2 µs.

Memory, with the same layout on each rank, all EMPTY initially and again after use:
# inbox (3, ranks, one_shot) bytes: thirds that calls use in turn; by sender
# two_shots.py's, with more than two ranks only
On the rank alone, separate for the two kinds of calls, so that they may be mixed: ``calls`` (lamport.py).
"""

from typing import Any

import torch

from minivllm.kernels._triton import tl, triton
from minivllm.kernels.collectives import two_shots as twice
from minivllm.kernels.collectives.lamport import (
    EMPTY,
    count_call,
    empty,
    floats,
    memory_of_all,
    plus,
    rounded,
    sum_of_all,
    to_send,
)
from minivllm.kernels.collectives.peer_memory import take_peer_memory
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv

_ONE_SHOT = 256 << 10  # bytes: with more than two ranks, larger x takes two shots
_PROGRAMS = 512  # at most; a power of two
_BLOCKS = 512, 2048  # words (4 bytes) per program at a time: 16 bytes per thread, or 64 if there are enough
_WARPS = 4
_ALIGN = 16  # bytes


@triton.jit(do_not_specialize=["capacity4", "n4"])
def _push_kernel(
    x, out, inboxes, calls, capacity4, n4,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # inboxes: (RANKS,) int64, the ranks' addresses. x: (n,), read; out: (n,), written, or added to if ADD. Programs
    # take blocks in turn.
    if PDL:  # the next kernel may load its weights while we wait for the others
        tl.extra.cuda.gdc_launch_dependents()
    TYPE: tl.constexpr = x.dtype.element_ty
    theirs = memory_of_all(inboxes, RANKS)
    inbox = theirs[RANK]
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Sizes in words are passed divided by 4, so that the compiler knows that 16 bytes can be moved at once.
    pid, programs = tl.program_id(0), tl.num_programs(0)
    n, capacity = n4 * 4, capacity4 * 4
    x, out = x.to(tl.pointer_type(tl.int32)), out.to(tl.pointer_type(tl.int32))
    lanes = tl.arange(0, BLOCK)
    coming = tl.load(x + pid * BLOCK + lanes, mask=pid * BLOCK + lanes < n, other=0)  # in flight with the next two
    call, last = tl.load(calls + 2 * pid), tl.load(calls + 2 * pid + 1) * 4
    now, before = call % 3 * RANKS, (call + 2) % 3 * RANKS  # the thirds, in sections of ``capacity``
    for block in range(pid, tl.cdiv(n, BLOCK), programs):
        at = block * BLOCK + lanes
        words = to_send(coming)
        following = at + programs * BLOCK
        coming = tl.load(x + following, mask=following < n, other=0)
        for i in tl.static_range(RANK + 1, RANK + RANKS):  # each rank starts with a different one
            tl.store(theirs[i % RANKS] + (now + RANK) * capacity + at, words, mask=at < n)
    for block in range(pid, tl.cdiv(last, BLOCK), programs):
        at = block * BLOCK + lanes
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                empty(inbox + (before + peer) * capacity + at, at < last)
    count_call(calls, pid, programs, call, n4, ROWS)
    for block in range(pid, tl.cdiv(n, BLOCK), programs):
        at = block * BLOCK + lanes
        own = to_send(tl.load(x + at, mask=at < n, other=0))
        if ADD:
            residual = floats(tl.load(out + at, mask=at < n, other=0), TYPE)
        total = sum_of_all(own, inbox + now * capacity + at, capacity, at < n, RANK, RANKS, TYPE)
        if ADD:
            total = plus(total, residual)
        tl.store(out + at, rounded(total, TYPE), mask=at < n)


class PeerAllReduce:
    """One rank's end. ``memory``: each rank's address of ``nbytes(ranks, capacity)`` bytes, prepared by ``clear``;
    ``capacity``, bytes, is a multiple of 1024."""

    def __init__(self, rank: int, memory: list[int], capacity: int, device: torch.device, keep: Any = None) -> None:
        self.rank, self.ranks, self.capacity = rank, len(memory), capacity
        self.one_shot = _one_shot(self.ranks, capacity)  # bytes up to which one shot is used
        self.limit = capacity  # bytes up to which this is used
        self.pdl = use_pdl(device)
        base = torch.tensor(memory, dtype=torch.int64)
        self.inboxes = base.to(device)
        self.calls = torch.zeros(_PROGRAMS, 2, dtype=torch.int64, device=device)
        self.twice_inboxes = (base + 3 * self.ranks * self.one_shot).to(device)
        self.twice_calls = torch.zeros(twice.PROGRAMS, 2, dtype=torch.int64, device=device)
        self._keep = keep  # owns the memory at these addresses

    @staticmethod
    def nbytes(ranks: int, capacity: int) -> int:
        """Of one rank's memory: 6 * capacity, so 192 MiB for sums of 32 MiB; slightly more with more than two ranks."""
        once = 3 * ranks * _one_shot(ranks, capacity)
        return once + (ranks > 2) * 2 * 3 * ranks * 4 * twice.share(capacity, ranks)

    @staticmethod
    def clear(memory: torch.Tensor) -> None:
        """Prepare ``memory``, (nbytes,) uint8, for the first call."""
        memory.view(torch.int32).fill_(EMPTY)

    @classmethod
    def create(cls, group: Any, capacity: int, device: torch.device) -> "PeerAllReduce":
        """Allocate memory that the group's other ranks can reach, and exchange addresses; all of them must call this.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        capacity, ranks = cdiv(capacity, 1024) * 1024, group.size()
        memory = take_peer_memory(group, cls.nbytes(ranks, capacity), device, cls.clear)
        return cls(memory.rank, memory.addresses, capacity, device, keep=memory)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether ``x`` fits, in size and kind."""
        fits = x.nbytes <= self.limit and x.numel() % 8 == 0
        return fits and x.is_contiguous() and x.dtype in _DTYPES and x.data_ptr() % _ALIGN == 0

    def ways(self, x: torch.Tensor) -> list[bool]:
        """The values that ``two_shots`` may have for ``x``, which ``takes`` accepted."""
        return [two for two in (False, True) if (self.ranks > 2 if two else x.nbytes <= self.one_shot)]

    def __call__(self, x: torch.Tensor, two_shots: bool | None = None) -> torch.Tensor:
        """Sum ``x``, which ``takes`` accepted, over the ranks in place; returns it. ``two_shots``: one of ``ways``."""
        return self._launch(x, x, two_shots, add=False)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, two_shots: bool | None = None) -> torch.Tensor:
        """Add the sum of ``x`` over the ranks to ``residual`` in place, rounded once; ``takes`` accepted both, of the
        same dtype. Returns residual; x is unchanged."""
        return self._launch(x, residual, two_shots, add=True)

    def _launch(self, x: torch.Tensor, out: torch.Tensor, two_shots: bool | None, add: bool) -> torch.Tensor:
        two = x.nbytes > self.one_shot if two_shots is None else two_shots
        if two not in self.ways(x):
            raise ValueError(f"{x.nbytes} bytes over {self.ranks} ranks cannot take {'two shots' if two else 'one'}")
        if not x.numel():
            return out
        same = {"RANK": self.rank, "RANKS": self.ranks, "ADD": add, "PDL": self.pdl, "launch_pdl": self.pdl}
        words = x.nbytes // 4
        if two:
            twice.two_shots_kernel[(twice.programs(x.nbytes, self.ranks),)](
                x, out, self.twice_inboxes, self.twice_calls, twice.share(self.capacity, self.ranks) // 4, words // 4,
                ROWS=twice.PROGRAMS, BLOCK=twice.BLOCK, num_warps=twice.WARPS, **same,
            )  # fmt: skip
        else:
            block = _BLOCKS[words > _BLOCKS[0] * _PROGRAMS]
            _push_kernel[(min(cdiv(words, block), _PROGRAMS),)](
                x, out, self.inboxes, self.calls, self.one_shot // 16, words // 4,
                ROWS=_PROGRAMS, BLOCK=block, num_warps=_WARPS, **same,
            )  # fmt: skip
        return out


def _one_shot(ranks: int, capacity: int) -> int:
    return capacity if ranks == 2 else min(capacity, _ONE_SHOT)


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def all_reduce_reference(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of every rank's ``x`` in float32, in rank order, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)
