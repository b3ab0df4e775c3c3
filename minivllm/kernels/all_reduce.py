"""Sum over the GPUs of one machine through each other's memory (NVLink peer access, no multicast).

One shot: every rank puts its x where the others can read it, waits until they have done so, too, and adds up all of
them in the order of the ranks, so that every rank gets the same bytes. Two shots, for larger x on more than two ranks:
a rank adds up its share only, and after a second wait reads the others' sums.

Bytes that a rank reads over NVLink: one shot (ranks - 1) * n, two shots 2 * (ranks - 1) / ranks * n, at about 400 GB/s
on an H200. For a few rows the time is that of the waits, a few µs.

Memory, of the same layout on each rank; peers read the data and write the flags:
# data (2, capacity) bytes: calls take turns, so that one may write while a slow peer still reads the one before
# flags (PROGRAMS, ranks) int64: flags[b, r] is how many waits program b of rank r has come to
On the rank alone: state (2,) int64: waits so far (two a call), and how many programs of this call are done.

Why taking turns is enough: a rank that writes into a half again, two calls later, has seen every peer begin the call
between, and a peer begins a call when its last one is complete. Calls are counted on the device, by the last program of
a call to end, so a captured graph may be replayed at will, between any other calls; all ranks must make the same ones.
"""

from typing import Any

import torch

from minivllm.kernels._triton import cdiv, tl, triton
from minivllm.kernels.pdl import use_pdl

PROGRAMS = 64  # at most; all of a call's run at the same time
_BLOCK = 2048  # elements that a program takes at once
_ALIGN = 16  # bytes


@triton.jit
def _meet(flags, rank, pid, goal, RANKS: tl.constexpr):
    """Tell program ``pid`` of every rank that we are here, and wait until all of them are."""
    tl.debug_barrier()  # what all threads wrote goes before
    for peer in tl.static_range(RANKS):
        theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs + pid * RANKS + rank, goal, sem="release", scope="sys")
    ours = tl.load(flags + rank).to(tl.pointer_type(tl.int64))
    for peer in tl.static_range(RANKS):
        while tl.atomic_add(ours + pid * RANKS + peer, 0, sem="acquire", scope="sys") < goal:
            pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank", "capacity8", "n8"])
