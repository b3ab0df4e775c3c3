"""The all-reduce's second kernel (``kernels/all_reduce.py``): every rank adds up its share and reads the others' sums.

Two waits for the others, by flags with release and acquire; bytes over NVLink 2 * (ranks - 1) / ranks * n a rank.

Memory, of the same layout on each rank; peers read the data and write the flags:
# data (2, capacity) bytes: calls take turns, so that one may write while a slow peer still reads the one before
# flags (PROGRAMS, ranks) int64: flags[b, r] is how many waits program b of rank r has come to
On the rank alone: state (2,) int64: waits so far (two a call), and how many programs of this call are done.

Why taking turns is enough: a rank that writes into a half again, two calls later, has seen every peer begin the call
between, and a peer begins a call when its last one is complete. The last program of a call to end counts it.
"""

from minivllm.kernels._triton import tl, triton

PROGRAMS = 64  # at most; all of a call's run at the same time
BLOCK = 2048  # elements that a program takes at once


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


@triton.jit
def _part(data, rank, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(data + rank).to(tl.pointer_type(TYPE)), 16)


@triton.jit(do_not_specialize=["rank", "capacity8", "n8"])
def two_shots_kernel(
    x, out, data, flags, state, rank, capacity8, n8,
    RANKS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # data, flags: (RANKS,) int64, the ranks' addresses. x: (n,), read; out: (n,), written, or added to if ADD. Programs
    # take every so many blocks.
    if PDL:  # what comes next may load its weights while we wait for the others
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # n and the capacity, in elements, come divided by 8, so that the compiler sees that 16 bytes can be moved at once.
    TYPE: tl.constexpr = x.dtype.element_ty
    pid, programs = tl.program_id(0), tl.num_programs(0)
    n, capacity = n8 * 8, capacity8 * 8
    waits = tl.load(state)
    half = (waits // 2) % 2 * capacity  # elements
    lanes = tl.arange(0, BLOCK)
    mine = _part(data, rank, TYPE) + half
    for block in range(pid, tl.cdiv(n, BLOCK), programs):
        at = block * BLOCK + lanes
        tl.store(mine + at, tl.load(x + at, mask=at < n), mask=at < n)
    _meet(flags, rank, pid, waits + 1, RANKS)
    # Of the blocks that a program takes, rank r adds up each RANKS-th, and puts the sum in its own part's place.
    for block in range(pid + rank * programs, tl.cdiv(n, BLOCK), programs * RANKS):
        at = block * BLOCK + lanes
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            theirs = _part(data, peer, TYPE) + half
            total += tl.load(theirs + at, mask=at < n, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(mine + at, total.to(TYPE), mask=at < n)
    _meet(flags, rank, pid, waits + 2, RANKS)
    for peer in tl.static_range(RANKS):
        theirs = _part(data, peer, TYPE) + half
        for block in range(pid + peer * programs, tl.cdiv(n, BLOCK), programs * RANKS):
            at = block * BLOCK + lanes
            total = tl.load(theirs + at, mask=at < n, cache_modifier=".cg").to(tl.float32)
            if ADD:
                total += tl.load(out + at, mask=at < n).to(tl.float32)
            tl.store(out + at, total.to(TYPE), mask=at < n)
    # The last program to end counts the call; every other one has read ``waits`` by then.
    tl.debug_barrier()
    done = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if done == programs - 1:
        tl.store(state + 1, 0)
        tl.store(state, waits + 2)
