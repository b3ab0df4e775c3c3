"""The all-reduce's second kernel (``all_reduce.py``): each rank sums its share and sends the result to the others.

A reduce-scatter and an all-gather of words that are their own flag (``lamport.py``), so two consecutive trips
over NVLink; a rank sends 2 * (ranks - 1) / ranks * n bytes. A program handles chunks of ``BLOCK`` words of each rank's
share: it sends all others theirs, sums its own as they arrive and sends the sums, then reads the others' sums.

In every call each rank waits for all others, if not for their parts, then for a sum, whose rank waited for all parts.

Memory, with the same layout on each rank: inbox (2, 3, ranks, share) words, all EMPTY initially and again after use:
parts, then sums; thirds that calls use in turn; by sender. A share is a rank's part of the largest x.
"""

# In a Triton kernel, tuples grow by + only.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from minivllm.kernels._triton import tl, triton
from minivllm.kernels.collectives.lamport import (
    arrived,
    count_call,
    empty,
    floats,
    memory_of_all,
    plus,
    rounded,
    sum_of_all,
    to_send,
)
from minivllm.rounding import cdiv

PROGRAMS = 256  # at most; a power of two
BLOCK = 512  # words (4 bytes)
WARPS = 4


def share(nbytes: int, ranks: int) -> int:
    """Words in one rank's share of ``nbytes``."""
    return cdiv(nbytes, 4 * BLOCK * ranks) * BLOCK


def programs(nbytes: int, ranks: int) -> int:
    """The fewest programs with as many chunks each as the busiest of ``PROGRAMS`` would have."""
    chunks = cdiv(nbytes, 4 * BLOCK * ranks)
    return cdiv(chunks, cdiv(chunks, PROGRAMS))


@triton.jit(do_not_specialize=["share4", "n4"])
def two_shots_kernel(
    x, out, inboxes, calls, share4, n4,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # inboxes: (RANKS,) int64, the ranks' addresses. x: (n,), read; out: (n,), written, or added to if ADD (by each
    # rank, in its share). Programs take chunks of RANKS blocks in turn.
    if PDL:  # the next kernel may load its weights while we wait for the others
        tl.extra.cuda.gdc_launch_dependents()
    TYPE: tl.constexpr = x.dtype.element_ty
    theirs = memory_of_all(inboxes, RANKS)
    inbox = theirs[RANK]
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Sizes in words are passed divided by 4, so that the compiler knows that 16 bytes can be moved at once.
    pid, programs = tl.program_id(0), tl.num_programs(0)
    n, share = n4 * 4, share4 * 4
    x, out = x.to(tl.pointer_type(tl.int32)), out.to(tl.pointer_type(tl.int32))
    lanes = tl.arange(0, BLOCK)
    call, last = tl.load(calls + 2 * pid), tl.load(calls + 2 * pid + 1) * 4
    now, before = call % 3 * RANKS, (call + 2) % 3 * RANKS  # the thirds for parts, in shares
    sums: tl.constexpr = 3 * RANKS  # those for sums come so many shares later
    CHUNK: tl.constexpr = RANKS * BLOCK
    for chunk in range(pid, tl.cdiv(n, CHUNK), programs):
        for i in tl.static_range(RANK + 1, RANK + RANKS):  # each rank starts with a different one
            at = chunk * CHUNK + i % RANKS * BLOCK + lanes
            words = to_send(tl.load(x + at, mask=at < n, other=0))
            tl.store(theirs[i % RANKS] + (now + RANK) * share + chunk * BLOCK + lanes, words, mask=at < n)
    for chunk in range(pid, tl.cdiv(last, CHUNK), programs):
        place = inbox + before * share + chunk * BLOCK + lanes
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                empty(place + peer * share, chunk * CHUNK + RANK * BLOCK + lanes < last)
                empty(place + (sums + peer) * share, chunk * CHUNK + peer * BLOCK + lanes < last)
    count_call(calls, pid, programs, call, n4, ROWS)
    for chunk in range(pid, tl.cdiv(n, CHUNK), programs):
        at = chunk * CHUNK + RANK * BLOCK + lanes
        place = now * share + chunk * BLOCK + lanes
        own = tl.load(x + at, mask=at < n, other=0)
        if ADD:
            residual = floats(tl.load(out + at, mask=at < n, other=0), TYPE)
        total = sum_of_all(own, inbox + place, share, at < n, RANK, RANKS, TYPE)
        if ADD:
            total = plus(total, residual)
        words = to_send(rounded(total, TYPE))
        for i in tl.static_range(RANK + 1, RANK + RANKS):
            tl.store(theirs[i % RANKS] + (sums + RANK) * share + place, words, mask=at < n)
        tl.store(out + at, words, mask=at < n)
    for chunk in range(pid, tl.cdiv(n, CHUNK), programs):
        place = inbox + (sums + now) * share + chunk * BLOCK + lanes
        found = ()
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                found = found + (lanes,)  # not read
            else:
                mask = chunk * CHUNK + peer * BLOCK + lanes < n
                found = found + (tl.load(place + peer * share, mask=mask, other=0, volatile=True),)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                at = chunk * CHUNK + peer * BLOCK + lanes
                tl.store(out + at, arrived(found[peer], place + peer * share, at < n), mask=at < n)