def _all_reduce_kernel(
    x, out, data, flags, state, rank, capacity8, n8,
    RANKS: tl.constexpr, TWO_SHOTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # data, flags: (RANKS,) int64, the ranks' addresses. x: (n,), read; out: (n,), written, or added to if ADD. Programs
    # take every so many blocks.
    if PDL:  # what comes next may load its weights while we wait for the others
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # n and the capacity, in elements, come divided by 8, so that the compiler sees that 16 bytes can be moved at once.
    pid, programs = tl.program_id(0), tl.num_programs(0)
    n, capacity = n8 * 8, capacity8 * 8
    waits = tl.load(state)
    half = (waits // 2) % 2 * capacity  # elements
    lanes = tl.arange(0, BLOCK)
    mine = tl.multiple_of(tl.load(data + rank).to(tl.pointer_type(x.dtype.element_ty)), 16) + half
    for block in range(pid, tl.cdiv(n, BLOCK), programs):
        at = block * BLOCK + lanes
        tl.store(mine + at, tl.load(x + at, mask=at < n), mask=at < n)
    _meet(flags, rank, pid, waits + 1, RANKS)
    if TWO_SHOTS:
        # Of the blocks that a program takes, rank r adds up each RANKS-th, and puts the sum in its own part's place.
        for block in range(pid + rank * programs, tl.cdiv(n, BLOCK), programs * RANKS):
            at = block * BLOCK + lanes
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for peer in tl.static_range(RANKS):
                theirs = tl.multiple_of(tl.load(data + peer).to(tl.pointer_type(x.dtype.element_ty)), 16) + half
                total += tl.load(theirs + at, mask=at < n, other=0.0, cache_modifier=".cg").to(tl.float32)
            tl.store(mine + at, total.to(x.dtype.element_ty), mask=at < n)
        _meet(flags, rank, pid, waits + 2, RANKS)
        for peer in tl.static_range(RANKS):
            theirs = tl.multiple_of(tl.load(data + peer).to(tl.pointer_type(x.dtype.element_ty)), 16) + half
            for block in range(pid + peer * programs, tl.cdiv(n, BLOCK), programs * RANKS):
                at = block * BLOCK + lanes
                total = tl.load(theirs + at, mask=at < n, cache_modifier=".cg").to(tl.float32)
                if ADD:
                    total += tl.load(out + at, mask=at < n).to(tl.float32)
                tl.store(out + at, total.to(x.dtype.element_ty), mask=at < n)
    else:
        for block in range(pid, tl.cdiv(n, BLOCK), programs):
            at = block * BLOCK + lanes
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for peer in tl.static_range(RANKS):
                theirs = tl.multiple_of(tl.load(data + peer).to(tl.pointer_type(x.dtype.element_ty)), 16) + half
                total += tl.load(theirs + at, mask=at < n, other=0.0, cache_modifier=".cg").to(tl.float32)
            if ADD:
                total += tl.load(out + at, mask=at < n).to(tl.float32)
            tl.store(out + at, total.to(x.dtype.element_ty), mask=at < n)
    # The last program to end counts the call; every other one has read ``waits`` by then.
    tl.debug_barrier()
    done = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if done == programs - 1:
        tl.store(state + 1, 0)
        tl.store(state, waits + 2)


class PeerAllReduce:
    """One rank's end. ``data`` and ``flags`` are every rank's addresses, of ``capacity`` bytes twice, and of zeros."""

    def __init__(
        self, rank: int, data: list[int], flags: list[int], capacity: int, device: torch.device, keep: Any = None
    ) -> None:
        self.rank, self.ranks, self.capacity = rank, len(data), capacity
        self.data = torch.tensor(data, dtype=torch.int64, device=device)
        self.flags = torch.tensor(flags, dtype=torch.int64, device=device)
        self.state = torch.zeros(2, dtype=torch.int64, device=device)
        self.one_shot = capacity if self.ranks == 2 else 256 << 10  # bytes up to which one shot is taken
        self.limit = capacity  # bytes up to which this is taken
        self.pdl = use_pdl(device)
        self._keep = keep  # what owns the memory behind the addresses

    @classmethod
    def create(cls, group: Any, capacity: int, device: torch.device) -> "PeerAllReduce":
        """Take memory that the group's other ranks can reach, and exchange addresses; every rank of it calls this.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        capacity = cdiv(capacity, 1024) * 1024
        ranks = dist.get_world_size(group)
        memory = symmetric.empty(2 * capacity + 8 * PROGRAMS * ranks, dtype=torch.uint8, device=device)
        memory.zero_()
        handle = symmetric.rendezvous(memory, group)
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[device.index])  # zeros everywhere before anybody's first flag
        offset = memory.data_ptr() - int(handle.buffer_ptrs[handle.rank])  # in its allocation, the same on all ranks
        data = [int(base) + offset for base in handle.buffer_ptrs]
        flags = [address + 2 * capacity for address in data]
        return cls(handle.rank, data, flags, capacity, device, keep=(memory, handle))

    def takes(self, x: torch.Tensor) -> bool:
        """Whether ``x`` fits, in size and kind."""
        fits = x.nbytes <= self.limit and x.numel() % 8 == 0
        return fits and x.is_contiguous() and x.dtype in _DTYPES and x.data_ptr() % _ALIGN == 0

    def __call__(self, x: torch.Tensor, two_shots: bool | None = None) -> torch.Tensor:
        """Sum ``x``, which ``takes`` accepted, over the ranks in place; returns it."""
        return self._launch(x, x, two_shots, add=False)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, two_shots: bool | None = None) -> torch.Tensor:
        """Add the sum of ``x`` over the ranks to ``residual``, in place, rounded once; ``takes`` accepted both, of one
        dtype. Returns residual; x stays as it was."""
        return self._launch(x, residual, two_shots, add=True)

    def _launch(self, x: torch.Tensor, out: torch.Tensor, two_shots: bool | None, add: bool) -> torch.Tensor:
        n = x.numel()
        if n:
            two = x.nbytes > self.one_shot if two_shots is None else two_shots
            programs = min(cdiv(n, _BLOCK), PROGRAMS)
            _all_reduce_kernel[(programs,)](
                x, out, self.data, self.flags, self.state, self.rank, self.capacity // x.element_size() // 8, n // 8,
                RANKS=self.ranks, TWO_SHOTS=two, ADD=add, BLOCK=_BLOCK, PDL=self.pdl, num_warps=8, launch_pdl=self.pdl,
            )  # fmt: skip
        return out


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def all_reduce_reference(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of every rank's ``x`` in float32, in the order of the ranks, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)
